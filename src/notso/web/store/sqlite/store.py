"""Conversations in one SQLite file: one thread writes, one reads, and the event loop waits for neither."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from notso.web.store.protocol import Damage, Heartbeat, StoredMessage
from notso.web.store.sql.database import Database
from notso.web.store.sql.rows import message_of
from notso.web.store.sql.store import SQLStore
from notso.web.store.sqlite.connection import open_nothing, open_reader, storage_errors
from notso.web.store.sqlite.damage import damage_of, move_strange_log, roll_back, said_of
from notso.web.store.sqlite.database import SQLiteDatabase
from notso.web.store.sqlite.directory_lock import DirectoryLock
from notso.web.store.sqlite.writer import Writer
from notso.web.values.errors import StorageDamagedError, StorageError

T = TypeVar("T")

IDLE_SECONDS = 2.0
"""After so long without a write the log is folded into the file, so that a log that gets lost mostly held nothing.
An answer that is being written is saved more often than that."""


class SQLiteStore(SQLStore):
    """A ChatStore in `directory`/notso.db (see protocol.py for the methods)."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._path = directory / "notso.db"
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="notso-db-write")
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="notso-db-read")
        self._lock: DirectoryLock | None = None
        self._writer: Writer | None = None
        self._reader: sqlite3.Connection | None = None
        self._folding: asyncio.TimerHandle | None = None
        self.damage: Damage = ""

    @property
    def read_only(self) -> bool:
        """See ChatStore."""
        return bool(self.damage)

    @property
    def is_shared(self) -> bool:
        """See ChatStore: one process owns the directory."""
        return False

    async def open(self) -> None:
        """Lock the directory, bring the schema up to date, mark what a crash left running as interrupted.

        A damaged file is opened for reading only, and left as it is.

        Opening an open store does nothing.
        """
        if self._writer is None and not self.read_only:
            await asyncio.get_running_loop().run_in_executor(self._write_thread, self._open)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._folding is not None:
            self._folding.cancel()
        await loop.run_in_executor(self._read_thread, self._close_reader)
        await loop.run_in_executor(self._write_thread, self._close_writer)
        self._read_thread.shutdown()
        self._write_thread.shutdown()

    async def refuse_company(self) -> None:
        """The directory's lock has done so."""
        if self.read_only:
            raise StorageDamagedError(said_of(self.damage))

    async def heartbeat(self, running: frozenset[str]) -> Heartbeat:
        """See ChatStore: nobody else is there, and what a crash left was interrupted when this was opened."""
        return Heartbeat()

    def _message(self, row: sqlite3.Row) -> StoredMessage:
        message = message_of(row)
        return replace(message, state="interrupted") if self.read_only and message.active else message

    async def backup(self, target: Path) -> None:
        work = lambda: self._require_writer().copy(target)  # noqa: E731
        await asyncio.get_running_loop().run_in_executor(self._write_thread, work)

    # ---- threads

    async def write(self, work: Callable[[Database], T]) -> T:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._write_thread, lambda: self._require_writer().write(work))
        self._fold_when_idle()
        return result

    def _fold_when_idle(self) -> None:
        if self._folding is not None:
            self._folding.cancel()
        if self._writer is not None and self._writer.unfolded:
            self._folding = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._begin_folding)

    def _begin_folding(self) -> None:
        if self._writer is None:
            return
        folding = asyncio.get_running_loop().run_in_executor(self._write_thread, self._writer.fold)

        def folded(done: asyncio.Future[bool]) -> None:
            if not done.cancelled() and done.exception() is None and not done.result():
                self._fold_when_idle()  # a reader was in the way; after an error the next write tries again

        folding.add_done_callback(folded)

    def _require_writer(self) -> Writer:
        if self.read_only:
            raise StorageDamagedError(said_of(self.damage))
        if self._writer is None:
            raise StorageError("the conversations cannot be read or written just now")
        return self._writer

    async def look(self, work: Callable[[Database], T]) -> T:
        def run() -> T:
            with storage_errors():
                if self._reader is None:
                    self._reader = open_nothing() if self.damage == "gone" else open_reader(self._path)
                return work(SQLiteDatabase(self._reader))

        return await asyncio.get_running_loop().run_in_executor(self._read_thread, run)

    def _open(self) -> None:
        self._lock = DirectoryLock(self._directory)
        try:
            for left in self._directory.glob("backup-*.db"):  # their readers went away
                left.unlink(missing_ok=True)
            move_strange_log(self._path)
            roll_back(self._path)
            self.damage = damage_of(self._path)
            if self.read_only:
                return
            self._writer = Writer(self._path)
            self._writer.write(
                lambda db: db.execute("UPDATE messages SET state = 'interrupted' WHERE state IN ('queued', 'running')")
            )
        except BaseException:
            self._close_writer()
            raise

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
