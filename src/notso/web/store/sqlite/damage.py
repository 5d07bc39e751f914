"""What state a database is in, found out without changing it; and files that are put aside before it is changed."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from datetime import datetime
from pathlib import Path

from notso.web.store.protocol import Damage
from notso.web.store.sqlite.connection import DAMAGED, open_reader, storage_errors
from notso.web.store.sqlite.migrations import SCHEMA_VERSION
from notso.web.store.sqlite.witness import commits_acknowledged, commits_in
from notso.web.values.errors import StorageDamagedError

logger = logging.getLogger("notso.web.store")

LOST = (
    "the database of conversations lacks what was kept last; it was left as it is: stop the server, then put a backup"
    " in its place, or remove notso.db-commits to go on with what is there"
)


def damage_of(path: Path) -> Damage:
    """What is wrong with the database so that it may only be read (DB6). Nothing is written, not even the log folded
    in. Raises StorageDamagedError where nothing can be read."""
    with storage_errors():
        acknowledged = commits_acknowledged(path)
    if _is_empty(path):
        return _report("gone" if acknowledged else "", "is gone, and something was kept in it")
    reader = open_reader(path)
    try:
        with storage_errors():
            version = int(reader.execute("PRAGMA user_version").fetchone()[0])
            if version == 0:
                return _report("gone" if acknowledged else "", "is empty, and something was kept in it")
            if version > SCHEMA_VERSION:
                return ""  # for `open_writer` to judge
            inside = commits_in(reader)  # None: a backup, or of a release that did not count
            damage: Damage = ""
            if acknowledged is not None and inside is not None and inside < acknowledged:
                damage = _report("behind", f"holds {inside} commits of {acknowledged}")
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
    """What a person is told who wants to write."""
    return DAMAGED if damage == "unsound" else LOST


def move_strange_log(path: Path) -> None:
    """Give a log that belongs to no database, or to another one than lies there now, a dated name: SQLite would delete
    it, or write its pages over a backup that was put in the old one's place. Raises StorageError."""
    log = _log_of(path)
    if _is_empty(log) or not (_was_started_anew(path) or _never_had_a_log(path)):
        return
    with storage_errors():
        log.rename(kept := _dated(log))
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
    logger.warning("a log that does not belong to the database is kept as %s", kept.name)


def roll_back(path: Path) -> None:
    """Take back what was begun before the database had its log, when it was made or a backup was put in its place:
    until then nobody can read it. Raises StorageError."""
    if not _is_empty(path.with_name(path.name + "-journal")) and not _is_empty(path):
        with storage_errors():
            connection = sqlite3.connect(path)
            try:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            finally:
                connection.close()


def keep_copy(path: Path) -> None:
    """Where the number of commits was taken away after an unclean end, somebody decided to go on without what is
    missing: keep a dated copy of database and log before SQLite forgets what it cannot use. Raises StorageError."""
    if _is_empty(path) or commits_acknowledged(path) is not None:
        return
    reader = open_reader(path)
    try:
        with storage_errors():
            version = int(reader.execute("PRAGMA user_version").fetchone()[0])
            unclean = 0 < version <= SCHEMA_VERSION and _is_open(reader) and commits_in(reader)
    finally:
        reader.close()
    if unclean:
        for file in (path, _log_of(path)):
            if not _is_empty(file):
                with storage_errors():
                    shutil.copy2(file, kept := _dated(file))
                logger.warning("a copy is kept as %s", kept.name)


def _was_started_anew(path: Path) -> bool:
    return _is_empty(path) and not commits_acknowledged(path)


def _never_had_a_log(path: Path) -> bool:
    """So are backups; the database itself is told to have one before anything is written to it."""
    if _is_empty(path):
        return False
    with storage_errors(), path.open("rb") as file:
        return file.read(20)[18:] == b"\x01\x01"  # the file format's versions for writing and reading; 2 has a log


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _dated(file: Path) -> Path:
    return file.with_name(f"kept-{datetime.now():%Y%m%d-%H%M%S}-{file.name}")


def _report(damage: Damage, what: str) -> Damage:
    if damage:
        logger.error("the database %s: it is open for reading only", what)
    return damage


def _is_empty(path: Path) -> bool:
    return not path.exists() or path.stat().st_size == 0


def _is_open(reader: sqlite3.Connection) -> bool:
    """Whether it was not closed well."""
    return reader.execute("SELECT 1 FROM facts WHERE name = 'open'").fetchone() is not None


def _is_sound(reader: sqlite3.Connection) -> bool:
    try:
        return [row[0] for row in reader.execute("PRAGMA quick_check")] == ["ok"]
    except sqlite3.DatabaseError:  # some damage ends the check itself
        return False
