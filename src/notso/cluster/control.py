"""Connect to Ray, and deploy to Ray Serve."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from notso.cluster.plan import APPLICATION, ClusterError, last_error

# Size of Ray's object store. It holds little data here, and by default, Ray would reserve 30% of the machine's memory
# for it.
OBJECT_STORE_BYTES = 100 * 2**20
POLL_INTERVAL_SECONDS = 0.5
CONNECT_SECONDS = 10.0


@contextlib.contextmanager
def ray_connection(address: str | None, cpus: int) -> Iterator[None]:
    """Connect to Ray at `address` ('auto': on this machine), or start Ray if it is None. Raises ClusterError."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        if address is not None:
            host, _, port = address.rpartition(":")
            if port.isdecimal() and "/" not in host:  # neither `auto` nor a ray:// URL
                # Ray itself would retry for minutes without reporting the reason.
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            ray.init(address=address, **quiet)
        else:
            os.umask(0o077)  # protects the file in which Ray stores its authentication token
            # Ray's processes inherit the blocked signal: closing the terminal must not kill them before the replicas
            # have finished the requests in progress.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            try:
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    **quiet,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except (RayError, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ClusterError(f"Ray could not be reached or started: {' '.join(str(error).split())}") from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def deploy(config: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> bool:
    """Deploy `config`, and wait until the replicas are ready or `is_cancelled()` returns true.

    Returns whether they are ready. Raises ClusterError.
    """
    # Serve keeps the running replicas, or replaces them gradually if the configuration requires it.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.yaml"  # JSON is a subset of YAML
        file.write_text(json.dumps(config))
        command = [
            sys.executable,
            "-m",
            "ray.serve.scripts",
            "run",
            "--non-blocking",
            "--address",
            cluster_address(),
            str(file),
        ]
        # The command runs in its own session, so that Ctrl-C in the terminal does not interrupt it.
        completed = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if completed.returncode:
        raise ClusterError(f"Serve rejected the configuration: {last_error(completed.stderr)}")
    while not is_cancelled():
        found = status()
        if found.state == "RUNNING":
            return True
        if found.state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ClusterError(f"the replicas did not start: {last_error(found.message)}")
        time.sleep(POLL_INTERVAL_SECONDS)
    return False


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    state: str = "NOT_STARTED"  # state of the Serve application
    replicas: dict[str, int] = field(default_factory=dict)  # state -> number of replicas
    message: str = ""


def status() -> ClusterStatus:
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return ClusterStatus()
    deployments = application.deployments.values()
    replicas = {str(state): count for each in deployments for state, count in each.replica_states.items()}
    messages = [application.message, *(each.message for each in deployments)]
    return ClusterStatus(application.status.value, replicas, "\n".join(messages).strip())


def shut_down() -> None:
    with contextlib.suppress(serve.exceptions.RayServeException, RayError):  # raised if nothing is deployed
        serve.delete(APPLICATION)
        serve.shutdown()
