"""SQLite connections: directory lock, pragmas, migrations, copies. Runs in the writer's thread.

Up to 3.51.2 SQLite can damage a WAL file when two connections write or checkpoint at once. Only the connection from
`open_writer` ever does either; those from `open_reader` cannot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from notso.system.files import lock
from notso.web.store.sql.search_words import indexed_text
from notso.web.store.sqlite.migrations import MIGRATIONS, SCHEMA_VERSION
from notso.web.values.errors import (
    DataDirectoryBusyError,
    DataDirectoryNewerError,
    StorageDamagedError,
    StorageError,
    StorageFullError,
)

logger = logging.getLogger("notso.web.store")

BUSY_MS = 5000  # how long one connection waits for the other

DAMAGED = (
    "the database of conversations is damaged and was left unchanged: restore a backup, or move away all files"
    " whose names begin with notso.db to start with an empty database, or choose another data directory"
)


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the writing connection and migrate the schema."""
    logger.info("SQLite %s", sqlite3.sqlite_version)
    existed = path.exists()
    with storage_errors():
        _make_private(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, existed)
        except BaseException:
            connection.close()
            raise
        return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that can neither write nor checkpoint."""
    with storage_errors():
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        for pragma in ("query_only=ON", "wal_autocheckpoint=0", f"busy_timeout={BUSY_MS}", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        return connection


def open_nothing() -> sqlite3.Connection:
    """Return an empty in-memory database, for reading when the file is gone."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.create_function("indexed_text", 1, indexed_text, deterministic=True)
    for script in MIGRATIONS:
        connection.executescript(script)
    connection.execute("PRAGMA query_only=ON")
    return connection


def fold(connection: sqlite3.Connection) -> bool:
    """Checkpoint and truncate the log; False, without waiting, if a reader blocks it."""
    connection.execute("PRAGMA busy_timeout=0")
    try:
        return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")


def copy(connection: sqlite3.Connection, target: Path) -> None:
    """Write a compact copy over `target`, in the writer's thread, outside a transaction."""
    target.unlink(missing_ok=True)
    _make_private(target)
    connection.execute("VACUUM INTO ?", (str(target),))
    copied = sqlite3.connect(target, isolation_level=None)
    try:
        # Without a commit count the copy can replace a database with more commits.
        copied.execute("DELETE FROM facts WHERE name = 'commits'")
    finally:
        copied.close()


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit on exit, roll back on exceptions."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Read consistently within the block."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


@contextlib.contextmanager
def storage_errors(
    damaged: str = DAMAGED,
    failed: str = "conversations cannot be read or written at the moment",
    busy: str = "the database is locked by another program: try again in a moment",
) -> Iterator[None]:
    """Translate sqlite3.Error and OSError into StorageError, without paths or SQL."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        logger.error("database: %s (%s)", type(error).__name__, name)
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the latter: no space for the WAL index
            raise StorageFullError("the disk is full: free some space; nothing was lost") from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise StorageDamagedError(damaged) from error
        raise StorageError(busy if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) else failed) from error
    except OSError as error:
        raise StorageError(f"the data directory cannot be used: {error.strerror}") from error


def _prepare(connection: sqlite3.Connection, path: Path, existed: bool) -> None:
    connection.row_factory = sqlite3.Row
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise DataDirectoryNewerError(
            "the conversations were written by a newer version of notso: please upgrade; nothing was changed"
        )
    pragmas = ["journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF"]
    pragmas += [f"busy_timeout={BUSY_MS}", "mmap_size=0", "fullfsync=ON"]  # the last for macOS
    pragmas += ["secure_delete=ON"]  # what is deleted does not stay in free pages
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    if existed and 0 < version < SCHEMA_VERSION:
        # A way back to the previous release.
        copy(connection, path.with_name(f"{path.stem}-before-{SCHEMA_VERSION}.db"))
    connection.create_function("indexed_text", 1, indexed_text, deterministic=True)
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        with transaction(connection):
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={number}")
    connection.execute("INSERT OR REPLACE INTO facts VALUES ('open', '1')")


def _make_private(path: Path) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _statements(script: str) -> list[str]:
    statements, current = [], ""
    for piece in script.split(";"):
        current += piece + ";"
        if sqlite3.complete_statement(current):
            if current.strip(" \n;"):
                statements.append(current)
            current = ""
    return statements


class DirectoryLock:
    """Exclusive lock on a directory, freed by `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Create the directory (0700) if needed. Raises StorageError and DataDirectoryBusyError."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"the data directory cannot be used: {error.strerror}") from error
        try:
            lock(self._descriptor)
        except OSError:
            os.close(self._descriptor)
            raise DataDirectoryBusyError(
                "another notso is using this data directory: stop it first, or choose another data directory"
            ) from None

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
