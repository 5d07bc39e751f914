"""Two servers over one store that meet at a Valkey server."""

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
    """Of several servers in one process: opened by the first of them, closed by the test."""

    opened = False

    async def open(self) -> None:
        if not self.opened:
            self.opened = True
            await super().open()

    async def close(self) -> None:
        """Others may still use it."""

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
    """However slow the machine is, the server is there until it is stopped."""
    monkeypatch.setattr(valkey_exchange, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(valkey_exchange, "COUNTER_ANSWER_SECONDS", 60.0)


@pytest.fixture
def valkey(valkey_process: ValkeyServer) -> ValkeyServer:
    """Empty, and there."""
    valkey_process.stop()
    valkey_process.start()
    return valkey_process


@pytest.fixture
def replica(
    valkey: ValkeyServer, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Starts servers over the same store."""
    store = OneStore(tmp_path / "data")
    monkeypatch.setattr(app, "store_of", lambda settings: store)

    def begin(engine: Any, **settings: Any) -> Any:
        return start(engine, valkey_url=valkey.url, **settings).ready()

    return begin
