"""The one connection that writes: it counts its commits, folds the log into the file, and makes copies."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from notso.web.store.sql.database import Database
from notso.web.store.sqlite.connection import copy, fold, open_writer, storage_errors, transaction
from notso.web.store.sqlite.damage import keep_copy
from notso.web.store.sqlite.database import SQLiteDatabase
from notso.web.store.sqlite.witness import Witness, commits_acknowledged, commits_in

T = TypeVar("T")


class Writer:
    """Writes to the database at `path`. Made and used in one thread; every method may raise StorageError."""

    def __init__(self, path: Path) -> None:
        keep_copy(path)
        self.connection = open_writer(path)
        self.unfolded = False  # whether the log holds something that the file does not
        try:
            with storage_errors():
                self._commits = self._begin_counting(path)
                self._witness = Witness(path, self._commits)
        except BaseException:
            self.connection.close()
            raise

    def write(self, work: Callable[[Database], T]) -> T:
        """Run `work` in one transaction. What it changed is on disk when this returns."""
        with storage_errors():
            before = self.connection.total_changes
            with transaction(self.connection):
                result = work(SQLiteDatabase(self.connection))
                changed = self.connection.total_changes > before
                if changed:
                    self.connection.execute(
                        "UPDATE facts SET value = ? WHERE name = 'commits'", (str(self._commits + 1),)
                    )
            if changed:
                self._commits += 1
                self._witness.note(self._commits)
                self.unfolded = True
            return result

    def fold(self) -> bool:
        """Fold the log into the file and empty it, if no reader is in the way just now. Whether that was done."""
        with storage_errors():
            if fold(self.connection):
                self.unfolded = False
                self._witness.sync()
            return not self.unfolded

    def copy(self, target: Path) -> None:
        """A whole and orderly copy in place of `target`."""
        with storage_errors():
            copy(self.connection, target)

    def close(self) -> None:
        """Note that all went well, fold the log into the file, close."""
        with contextlib.suppress(sqlite3.Error):
            self.connection.execute("DELETE FROM facts WHERE name = 'open'")
            fold(self.connection)
        self.connection.close()
        self._witness.close()

    def _begin_counting(self, path: Path) -> int:
        """The number of commits. It must be in the file itself before it is told outside: a log may get lost."""
        acknowledged = commits_acknowledged(path) or 0
        self.connection.execute("INSERT OR IGNORE INTO facts VALUES ('commits', ?)", (str(acknowledged),))
        fold(self.connection)
        return commits_in(self.connection) or 0
