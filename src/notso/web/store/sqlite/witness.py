"""How many commits there have been, told beside the database: whoever loses some of them cannot lose that too.

SQLite takes a log that was deleted, cut or smashed for a shorter one and says nothing. Every commit therefore counts
itself in the database, and once it is on disk the number is written to `notso.db-commits`. It is not synced: the write
outlives the process, and where the power fails the number may be too low, never too high. So a database that holds a
smaller number than this file has lost something.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

DIGITS = 20  # always as many, so that the file is overwritten in place


class Witness:
    """The number for the database at `path`. Used by one thread."""

    def __init__(self, path: Path, commits: int) -> None:
        """Begin with this number, whatever stood there. Raises OSError."""
        acknowledged_at = _beside(path)
        self._file = os.fdopen(os.open(acknowledged_at, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        try:
            self._write(commits)
            os.fsync(self._file.fileno())
            _sync_directory(path.parent)
        except BaseException:
            self._file.close()
            raise

    def note(self, commits: int) -> None:
        """Tell a number. Where that fails the old one stays: less is noticed then, and no commit is refused."""
        with contextlib.suppress(OSError):
            self._write(commits)

    def sync(self) -> None:
        """Have what was told outlive the power too."""
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _write(self, commits: int) -> None:
        self._file.seek(0)
        self._file.write(b"%0*d\n" % (DIGITS, commits))


def commits_acknowledged(path: Path) -> int | None:
    """The number beside the database at `path`; None where there is none."""
    try:
        acknowledged = _beside(path).read_bytes()
    except FileNotFoundError:
        return None
    return int(acknowledged) if len(acknowledged) == DIGITS + 1 and acknowledged.strip().isdigit() else None


def commits_in(connection: sqlite3.Connection) -> int | None:
    """The number in a database itself; 0 where it is none."""
    row = connection.execute("SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'commits'").fetchone()
    return int(row[0]) if row is not None else None


def _beside(path: Path) -> Path:
    return path.with_name(path.name + "-commits")


def _sync_directory(directory: Path) -> None:
    if os.name != "nt":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
