"""`notso cluster`: run replicas of the server under Ray Serve, on one machine or several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from dataclasses import asdict
from importlib.metadata import version
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from notso.cli import exit_codes, options, terminal
from notso.cli.engines import model_file
from notso.extras import install_line

EXAMPLES = """\
  notso cluster up --replicas 2 --dry-run
  notso cluster up --address auto --replicas 8
  notso cluster down --address auto"""

SHARED_STORES = ("DATABASE_URL", "VALKEY_URL")


def cluster(
    action: Annotated[Literal["up", "down", "status"], typer.Argument(metavar="up|down|status", help="Action.")],
    address: Annotated[
        str | None,
        options.env_option(
            "--address",
            variable="RAY_ADDRESS",
            metavar="HOST:PORT",
            help="Address of a running Ray cluster (auto: the one on this machine).",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", min=1, max=1000, help="Number of replicas.")] = 1,
    max_replicas: Annotated[
        int,
        typer.Option(
            "--max-replicas", metavar="N", min=0, max=1000, help="Autoscale up to this many replicas (0: off)."
        ),
    ] = 0,
    per_machine: Annotated[
        int, typer.Option("--per-machine", metavar="N", min=1, max=100, help="Maximum number of replicas per machine.")
    ] = 1,
    release: Annotated[
        str | None,
        typer.Option(
            "--release", metavar="WORD", help="Release label; changing it replaces all replicas.", show_default=False
        ),
    ] = None,
    model: options.Model = None,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on, on each machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", metavar="PORT", min=1, max=65535, help="Port to listen on.")
    ] = 3000,
    context: options.Context = None,
    kv: options.KV = "auto",
    threads: options.Threads = None,
    device: options.Device = "auto",
    max_num_seqs: options.MaxNumSeqs = None,
    cache_disk: options.CacheDisk = 4.0,
    data_dir: options.DataDir = None,
    api_key_file: options.ApiKeyFile = None,
    allow_host: options.AllowHost = None,
    trust_proxy: options.TrustProxy = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Ray Serve configuration and exit.")] = False,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Run replicas of the server under Ray Serve.

    Requires the optional extra `ray`. With --address, `up` deploys to a running Ray cluster and returns when the
    replicas are ready; run it again to change the deployment, which replaces a fifth of the replicas at a time. Without
    --address, Ray runs on this machine until Ctrl-C. Several replicas require DATABASE_URL and VALKEY_URL, and a public
    --host requires an API key. The configuration contains no secrets: set DATABASE_URL, VALKEY_URL and NOTSO_API_KEY on
    each machine, in the environment in which Ray is started. File paths must be valid on every machine.
    """
    from notso.cluster.plan import NEEDS_SHARED_STORES, ClusterPlan, serve_config
    from notso.web.values.errors import SettingsError
    from notso.web.values.settings import Settings

    if action != "up":
        _stop_or_show(action, address or "auto", as_json)
        return
    Settings(allowed_hosts=tuple(allow_host or ()), trusted_proxies=tuple(trust_proxy or ()))  # raises SettingsError
    path = model_file(model)
    plan = ClusterPlan(
        replicas=replicas,
        max_replicas=max_replicas,
        per_machine=per_machine,
        requests_per_replica=float(max_num_seqs or 16),
        host=host,
        port=port,
        every_machine=dry_run or address is not None,
        release=release or version("notso-smollm3-bot"),
        engine={
            "model": None if path is None else str(path.resolve()),
            "context_tokens": context,
            "threads": threads,
            "device": device,
            "kv": kv,
            "max_num_seqs": max_num_seqs,
            "cache_bytes": int(cache_disk * 10**9),
        },
        settings={
            "data_dir": None if data_dir is None else str(data_dir.resolve()),
            "api_key_file": None if api_key_file is None else str(api_key_file.resolve()),
            "allowed_hosts": list(allow_host or ()),
            "trusted_proxies": list(trust_proxy or ()),
        },
    )
    config = serve_config(plan)
    if not dry_run and address is None and plan.has_several and not all(map(os.environ.get, SHARED_STORES)):
        raise SettingsError(NEEDS_SHARED_STORES, setting="database_url")
    if dry_run:
        terminal.print_line(json.dumps(config, indent=2))  # Ray reads YAML; JSON is a subset of it
        return
    _up(config, address, plan.replicas, f"http://{host}:{port}/", as_json)


def ray_control() -> ModuleType:
    from notso.cluster.plan import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        # Ray reads these variables when it is imported.
        os.environ.setdefault(name, value)
    try:
        from notso.cluster import control
    except ModuleNotFoundError as error:
        from notso.cluster.plan import ClusterError

        if error.name != "ray":
            raise
        raise ClusterError(f"Ray is not installed: {install_line('ray')}") from None
    return control


def _up(config: dict[str, Any], address: str | None, replicas: int, url: str, as_json: bool) -> None:
    control = ray_control()
    stop_requested = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Signals are handled here, so that replicas finish the requests in progress before Ray is stopped. If SIGHUP is
        # ignored, as under nohup, it stays ignored.
        if each != signal.SIGHUP or signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, lambda number, frame: stop_requested.set())
    with control.ray_connection(address, max(replicas, os.cpu_count() or 1)):
        with terminal.waiting("starting the replicas", silent=as_json):
            is_up = control.deploy(config, stop_requested.is_set)
        if is_up and as_json:
            terminal.print_json(
                {"event": "open", "url": url, "address": control.cluster_address(), **asdict(control.status())}
            )
        elif is_up:
            terminal.print_line(f"open     {url}" + (" (Ctrl-C stops)" if address is None else ""))
            terminal.print_line(f"address  {control.cluster_address()} (for --address)")
        if address is None:
            stop_requested.wait()
            with contextlib.suppress(OSError):  # the terminal may be closed
                terminal.note("Stopping: the replicas finish the requests in progress first.")
            control.shut_down()
        elif not is_up:
            terminal.note(
                "Stopped before the replicas were ready. Ray continues to start them; "
                f"`notso cluster down --address {address}` removes them."
            )
            raise typer.Exit(exit_codes.INTERRUPTED)


def _stop_or_show(action: str, address: str, as_json: bool) -> None:
    control = ray_control()
    with control.ray_connection(address, 1):
        if action == "down":
            control.shut_down()
        found = control.status()
    if as_json:
        terminal.print_json(asdict(found))
        return
    counted = ", ".join(f"{count} {state.lower()}" for state, count in found.replicas.items())
    terminal.print_line(f"{found.state.lower().replace('_', ' ')}{f': {counted}' if counted else ''}")
    if found.message:
        terminal.note(terminal.on_one_line(found.message)[:1000])
