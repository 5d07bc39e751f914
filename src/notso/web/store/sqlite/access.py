"""Store API keys, usage and audit logs in a separate SQLite file, to which several processes may write.

The file uses a rollback journal because older versions of SQLite have a bug in WAL mode with two writers (see
connection.py).
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from notso.system.files import file_type, open_private, sync_folder
from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sql.database import SQLConnection
from notso.web.store.sqlite.connection import (
    BUSY_MS,
    SQLiteStatements,
    read_version,
    split_statements,
    storage_errors,
    transaction,
)
from notso.web.values.errors import DataDirectoryNewerError, StorageDamagedError, StorageError
from notso.web.values.fair_queue import WorkerThreads

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
    """
    ALTER TABLE audit ADD COLUMN count INTEGER NOT NULL DEFAULT 1;
    CREATE TABLE operator_audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at_ms INTEGER NOT NULL,
        owner TEXT NOT NULL,
        action TEXT NOT NULL,
        address TEXT NOT NULL,
        count INTEGER NOT NULL
    ) STRICT;
    """,
)


_WHAT = "access.db, which holds keys, usage and the audit log,"
_ADVICE = "restore a copy of it, or move it away to continue without its keys; conversations are in another file"
_DAMAGED = f"{_WHAT} is damaged and was left unchanged: {_ADVICE}"
_EMPTY = f"{_WHAT} is empty, so no key would be valid: {_ADVICE}"
_GONE = f"{_WHAT} is missing: restore it, or restart the server to continue without its keys"
_BUSY = f"{_WHAT} is locked by another program: wait for it or stop it"
_FAILED = f"{_WHAT} cannot be read or written at the moment"

READ_MS = 1000  # how long a read waits for a write, which usually takes milliseconds
SHORT_MS = 50  # how long a read waits if the previous read timed out, or a write if the previous write did


class SQLiteAccessStore(SQLAccessStore):
    NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

    def __init__(self, directory: Path) -> None:
        self._path = directory / ACCESS_FILE
        # Reads and writes have separate threads and connections, so that reads wait only for commits, not for the
        # queued writes of this process.
        self._read_thread = _ConnectionThread(self._path, "read", READ_MS)
        self._write_thread = _ConnectionThread(self._path, "write", BUSY_MS)
        self._is_created = False

    @staticmethod
    def exists(directory: Path) -> bool:
        """Return whether the file exists. Raises OSError if this is unknown."""
        return file_type(directory / ACCESS_FILE) != 0

    async def open(self) -> None:
        await self.write(lambda _: None)

    async def close(self) -> None:
        for worker in (self._read_thread, self._write_thread):
            await worker.thread.run(worker.close)
            worker.thread.shutdown(wait=False)

    async def write(self, work: Callable[[SQLConnection], T]) -> T:
        def run(connection: sqlite3.Connection) -> T:
            with transaction(connection):
                return work(SQLiteStatements(connection))

        return await self._run(self._write_thread, run)

    async def run_read(self, work: Callable[[SQLConnection], T]) -> T:
        return await self._run(self._read_thread, lambda connection: work(SQLiteStatements(connection)))

    async def _run(self, worker: _ConnectionThread, work: Callable[[sqlite3.Connection], T]) -> T:
        def guarded() -> T:
            with storage_errors(_DAMAGED, _FAILED, _BUSY):
                if not self._is_created and not self._path.exists():
                    _create_file(self._path)
                self._is_created = True
                return worker.run_work(work)

        return await worker.thread.run(guarded)


class _ConnectionThread:
    def __init__(self, path: Path, name: str, timeout_ms: int) -> None:
        self.thread = WorkerThreads(1, thread_name_prefix=f"notso-access-{name}")
        self._path = path
        self._timeout_ms = timeout_ms
        self._has_timed_out = False
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def run_work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = self._ensure_open()
            connection.execute(f"PRAGMA busy_timeout={SHORT_MS if self._has_timed_out else self._timeout_ms}")
            result = work(connection)
        except sqlite3.Error as error:
            self._has_timed_out = getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY")
            if not self._has_timed_out:
                self.close()  # the next call opens the file again, because it may have been repaired
            raise
        self._has_timed_out = False
        return result

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ensure_open(self) -> sqlite3.Connection:
        try:
            file = self._path.stat()
        except FileNotFoundError:
            self.close()
            raise StorageError(_GONE) from None
        if not file.st_size:
            self.close()
            raise StorageDamagedError(_EMPTY)
        if self._connection is None or self._file != (file.st_dev, file.st_ino):
            self.close()
            self._connection = _open(self._path, SHORT_MS if self._has_timed_out else self._timeout_ms)
            self._file = file.st_dev, file.st_ino
        return self._connection


def _create_file(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Create the file under another name, and then link it to `path`. If two processes do this at once, the first link
    # is kept. Only SQLite may open `path`, because closing any other descriptor would release SQLite's locks.
    new = path.with_name(f"{path.name}-{secrets.token_hex(8)}.new")
    os.close(open_private(new))
    try:
        _open(new, BUSY_MS).close()
        try:
            os.link(new, path)
        except FileExistsError:
            return
        except OSError:  # the file system does not support hard links
            new.rename(path)
        sync_folder(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _open(path: Path, timeout_ms: int) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, timeout_ms)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, timeout_ms: int) -> None:
    connection.row_factory = sqlite3.Row
    for pragma in (
        f"busy_timeout={timeout_ms}",
        "journal_mode=DELETE",
        "synchronous=FULL",
        "fullfsync=ON",  # for macOS
        "trusted_schema=OFF",
        "mmap_size=0",
        "secure_delete=ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    if read_version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")  # another process may migrate the file at the same time
    version = read_version(connection)
    if version > len(MIGRATIONS):
        raise DataDirectoryNewerError(
            f"{ACCESS_FILE} was written by a newer version of notso: please upgrade; nothing was changed"
        )
    for step in MIGRATIONS[version:]:
        for statement in split_statements(step):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
    connection.execute("COMMIT")
