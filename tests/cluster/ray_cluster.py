"""`notso cluster up` as a user starts it: replicas of the demo model on this machine, over one PostgreSQL and one
Valkey.
Ray's processes are children of the command and end with it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos.cluster import free_port
from valkey_server import MISSING as NO_VALKEY
from valkey_server import PROGRAM as VALKEY
from valkey_server import ValkeyServer
from web.store.postgres_server import postgres_server

PATIENCE_SECONDS = 180.0
NO_RAY = "Ray is not installed here: `make test-ray` has an environment with it"
HAS_RAY = importlib.util.find_spec("ray") is not None


class RayCluster:
    """A cluster whose replicas have one thread each."""

    def __init__(self, folder: Path, replicas: int = 2, **environment: str) -> None:
        if not HAS_RAY:
            pytest.skip(NO_RAY)
        if VALKEY is None:
            pytest.skip(NO_VALKEY)
        self._parts = ExitStack()
        self.postgres = self._parts.enter_context(postgres_server())
        self.database = self.postgres.new_database()
        valkey = ValkeyServer(folder)
        self._parts.callback(valkey.stop)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        home = folder / "home"
        home.mkdir()
        self._environment = {
            **os.environ,
            "HOME": str(home),  # Ray's token is stored in the home folder
            "DATABASE_URL": self.database,
            "VALKEY_URL": valkey.url,
            "NOTSO_DATA_DIR": str(folder / "data"),
            **environment,
        }
        self._options = ["--replicas", str(replicas), "--per-machine", str(replicas), "--port", str(self.port)]
        self._options += ["--threads", "1", "--json"]
        self._process = self._start("up", *self._options)
        self._parts.callback(self._end)
        try:
            self._read_address()
        except BaseException:
            self.close()
            raise

    def _read_address(self) -> None:
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline() or "{}")
        assert told.get("event") == "open", told
        self._address = ("--address", told["address"])

    def update(self, release: str) -> None:
        """Update the cluster as an operator does from another terminal; return when all replicas run that release."""
        output, _ = self._start("up", *self._address, "--release", release, *self._options).communicate()
        assert json.loads(output)["event"] == "open", output

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._start("status", *self._address, "--json").communicate()[0])
        return found

    def replicas(self) -> list[int]:
        """Return the process ids of this cluster's replicas."""
        parents, names = {}, {}
        for folder in Path("/proc").iterdir():
            try:
                about = (folder / "stat").read_text().rpartition(")")[2].split()
                names[int(folder.name)] = (folder / "cmdline").read_bytes()
                parents[int(folder.name)] = int(about[1])
            except (OSError, ValueError):
                continue

        def is_ours(process: int) -> bool:
            while process > 1 and process != self._process.pid:
                process = parents.get(process, 0)
            return process == self._process.pid

        return [each for each, name in names.items() if name.startswith(b"ray::ServeReplica") and is_ours(each)]

    def kill(self) -> int:
        victim = random.choice(self.replicas())
        os.kill(victim, signal.SIGKILL)
        return victim

    def wait_for_replicas(self, count: int, without: int) -> None:
        """Wait until `count` replicas run, without the killed one, which Serve counts for another second or two."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(there := set(self.replicas()) - {without}) < count or self.status()["replicas"] != {"RUNNING": count}:
            assert time.monotonic() < deadline, (there, self.status())
            time.sleep(0.2)

    def close(self) -> None:
        self._parts.close()

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
        command = [*ends_with_us, sys.executable, "-m", "notso", "cluster", *arguments]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True)

    def _end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(PATIENCE_SECONDS) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()
