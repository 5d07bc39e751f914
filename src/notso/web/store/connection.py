"""Opening the database: pragmas, checks, migrations. Everything here runs in the writer's thread.

SQLite up to 3.51.2 can damage a WAL file when two connections write or checkpoint at once, so the connection made by
`open_writer` is the only one that ever does either; `open_reader` makes connections that cannot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from notso.web.errors import DataDirectoryNewerError, StorageDamagedError, StorageError, StorageFullError
from notso.web.store.migrations import MIGRATIONS, SCHEMA_VERSION

logger = logging.getLogger("notso.web.store")

DAMAGED = (
    "the database of conversations is damaged; it was left as it is: put a copy of notso.db in its place, or move it"
    " away to begin anew, or choose another data directory"
)


def open_writer(path: Path) -> sqlite3.Connection:
    """The one writing connection, its schema up to date and its file checked after an unclean end."""
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


def is_damaged(path: Path) -> bool:
    """Whether the file, after an unclean end, fails its check but can still be read (DB6). Nothing is written, not even
    the log folded in. Raises StorageDamagedError where nothing can be read."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    reader = open_reader(path)
    try:
        with storage_errors():
            version = int(reader.execute("PRAGMA user_version").fetchone()[0])
            if not 0 < version <= SCHEMA_VERSION:
                return False  # for `open_writer` to judge
            if not reader.execute("SELECT 1 FROM facts WHERE name = 'open'").fetchone():
                return False  # it was closed well
            sound = _is_sound(reader)
        if not sound:
            logger.error("the database failed its check and is open for reading only")
            with storage_errors():
                reader.execute("SELECT id FROM chats").fetchall()
            if version < SCHEMA_VERSION:
                raise StorageDamagedError(DAMAGED)
        return not sound
    finally:
        reader.close()


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that reads and nothing else."""
    with storage_errors():
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        for pragma in ("query_only=ON", "wal_autocheckpoint=0", "busy_timeout=5000", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        return connection


def close_writer(connection: sqlite3.Connection) -> None:
    """Note that all went well, fold the log into the file, close."""
    with contextlib.suppress(sqlite3.Error):
        connection.execute("DELETE FROM facts WHERE name = 'open'")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def copy(connection: sqlite3.Connection, target: Path) -> None:
    """A whole and orderly copy in place of `target`, made by the writer, outside of any transaction (DB2)."""
    target.unlink(missing_ok=True)
    _make_private(target)
    connection.execute("VACUUM INTO ?", (str(target),))


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; on leaving it is on disk."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what SQLite and the system say into our own errors, without paths or SQL."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        logger.error("database: %s (%s)", type(error).__name__, name)
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the latter: no room for the log's index
            raise StorageFullError("the disk is full: free some space, nothing was lost") from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise StorageDamagedError(DAMAGED) from error
        raise StorageError("the conversations cannot be read or written just now") from error
    except OSError as error:
        raise StorageError(f"the data directory cannot be used: {error.strerror}") from error


def _prepare(connection: sqlite3.Connection, path: Path, existed: bool) -> None:
    connection.row_factory = sqlite3.Row
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise DataDirectoryNewerError(
            "the conversations were written by a newer notso: please upgrade; nothing was changed"
        )
    pragmas = ["journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF", "busy_timeout=5000"]
    pragmas += ["mmap_size=0"] + (["fullfsync=ON"] if sys.platform == "darwin" else [])
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    if existed and 0 < version < SCHEMA_VERSION:
        copy(connection, path.with_name(f"{path.stem}-before-{SCHEMA_VERSION}.db"))
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        with transaction(connection):
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={number}")
    connection.execute("INSERT OR REPLACE INTO facts VALUES ('open', '1')")


def _is_sound(connection: sqlite3.Connection) -> bool:
    try:
        return [row[0] for row in connection.execute("PRAGMA quick_check")] == ["ok"]
    except sqlite3.DatabaseError:  # some damage ends the check itself
        return False


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
