"""People and keys in a SQLite file of their own, which several processes may write: with a rollback journal, for a WAL
has a fault under two writers (see connection.py)."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sql.database import Rows, Statements, Value
from notso.web.store.sqlite.connection import BUSY_MS, snapshot, storage_errors, transaction
from notso.web.values.errors import DataDirectoryNewerError

T = TypeVar("T")
ACCESS_FILE = "access.db"

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        created_ms INTEGER NOT NULL,
        requests_per_minute INTEGER NOT NULL,
        tokens_per_day INTEGER NOT NULL,
        is_operator INTEGER NOT NULL CHECK (is_operator IN (0, 1)),
        revoked_ms INTEGER NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX one_key_per_name ON keys (name) WHERE revoked_ms = 0;
    CREATE TABLE usage (
        day TEXT NOT NULL,
        owner TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        PRIMARY KEY (day, owner)
    ) STRICT;
    CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at_ms INTEGER NOT NULL,
        owner TEXT NOT NULL,
        action TEXT NOT NULL,
        address TEXT NOT NULL
    ) STRICT;
    """,
    "ALTER TABLE keys ADD COLUMN requests_per_day INTEGER NOT NULL DEFAULT 0",
    """
    CREATE TABLE reservations (
        id TEXT PRIMARY KEY,
        day TEXT NOT NULL,
        owner TEXT NOT NULL,
        tokens INTEGER NOT NULL,
        until_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX reservations_by_owner ON reservations (owner, day);
    """,
)


class SQLiteAccessStore(SQLAccessStore):
    """An AccessStore in one file of the data directory, opened when first used. One thread uses its connection."""

    NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

    def __init__(self, directory: Path) -> None:
        self._path = directory / ACCESS_FILE
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="notso-access")
        self._connection: sqlite3.Connection | None = None

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether somebody has begun to keep keys there."""
        return (directory / ACCESS_FILE).exists()

    async def open(self) -> None:
        await self.look(lambda _: None)

    async def close(self) -> None:
        def work() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._thread.shutdown(wait=False)

    async def write(self, work: Callable[[Statements], T]) -> T:
        def run(connection: sqlite3.Connection) -> T:
            with transaction(connection):
                return work(_Connection(connection))

        return await self._run(run)

    async def look(self, work: Callable[[Statements], T]) -> T:
        return await self._run(lambda connection: work(_Connection(connection)))

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def guarded() -> T:
            with storage_errors():
                return work(self._opened())

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                _prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


class _Connection:
    """One as the common statements see it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        return self._connection.execute(sql, parameters)

    def snapshot(self) -> AbstractContextManager[None]:
        return snapshot(self._connection)


def _prepare(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    for pragma in (f"busy_timeout={BUSY_MS}", "journal_mode=DELETE", "synchronous=FULL", "trusted_schema=OFF"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN IMMEDIATE")  # two processes may come at once
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise DataDirectoryNewerError(f"{ACCESS_FILE} was written by a newer release")
    for step in MIGRATIONS[version:]:
        for statement in filter(str.strip, step.split(";")):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
    connection.execute("COMMIT")
