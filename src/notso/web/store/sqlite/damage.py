"""Detect damage without changing the database, and move damaged files away.

SQLite treats a deleted, truncated or overwritten log as a shorter one and reports nothing. Each commit therefore
increments a counter in the database, and after the sync the number is written to `notso.db-commits`. That file is not
synced: the write survives the process, and after a power failure its number may be too low, never too high. A database
with a smaller number than the file has lost commits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from datetime import datetime
from pathlib import Path

from notso.system.files import sync, sync_folder
from notso.web.store.protocol import Damage
from notso.web.store.sqlite.connection import DAMAGED, open_reader, storage_errors
from notso.web.store.sqlite.migrations import SCHEMA_VERSION
from notso.web.values.errors import StorageDamagedError

DIGITS = 20  # always as many, so that the file is overwritten in place


class Witness:
    """The commit counter beside the database at `path`. For one thread."""

    def __init__(self, path: Path, commits: int) -> None:
        """Create or overwrite the file. Raises OSError."""
        acknowledged_at = _beside(path)
        self._file = os.fdopen(os.open(acknowledged_at, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        try:
            self._write(commits)
            sync(self._file.fileno())
            sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def note(self, commits: int) -> None:
        """Record a number."""
        with contextlib.suppress(OSError):
            # On failure the old number stays: less damage is detected, but no commit fails.
            self._write(commits)

    def sync(self) -> None:
        """Sync the file, so that the number survives a power failure."""
        with contextlib.suppress(OSError):
            sync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _write(self, commits: int) -> None:
        self._file.seek(0)
        self._file.write(b"%0*d\n" % (DIGITS, commits))


def commits_acknowledged(path: Path) -> int | None:
    """Return the number beside the database, if any."""
    try:
        acknowledged = _beside(path).read_bytes()
    except FileNotFoundError:
        return None
    return int(acknowledged) if len(acknowledged) == DIGITS + 1 and acknowledged.strip().isdigit() else None


def commits_in(connection: sqlite3.Connection) -> int | None:
    """Return the number in the database, 0 if it is not a number."""
    row = connection.execute("SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'commits'").fetchone()
    return int(row[0]) if row is not None else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + "-commits")


logger = logging.getLogger("notso.web.store")

LOST = (
    "the database of conversations lacks the latest commits and was left unchanged: stop the server, then restore a"
    " backup, or remove notso.db-commits to continue with the data that is left"
)


def damage_of(path: Path) -> Damage:
    """Return why the database may only be read, without changing anything.

    Raises StorageDamagedError if nothing can be read.
    """
    with storage_errors():
        acknowledged = commits_acknowledged(path)
    if _is_empty(path):
        return _report("gone" if acknowledged else "", "is missing, although it had content")
    reader = open_reader(path)
    try:
        with storage_errors():
            version = int(reader.execute("PRAGMA user_version").fetchone()[0])
            if version == 0:
                return _report("gone" if acknowledged else "", "is empty, although it had content")
            if version > SCHEMA_VERSION:
                return ""  # `open_writer` raises the error
            inside = commits_in(reader)  # None: a backup, or written by a release without the counter
            damage: Damage = ""
            if acknowledged is not None and inside is not None and inside < acknowledged:
                damage = _report("behind", f"has {inside} of {acknowledged} commits")
            elif _is_open(reader) and not _is_sound(reader):
                damage = _report("unsound", "failed its check")
            if damage:
                reader.execute("SELECT id FROM chats").fetchall()
                if version < SCHEMA_VERSION:
                    raise StorageDamagedError(said_of(damage))
        return damage
    finally:
        reader.close()


def said_of(damage: Damage) -> str:
    """Return the message of errors on writes."""
    return DAMAGED if damage == "unsound" else LOST


def move_strange_log(path: Path) -> None:
    """Rename a log that does not belong to the database. Raises StorageError."""
    log = _log_of(path)
    if _is_empty(log) or not (_was_started_anew(path) or _never_had_a_log(path)):
        return
    with storage_errors():
        # SQLite would delete it, or write its pages over a backup that replaced the database.
        log.rename(kept := _dated(log))
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
    logger.warning("a log that does not belong to the database was saved as %s", kept.name)


def roll_back(path: Path) -> None:
    """Roll back a transaction begun before WAL mode was on. Raises StorageError."""
    if not _is_empty(path.with_name(path.name + "-journal")) and not _is_empty(path):
        with storage_errors():
            connection = sqlite3.connect(path)
            try:
                # Only a new database or a restored backup has a rollback journal; read-only
                # connections cannot open it.
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            finally:
                connection.close()


def keep_copy(path: Path) -> None:
    """Copy database and log to dated names if the counter was deleted after an unclean end.

    Raises StorageError.
    """
    if _is_empty(path) or commits_acknowledged(path) is not None:
        return
    reader = open_reader(path)
    try:
        with storage_errors():
            version = int(reader.execute("PRAGMA user_version").fetchone()[0])
            # The operator chose to continue without the missing commits; opening makes SQLite drop the
            # unusable log.
            unclean = 0 < version <= SCHEMA_VERSION and _is_open(reader) and commits_in(reader)
    finally:
        reader.close()
    if unclean:
        for file in (path, _log_of(path)):
            if not _is_empty(file):
                with storage_errors():
                    shutil.copy2(file, kept := _dated(file))
                logger.warning("a copy was saved as %s", kept.name)


def _was_started_anew(path: Path) -> bool:
    return _is_empty(path) and not commits_acknowledged(path)


def _never_had_a_log(path: Path) -> bool:
    if _is_empty(path):
        return False
    with storage_errors(), path.open("rb") as file:
        # True of backups; the database itself is switched to WAL before anything is written.
        return file.read(20)[18:] == b"\x01\x01"  # file format write and read versions; 2 is WAL


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _dated(file: Path) -> Path:
    return file.with_name(f"kept-{datetime.now():%Y%m%d-%H%M%S}-{file.name}")


def _report(damage: Damage, what: str) -> Damage:
    if damage:
        logger.error("the database %s: it is opened read-only", what)
    return damage


def _is_empty(path: Path) -> bool:
    return not path.exists() or path.stat().st_size == 0


def _is_open(reader: sqlite3.Connection) -> bool:
    """Whether the last close was unclean."""
    return reader.execute("SELECT 1 FROM facts WHERE name = 'open'").fetchone() is not None


def _is_sound(reader: sqlite3.Connection) -> bool:
    try:
        return [row[0] for row in reader.execute("PRAGMA quick_check")] == ["ok"]
    except sqlite3.DatabaseError:  # some damage makes the check itself fail
        return False
