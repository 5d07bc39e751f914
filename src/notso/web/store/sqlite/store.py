"""Store chats in a SQLite file, with one writer thread and several reader threads; make and read backups."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from notso.system.files import file_type
from notso.web.store.documents import DocumentText
from notso.web.store.protocol import FAILED, MOST_TRIES, Heartbeat, Orphan, StoredMessage
from notso.web.store.sql.database import FIND, Database
from notso.web.store.sql.documents import load_text
from notso.web.store.sql.search_words import Term, fts5_query, indexed_text
from notso.web.store.sql.store import SQLStore
from notso.web.store.sqlite.connection import (
    CommitCounterFile,
    DirectoryLock,
    SQLiteStatements,
    checkpoint,
    copy,
    copy_if_unclean,
    damage_message,
    detect_damage,
    move_foreign_log,
    open_empty,
    open_reader,
    open_writer,
    read_acknowledged_count,
    read_commit_count,
    read_version,
    roll_back,
    storage_errors,
    transaction,
)
from notso.web.store.sqlite.migrations import SCHEMA_VERSION
from notso.web.values.errors import DataDirectoryBusyError, StorageDamagedError, StorageError
from notso.web.values.fair_queue import FairQueue

T = TypeVar("T")


class Writer:
    """Connection that writes to the database at `path`. Not thread-safe. Methods raise StorageError."""

    def __init__(self, path: Path) -> None:
        copy_if_unclean(path)
        self.connection = open_writer(path)
        self.needs_checkpoint = False  # whether the log has commits that are not in the database file yet
        try:
            with storage_errors():
                self._commits = self._initialize_counter(path)
                self._commit_file = CommitCounterFile(path, self._commits)
        except BaseException:
            self.connection.close()
            raise

    def write(self, work: Callable[[Database], T]) -> T:
        """Run `work` in a transaction, and sync it to disk."""
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
                self._commit_file.note(self._commits)
                self.needs_checkpoint = True
            return result

    def checkpoint(self) -> bool:
        """Checkpoint the log unless a reader prevents this. Return whether the log is empty."""
        with storage_errors():
            if checkpoint(self.connection):
                self.needs_checkpoint = False
                self._commit_file.sync()
            return not self.needs_checkpoint

    def copy(self, target: Path) -> None:
        with storage_errors():
            copy(self.connection, target)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.connection.execute("DELETE FROM facts WHERE name = 'open'")
            # The database file itself must contain the final count, because the log may be lost.
            checkpoint(self.connection)
        self.connection.close()
        self._commit_file.close()

    def _initialize_counter(self, path: Path) -> int:
        acknowledged = read_acknowledged_count(path) or 0
        self.connection.execute("INSERT OR IGNORE INTO facts VALUES ('commits', ?)", (str(acknowledged),))
        checkpoint(self.connection)
        return read_commit_count(self.connection) or 0


READ_THREADS = 4
# Checkpoint after this time without writes, so that the log is usually empty. Running answers are saved at shorter
# intervals, so no checkpoint slows them down.
IDLE_SECONDS = 2.0


_INTERRUPT = "UPDATE messages SET state = 'interrupted' WHERE state IN ('queued', 'running')"
_CANNOT_CONTINUE = (
    " AND (trash_id IS NOT NULL OR chat_id IN (SELECT id FROM chats WHERE trash_id IS NOT NULL)"
    " OR id NOT IN (SELECT message_id FROM answer_traces WHERE tries < ?))"
)
_UNFINISHED = (
    "SELECT owner, chat_id, id AS message_id, generation_id FROM messages WHERE state IN ('queued', 'running')"
)


class SQLiteStore(SQLStore):
    is_shared = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._path = directory / "notso.db"
        self._writes = FairQueue("notso-db-write")
        self._reads = FairQueue("notso-db-read", READ_THREADS)
        self._lock: DirectoryLock | None = None
        self._writer: Writer | None = None
        self._readers: list[sqlite3.Connection] = []  # idle connections
        self._checkpoint_timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Lock the directory, migrate, and mark unfinished answers as interrupted if they cannot be continued.

        Idempotent. Opens a damaged database read-only.
        """
        if self._writer is None and not self.read_only:
            await self._writes.run("", self._open)

    async def close(self) -> None:
        if self._checkpoint_timer is not None:
            self._checkpoint_timer.cancel()
        await self._reads.join()
        await self._reads.run("", self._close_readers)
        await self._writes.join()
        await self._writes.run("", self._close_writer)
        self._reads.close()
        self._writes.close()

    async def require_exclusive_use(self) -> None:
        if self.read_only:
            raise StorageDamagedError(damage_message(self.damage))
        await self.write(lambda db: db.execute(_INTERRUPT))

    async def heartbeat(
        self, running: frozenset[str], known: frozenset[str] | None = None, *, is_leaving: bool = False
    ) -> Heartbeat:
        if known is None or is_leaving or self.read_only:
            return Heartbeat()
        unfinished = [Orphan(**row) for row in await self.read("", _UNFINISHED)]
        return Heartbeat(taken=tuple(each for each in unfinished if each.generation_id not in known))

    async def backup(self, target: Path) -> None:
        await self._writes.run("", lambda: self._require_writer().copy(target))

    async def write(self, work: Callable[[Database], T], owner: str = "") -> T:
        result = await self._writes.run(owner, lambda: self._require_writer().write(work))
        self._checkpoint_when_idle()
        return result

    def _checkpoint_when_idle(self) -> None:
        if self._checkpoint_timer is not None:
            self._checkpoint_timer.cancel()
        if self._writer is not None and self._writer.needs_checkpoint:
            self._checkpoint_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._begin_checkpoint)

    def _begin_checkpoint(self) -> None:
        if self._writer is None:
            return
        running = asyncio.ensure_future(self._writes.run("", self._writer.checkpoint))

        def ended(done: asyncio.Future[bool]) -> None:
            # Try again if a reader blocked the checkpoint. After an error, the next write starts another attempt.
            if not done.cancelled() and done.exception() is None and not done.result():
                self._checkpoint_when_idle()

        running.add_done_callback(ended)

    def _require_writer(self) -> Writer:
        if self.read_only:
            raise StorageDamagedError(damage_message(self.damage))
        if self._writer is None:
            raise StorageError(FAILED)
        return self._writer

    async def run_read(self, work: Callable[[Database], T], owner: str = "") -> T:
        def run() -> T:
            with storage_errors():
                reader = self._checkout_reader()
                try:
                    return work(SQLiteDatabase(reader))
                finally:
                    self._readers.append(reader)

        return await self._reads.run(owner, run)

    def _checkout_reader(self) -> sqlite3.Connection:
        try:
            return self._readers.pop()
        except IndexError:
            return open_empty() if self.damage == "gone" else open_reader(self._path)

    def _open(self) -> None:
        self._lock = DirectoryLock(self._directory)
        try:
            for file in self._directory.glob("backup-*.db"):  # remains of aborted downloads
                file.unlink(missing_ok=True)
            move_foreign_log(self._path)
            roll_back(self._path)
            self.damage = detect_damage(self._path)
            if self.read_only:
                return
            self._writer = Writer(self._path)
            self._writer.write(lambda db: db.execute(_INTERRUPT + _CANNOT_CONTINUE, (MOST_TRIES,)))
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


@contextlib.contextmanager
def _open_backup(copy: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(open_reader(copy)) as db, storage_errors():
        if read_version(db) != SCHEMA_VERSION:
            raise StorageError("the conversations were written by another version of notso")
        yield db


def permanent_chats(copy: Path) -> list[tuple[str, str]]:
    """Return (owner, id) for each chat in a backup, oldest first, except temporary and deleted chats.

    Raises StorageError, for example if the schema version differs.
    """
    with _open_backup(copy) as db:
        rows = db.execute(
            "SELECT owner, id FROM chats WHERE trash_id IS NULL AND NOT temporary ORDER BY created_ms, id"
        )
        return [(row["owner"], row["id"]) for row in rows]


def library_texts(copy: Path, owner: str, library: str) -> Iterator[tuple[str, DocumentText]]:
    """Yield the names and texts of the documents in a backup's library, oldest first. Raises StorageError."""
    with _open_backup(copy) as db:
        rows = db.execute(
            "SELECT documents.id, documents.name FROM documents JOIN libraries ON libraries.id = library_id"
            " WHERE libraries.owner = ? AND libraries.name = ? ORDER BY documents.created_ms, documents.id",
            (owner, library),
        ).fetchall()
        for row in rows:
            if (text := load_text(SQLiteDatabase(db), row["id"])) is not None:
                yield row["name"], text


def back_up_directory(folder: Path, target: Path) -> None:
    """Copy the chat database in `folder` to `target`. Raises StorageError, for example if a server uses the folder."""
    path = folder / "notso.db"
    if not file_type(path):
        raise StorageError(f"{folder} contains no chats")
    try:
        lock = DirectoryLock(folder)
    except DataDirectoryBusyError:
        raise DataDirectoryBusyError(
            "a server is using this data directory: use `notso backup --from` with its address"
        ) from None
    try:
        move_foreign_log(path)
        roll_back(path)
        damage = detect_damage(path)
        if damage:
            raise StorageDamagedError(damage_message(damage))
        with contextlib.closing(Writer(path)) as writer:
            writer.copy(target)
    finally:
        lock.release()


_FIND = FIND.format(texts="texts JOIN indexed ON indexed.number = texts.rowid", match="texts MATCH ?")


MERGED_PAGES = 500  # number of search index pages to merge per transaction


class SQLiteDatabase(SQLiteStatements, Database):
    def prepare_bulk_copy(self) -> None:
        self.execute("PRAGMA defer_foreign_keys=ON")

    def index_title(self, owner: str, chat_id: str, title: str) -> None:
        self._index("chat_id = ? AND message_id IS NULL", chat_id, (owner, chat_id, None), title)

    def index_message(self, owner: str, message: StoredMessage) -> None:
        self._index("message_id = ?", message.id, (owner, message.chat_id, message.id), message.content)

    def _index(self, where: str, key: str, row: tuple[str | None, ...], text: str) -> None:
        db = self._connection
        found = db.execute(f"SELECT number FROM indexed WHERE {where}", (key,)).fetchone()
        if found is None:
            added = "INSERT INTO indexed (owner, chat_id, message_id) VALUES (?, ?, ?) RETURNING number"
            found = db.execute(added, row).fetchone()
        body = indexed_text(text)
        db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (found["number"], body))

    # These methods delete rows of `texts`, because triggers cannot: with trusted_schema=OFF, SQLite 3.40 does not let
    # triggers write to an FTS table.
    def unindex_chat(self, chat_id: str) -> None:
        self.execute("DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE chat_id = ?)", (chat_id,))

    def unindex_message(self, message_id: str) -> None:
        sql = "DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE message_id = ?)"
        self.execute(sql, (message_id,))

    def merge_index(self) -> bool:
        before = self._connection.total_changes
        # FTS5 keeps deleted words until their segments are merged. A negative number merges segments of all levels.
        self.execute("INSERT INTO texts (texts, rank) VALUES ('merge', ?)", (-MERGED_PAGES,))
        return self._connection.total_changes - before > 1

    def find(self, owner: str, terms: Sequence[Term], limit: int) -> list[Any]:
        return self.execute(_FIND, (fts5_query(terms), owner, limit)).fetchall()

    def vocabulary(self, owner: str) -> Iterator[str]:
        # The table `vocabulary` has the words of all owners, so it is used only if there is no other owner. Otherwise,
        # words of other owners would slow down searches. They would also displace similar words of this owner, which
        # would reveal what others have written.
        if self.execute("SELECT 1 AS one FROM indexed WHERE owner <> ? LIMIT 1", (owner,)).fetchone() is None:
            yield from (row["term"] for row in self.execute("SELECT term FROM vocabulary"))
            return
        # With a cross join, SQLite reads only the texts of this owner.
        own = "SELECT body FROM indexed CROSS JOIN texts ON texts.rowid = indexed.number WHERE owner = ?"
        found = set[str]()
        for row in self.execute(own, (owner,)):
            found.update(row["body"].split())
        yield from found
