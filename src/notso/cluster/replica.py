"""Ray Serve deployment of a replica: the web application and an engine in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve

from notso.cluster.front import ReplicaMiddleware
from notso.cluster.plan import DEPLOYMENT, METRIC, NEEDS_SHARED_STORES, ProgressMonitor, check_settings
from notso.smollm3 import Engine, EngineConfig, EngineError
from notso.system.processes import make_undumpable
from notso.text_file import SECRET_BYTES, read_text
from notso.web.app import Components, create_app, drain_work
from notso.web.edge.watchdog import Watchdog
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings


@serve.ingress()
class Replica:
    """Replica of the server. `arguments`: see `build`."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        make_undumpable()
        self._settings = _settings(arguments)
        self._watchdog = Watchdog()
        self._config = EngineConfig(**arguments["engine"])
        self._heartbeat = ProgressMonitor()
        self._parts: Components

    def __serve_build_asgi_app__(self) -> ReplicaMiddleware:
        app = create_app(self._load, self._settings)
        self._parts = app.state.parts
        return ReplicaMiddleware(app, ready=self._ready, drain=self._drain)

    async def check_health(self) -> None:
        """Raise EngineError if the engine cannot answer requests."""
        host = self._parts.shared.engine
        if host.state == "failed":
            raise EngineError(host.failure)
        if (stats := host.stats()) is not None:
            self._heartbeat.record_progress(stats, time.monotonic())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        stats = self._parts.shared.engine.stats()
        running = stats.running if stats is not None else 0
        return {METRIC: float(running + self._parts.shared.requests.waiting)}

    def _load(self) -> Engine:
        self._settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache_dir = str(self._settings.directory / "kv") if self._config.cache_bytes else None
        return Engine.load(replace(self._config, cache_dir=cache_dir))

    async def _ready(self) -> None:
        host = self._parts.shared.engine
        await host.wait_for_first_load()
        if host.state == "failed":
            raise EngineError(host.failure)
        self._watchdog.start()

    async def _drain(self) -> None:
        await drain_work(self._parts)
        self._watchdog.stop()


def build(arguments: dict[str, Any]) -> Any:
    """Return the Serve application. `arguments`: the `args` of the Serve configuration."""
    deployment = serve.deployment(name=DEPLOYMENT)(Replica)
    return deployment.bind(arguments)


def _settings(arguments: Mapping[str, Any]) -> Settings:
    options = arguments["settings"]
    check_settings(options.keys() - {"host", "port"})
    directory = Path(options["data_dir"]) if options.get("data_dir") else Settings().directory
    if arguments["per_machine"] > 1:  # replicas on one machine must not share a data directory
        directory = directory / f"replica-{serve.get_replica_context().rank.local_rank}"
    key_file = options.get("api_key_file")
    settings = Settings(
        host=options["host"],
        port=options["port"],
        data_dir=directory,
        database_url=os.environ.get("DATABASE_URL") or None,
        valkey_url=os.environ.get("VALKEY_URL") or None,
        api_key=read_text(Path(key_file), SECRET_BYTES).strip()
        if key_file
        else os.environ.get("NOTSO_API_KEY") or None,
        allowed_hosts=tuple(options.get("allowed_hosts", ())),
        trusted_proxies=tuple(options.get("trusted_proxies", ())),
    )
    if arguments["has_several"] and not (settings.database_url and settings.valkey_url):
        raise SettingsError(NEEDS_SHARED_STORES, setting="database_url")
    return settings
