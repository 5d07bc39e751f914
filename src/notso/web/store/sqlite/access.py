"""People and keys in a SQLite file of their own, which several processes may write: with a rollback journal, for a WAL
has a fault under two writers (see connection.py)."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TypeVar

from notso.web.store.access import AUDIT_ENTRIES, MAX_KEYS, ApiKey, AuditEntry, UsageRow, Used
from notso.web.store.sqlite.connection import BUSY_MS, storage_errors
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
)

_KEY = "id, name, created_ms, requests_per_minute, tokens_per_day, is_operator, revoked_ms"


class SQLiteAccessStore:
    """An AccessStore in one file of the data directory. One thread uses its connection."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / ACCESS_FILE
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="notso-access")
        self._connection: sqlite3.Connection | None = None

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether somebody has begun to keep keys there."""
        return (directory / ACCESS_FILE).exists()

    async def open(self) -> None:
        await self._run(lambda _: None)

    async def close(self) -> None:
        def work() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._thread.shutdown(wait=False)

    async def add_key(self, key: ApiKey, digest: bytes) -> bool:
        row = (key.id, key.name, key.created_ms, key.requests_per_minute, key.tokens_per_day, int(key.is_operator))

        def work(connection: sqlite3.Connection) -> bool:
            (count,) = connection.execute("SELECT count(*) FROM keys").fetchone()
            if count >= MAX_KEYS:
                return False
            done = connection.execute(
                f"INSERT OR IGNORE INTO keys ({_KEY}, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, key.revoked_ms, digest),
            )
            return done.rowcount == 1

        return await self._write(work)

    async def keys(self) -> list[ApiKey]:
        rows = f"SELECT {_KEY} FROM keys ORDER BY name, created_ms DESC, id"
        return await self._run(lambda connection: [_key(row) for row in connection.execute(rows)])

    async def key_of(self, digest: bytes) -> ApiKey | None:
        return await self._one("digest = ?", digest)

    async def key(self, key_id: str) -> ApiKey | None:
        return await self._one("id = ?", key_id)

    async def revoke_key(self, name: str, now_ms: int) -> ApiKey | None:
        def work(connection: sqlite3.Connection) -> ApiKey | None:
            update = f"UPDATE keys SET revoked_ms = ? WHERE name = ? AND revoked_ms = 0 RETURNING {_KEY}"
            rows = connection.execute(update, (max(now_ms, 1), name)).fetchall()
            return _key(rows[0]) if rows else None

        return await self._write(work)

    async def add_usage(self, rows: list[UsageRow]) -> None:
        values = [
            (row.day.isoformat(), row.owner, row.used.requests, row.used.prompt_tokens, row.used.completion_tokens)
            for row in rows
        ]
        insert = """
            INSERT INTO usage (day, owner, requests, prompt_tokens, completion_tokens) VALUES (?, ?, ?, ?, ?)
            ON CONFLICT (day, owner) DO UPDATE SET
                requests = requests + excluded.requests,
                prompt_tokens = prompt_tokens + excluded.prompt_tokens,
                completion_tokens = completion_tokens + excluded.completion_tokens
        """
        await self._write(lambda connection: connection.executemany(insert, values))

    async def usage(self, first: date, last: date) -> list[UsageRow]:
        select = """
            SELECT day, owner, requests, prompt_tokens, completion_tokens FROM usage
            WHERE day BETWEEN ? AND ? ORDER BY day DESC, owner
        """
        days = (first.isoformat(), last.isoformat())
        return await self._run(
            lambda connection: [
                UsageRow(date.fromisoformat(day), owner, Used(*counts))
                for day, owner, *counts in connection.execute(select, days)
            ]
        )

    async def used_on(self, day: date, owner: str) -> Used:
        select = "SELECT requests, prompt_tokens, completion_tokens FROM usage WHERE day = ? AND owner = ?"

        def work(connection: sqlite3.Connection) -> Used:
            row = connection.execute(select, (day.isoformat(), owner)).fetchone()
            return Used(*row) if row else Used()

        return await self._run(work)

    async def add_audit(self, entry: AuditEntry) -> None:
        def work(connection: sqlite3.Connection) -> None:
            done = connection.execute(
                "INSERT INTO audit (at_ms, owner, action, address) VALUES (?, ?, ?, ?)",
                (entry.at_ms, entry.owner, entry.action, entry.address),
            )
            connection.execute("DELETE FROM audit WHERE number <= ?", ((done.lastrowid or 0) - AUDIT_ENTRIES,))

        await self._write(work)

    async def audit(self, limit: int) -> list[AuditEntry]:
        select = "SELECT at_ms, owner, action, address FROM audit ORDER BY number DESC LIMIT ?"
        return await self._run(lambda connection: [AuditEntry(*row) for row in connection.execute(select, (limit,))])

    async def _one(self, where: str, value: bytes | str) -> ApiKey | None:
        def work(connection: sqlite3.Connection) -> ApiKey | None:
            row = connection.execute(f"SELECT {_KEY} FROM keys WHERE {where}", (value,)).fetchone()
            return _key(row) if row else None

        return await self._run(work)

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

        return await self._run(transaction)

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


def _prepare(connection: sqlite3.Connection) -> None:
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


def _key(row: tuple[str, str, int, int, int, int, int]) -> ApiKey:
    key_id, name, created, per_minute, per_day, is_operator, revoked = row
    return ApiKey(key_id, name, created, per_minute, per_day, bool(is_operator), revoked)
