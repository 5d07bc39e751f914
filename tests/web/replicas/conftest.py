"""Fixtures: two servers over one store, connected through a Valkey server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkey_server import MISSING, PROGRAM, ValkeyServer

from notso.web import app
from notso.web.replicas import valkey_exchange
from notso.web.store.sqlite.store import SQLiteStore


class OneStore(SQLiteStore):
    """A store shared by several servers in one process. The first server opens it; the test closes it."""

    opened = False

    async def open(self) -> None:
        if not self.opened:
            self.opened = True
            await super().open()

    async def close(self) -> None:
        """Do nothing, because other servers may still use the store."""

    async def close_for_good(self) -> None:
        await super().close()


@pytest.fixture(scope="session")
def valkey_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the Valkey timeouts so that a slow machine does not look like a stopped server."""
    monkeypatch.setattr(valkey_exchange, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(valkey_exchange, "COUNTER_ANSWER_SECONDS", 60.0)


@pytest.fixture
def valkey(valkey_process: ValkeyServer) -> ValkeyServer:
    """Return an empty, running Valkey server."""
    valkey_process.stop()
    valkey_process.start()
    return valkey_process


@pytest.fixture
def replica(
    valkey: ValkeyServer, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that starts servers over the same store."""
    store = OneStore(tmp_path / "data")
    monkeypatch.setattr(app, "configure_store", lambda settings: store)

    def begin(engine: Any, **settings: Any) -> Any:
        return start(engine, valkey_url=valkey.url, **settings).ready()

    return begin
