"""Open SQLite connections, lock the data directory, and detect damage.

Up to version 3.51.2, SQLite can damage a WAL file if two connections write or checkpoint at the same time. Therefore,
only the connection from `open_writer` writes and checkpoints; connections from `open_reader` cannot.

Damage is detected without changing the database. If the log (WAL file) was deleted, truncated or overwritten, SQLite
opens the database without an error, but the commits in the log are missing. Therefore, each write increments a counter
in the database, and after its commit is synced, the count is written to `notso.db-commits`. This file is not
synced with each commit. Its count survives a crash of the process; after a power failure, it may be too low but
never too high. If the count in the database is lower than the count in the file, commits are missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from notso.system.files import lock, open_private, sync, sync_folder, unlock_and_close
from notso.web.store.protocol import DISK_FULL, FAILED, Damage
from notso.web.store.sql.database import Rows, Value
from notso.web.store.sql.search_words import indexed_text
from notso.web.store.sqlite.migrations import MIGRATIONS, SCHEMA_VERSION
from notso.web.values.errors import (
    DataDirectoryBusyError,
    DataDirectoryNewerError,
    Sentence,
    StorageDamagedError,
    StorageError,
    StorageFullError,
)

logger = logging.getLogger("notso.web.store")

BUSY_MS = 5000  # how long a connection waits for a lock

DAMAGED = Sentence(
    "the database of conversations is damaged and was left unchanged: restore a backup, or move away all files"
    " whose names begin with notso.db to start with an empty database, or choose another data directory",
    "storage_damaged",
)


def open_writer(path: Path) -> sqlite3.Connection:
    logger.info("SQLite %s", sqlite3.sqlite_version)
    existed = path.exists()
    with storage_errors():
        os.close(open_private(path))
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, existed)
        except BaseException:
            connection.close()
            raise
        return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that cannot write or checkpoint."""
    with storage_errors():
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        _add_functions(connection)
        for pragma in ("query_only=ON", "wal_autocheckpoint=0", f"busy_timeout={BUSY_MS}", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        return connection


def open_empty() -> sqlite3.Connection:
    """Open an empty in-memory database, to read in place of a missing file."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    _add_functions(connection)
    for script in MIGRATIONS:
        connection.executescript(script)
    connection.execute("PRAGMA query_only=ON")
    return connection


def checkpoint(connection: sqlite3.Connection) -> bool:
    """Checkpoint and truncate the log. Return False, without waiting, if a reader prevents this."""
    connection.execute("PRAGMA busy_timeout=0")
    try:
        return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")


def copy(connection: sqlite3.Connection, target: Path) -> None:
    """Write a compact copy to `target`, overwriting it. Call this in the writer's thread, outside a transaction."""
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_RDWR | os.O_CREAT, 0o600))
    connection.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(target),))  # the path may be invalid UTF-8
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copied:
        # Delete the commit count, so that a restored copy is not considered damaged if notso.db-commits has a higher
        # count.
        copied.execute("DELETE FROM facts WHERE name = 'commits'")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class SQLiteStatements:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        return self._connection.execute(sql, parameters)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")


@contextlib.contextmanager
def storage_errors(
    damaged: str = DAMAGED,
    failed: str = FAILED,
    busy: str = Sentence("the database is locked by another program: try again in a moment", "storage_locked"),
) -> Iterator[None]:
    """Convert sqlite3.Error and OSError to StorageError, without paths or SQL."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        logger.error("database: %s (%s)", type(error).__name__, name)
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # SHMSIZE: no space for the WAL index
            raise StorageFullError(DISK_FULL) from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise StorageDamagedError(damaged) from error
        raise StorageError(busy if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) else failed) from error
    except OSError as error:
        raise StorageError(f"the data directory cannot be used: {error.strerror}") from error


def _prepare(connection: sqlite3.Connection, path: Path, existed: bool) -> None:
    connection.row_factory = sqlite3.Row
    version = read_version(connection)
    if version > SCHEMA_VERSION:
        raise DataDirectoryNewerError(
            "the conversations were written by a newer version of notso: please upgrade; nothing was changed"
        )
    pragmas = ["journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF"]
    pragmas += [f"busy_timeout={BUSY_MS}", "mmap_size=0", "fullfsync=ON"]  # fullfsync is for macOS
    pragmas += ["secure_delete=ON"]  # overwrites deleted data with zeros
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    if existed and 0 < version < SCHEMA_VERSION:
        # Keep a copy that the previous release can open.
        copy(connection, path.with_name(f"{path.stem}-before-{SCHEMA_VERSION}.db"))
    _add_functions(connection)
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        with transaction(connection):
            for statement in split_statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={number}")
    connection.execute("INSERT OR REPLACE INTO facts VALUES ('open', '1')")


def read_version(connection: sqlite3.Connection) -> int:
    """Return the version of the schema, or 0 for an empty database."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _add_functions(connection: sqlite3.Connection) -> None:
    connection.create_function("indexed_text", 1, indexed_text, deterministic=True)


def split_statements(script: str) -> Iterator[str]:
    current = ""
    for piece in script.split(";"):
        current += piece + ";"
        if sqlite3.complete_statement(current):  # false if the semicolon is in a string or trigger
            if current.strip(" \n;"):
                yield current
            current = ""


class DirectoryLock:
    """Exclusive lock on a directory, held until `release` is called or the process ends."""

    def __init__(self, directory: Path) -> None:
        """Lock the directory, and create it (0700) if needed. Raises StorageError or DataDirectoryBusyError."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = open_private(directory / "lock")
        except OSError as error:
            raise StorageError(f"the data directory {directory} cannot be used: {error.strerror}") from error
        try:
            lock(self._descriptor)
        except OSError:
            os.close(self._descriptor)
            raise DataDirectoryBusyError(
                "another notso is using this data directory: stop it first, or choose another with --data-dir"
            ) from None

    def release(self) -> None:
        if self._descriptor >= 0:
            unlock_and_close(self._descriptor)
            self._descriptor = -1


DIGITS = 20  # fixed number, so that the file can be overwritten in place


class CommitCounterFile:
    """File with the number of commits to the database at `path`. Not thread-safe."""

    def __init__(self, path: Path, commits: int) -> None:
        """Create or overwrite the file. Raises OSError."""
        counter_path = _counter_path(path)
        self._file = os.fdopen(open_private(counter_path), "r+b", buffering=0)
        try:
            self._write(commits)
            sync(self._file.fileno())
            sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def note(self, commits: int) -> None:
        with contextlib.suppress(OSError):
            # If this fails, the old count stays in the file. Some damage may then go undetected, but the commit is
            # valid.
            self._write(commits)

    def sync(self) -> None:
        with contextlib.suppress(OSError):
            sync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _write(self, commits: int) -> None:
        self._file.seek(0)
        self._file.write(b"%0*d\n" % (DIGITS, commits))


def read_acknowledged_count(path: Path) -> int | None:
    try:
        content = _counter_path(path).read_bytes()
    except FileNotFoundError:
        return None
    return int(content) if len(content) == DIGITS + 1 and content.strip().isdigit() else None


def read_commit_count(connection: sqlite3.Connection) -> int | None:
    """Return the commit count in the database, 0 if it is not a number, or None if there is none."""
    row = connection.execute("SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'commits'").fetchone()
    return int(row[0]) if row is not None else None


def _counter_path(path: Path) -> Path:
    return path.with_name(path.name + "-commits")


LOST = Sentence(
    "the database of conversations lacks the latest commits and was left unchanged: stop the server, then restore a"
    " backup, or remove notso.db-commits to continue with the data that is left",
    "storage_lost",
)


def detect_damage(path: Path) -> Damage:
    """Return the kind of damage that requires read-only use, or ''. Changes no file.

    Raises StorageDamagedError if even read-only use is impossible.
    """
    with storage_errors():
        acknowledged = read_acknowledged_count(path)
    if _is_empty(path):
        return _log_damage("gone" if acknowledged else "", "is missing, although it had content")
    with contextlib.closing(open_reader(path)) as reader, storage_errors():
        version = read_version(reader)
        if version == 0:
            return _log_damage("gone" if acknowledged else "", "is empty, although it had content")
        if version > SCHEMA_VERSION:
            return ""  # `open_writer` will raise DataDirectoryNewerError
        committed = read_commit_count(reader)  # None for a backup or a database of a release without the counter
        damage: Damage = ""
        if acknowledged is not None and committed is not None and committed < acknowledged:
            damage = _log_damage("behind", f"has {committed} of {acknowledged} commits")
        elif _is_unclean(reader) and not _passes_quick_check(reader):
            damage = _log_damage("unsound", "failed its integrity check")
        if damage:
            reader.execute("SELECT id FROM chats").fetchall()  # raises an error if nothing can be read
            if version < SCHEMA_VERSION:  # a damaged database cannot be migrated
                raise StorageDamagedError(damage_message(damage))
    return damage


def damage_message(damage: Damage) -> str:
    return DAMAGED if damage == "unsound" else LOST


def move_foreign_log(path: Path) -> None:
    """Rename a log that does not belong to the database. Raises StorageError."""
    log = _wal_path(path)
    if _is_empty(log) or not (_has_no_commits(path) or _never_had_a_log(path)):
        return
    with storage_errors():
        # Otherwise, SQLite would delete the log, or apply its pages to a restored backup.
        log.rename(renamed := _dated_copy_path(log))
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
    logger.warning("a log that does not belong to the database was saved as %s", renamed.name)


def roll_back(path: Path) -> None:
    """Roll back an unfinished transaction in rollback-journal mode. Raises StorageError."""
    if not _is_empty(path.with_name(path.name + "-journal")) and not _is_empty(path):
        with storage_errors(), contextlib.closing(sqlite3.connect(path)) as connection:
            # Only a new database or a restored backup can have a rollback journal. Connections from `open_reader`
            # cannot roll back a transaction.
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def copy_if_unclean(path: Path) -> None:
    """Keep copies of the database and log if notso.db-commits was deleted after an unclean shutdown.

    Raises StorageError.
    """
    if _is_empty(path) or read_acknowledged_count(path) is not None:
        return
    with contextlib.closing(open_reader(path)) as reader, storage_errors():
        version = read_version(reader)
        # If notso.db-commits was deleted (see LOST), the store continues without the missing commits. SQLite discards
        # the unusable log when it opens the database for writing.
        unclean = 0 < version <= SCHEMA_VERSION and _is_unclean(reader) and read_commit_count(reader)
    if unclean:
        for file in (path, _wal_path(path)):
            if not _is_empty(file):
                with storage_errors():
                    shutil.copy2(file, copied := _dated_copy_path(file))
                logger.warning("a copy was saved as %s", copied.name)


def _has_no_commits(path: Path) -> bool:
    return _is_empty(path) and not read_acknowledged_count(path)


def _never_had_a_log(path: Path) -> bool:
    if _is_empty(path):
        return False
    with storage_errors(), path.open("rb") as file:
        # True for backups, which are not in WAL mode. The store's own database is switched to WAL mode before anything
        # is written.
        return file.read(20)[18:] == b"\x01\x01"  # file format versions for writing and reading; 2 means WAL


def _wal_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _dated_copy_path(file: Path) -> Path:
    return file.with_name(f"kept-{datetime.now():%Y%m%d-%H%M%S}-{file.name}")


def _log_damage(damage: Damage, description: str) -> Damage:
    if damage:
        logger.error("the database %s: it is opened read-only", description)
    return damage


def _is_empty(path: Path) -> bool:
    with storage_errors():
        try:
            return path.stat().st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            return True


def _is_unclean(reader: sqlite3.Connection) -> bool:
    # True if the database is open or was not closed cleanly.
    return reader.execute("SELECT 1 FROM facts WHERE name = 'open'").fetchone() is not None


def _passes_quick_check(reader: sqlite3.Connection) -> bool:
    try:
        return [row[0] for row in reader.execute("PRAGMA quick_check")] == ["ok"]
    except sqlite3.DatabaseError:  # some kinds of damage make the check itself fail
        return False
