"""Fixtures that run the same tests on every store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from web.store.postgres_server import PostgresServer, postgres_server
from web.store.some_chats import run_with_store

from notso.web.store.sqlite.store import SQLiteStore


class Kept:
    """A place for conversations; each `run` opens a store there and closes it."""

    def __init__(self, kind: str, store: Callable[[], Any]) -> None:
        self.kind = kind
        self.store = store

    def run(self, work: Callable[[Any], Awaitable[None]]) -> None:
        run_with_store(self.store(), work)


@pytest.fixture(params=["sqlite", "postgres"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    if request.param == "sqlite":
        return Kept("sqlite", lambda: SQLiteStore(tmp_path))
    url = request.getfixturevalue("database")
    from notso.web.store.postgres.store import PostgresStore

    return Kept("postgres", lambda: PostgresStore(url))


@pytest.fixture(scope="session")
def restarted() -> Iterator[PostgresServer]:
    """A PostgreSQL server that syncs to disk and that tests may stop and restart."""
    with postgres_server(durable=True) as server:
        yield server
