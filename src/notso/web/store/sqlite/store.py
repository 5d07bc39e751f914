"""Conversations in one SQLite file: one thread writes, several read, and the event loop waits for none."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
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
from notso.web.values.fair_queue import FairQueue

T = TypeVar("T")

READ_THREADS = 4
IDLE_SECONDS = 2.0
"""After so long without a write the log is folded into the file, so that a log that gets lost mostly held nothing.
An answer that is being written is saved more often than that."""


class SQLiteStore(SQLStore):
    """A ChatStore in `directory`/notso.db (see protocol.py for the methods)."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._path = directory / "notso.db"
        self._writes = FairQueue("notso-db-write")
        self._reads = FairQueue("notso-db-read", READ_THREADS)
        self._lock: DirectoryLock | None = None
        self._writer: Writer | None = None
        self._readers: list[sqlite3.Connection] = []  # that nobody uses just now
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
            await self._writes.run("", self._open)

    async def close(self) -> None:
        if self._folding is not None:
            self._folding.cancel()
        await self._reads.join()
        await self._reads.run("", self._close_readers)
        await self._writes.join()
        await self._writes.run("", self._close_writer)
        self._reads.close()
        self._writes.close()

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
        await self._writes.run("", lambda: self._require_writer().copy(target))

    # ---- threads

    async def write(self, work: Callable[[Database], T], owner: str = "") -> T:
        result = await self._writes.run(owner, lambda: self._require_writer().write(work))
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
        folding = asyncio.ensure_future(self._writes.run("", self._writer.fold))

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

    async def look(self, work: Callable[[Database], T], owner: str = "") -> T:
        def run() -> T:
            with storage_errors():
                reader = self._free_reader()
                try:
                    return work(SQLiteDatabase(reader))
                finally:
                    self._readers.append(reader)

        return await self._reads.run(owner, run)

    def _free_reader(self) -> sqlite3.Connection:
        try:
            return self._readers.pop()
        except IndexError:
            return open_nothing() if self.damage == "gone" else open_reader(self._path)

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

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.release()
