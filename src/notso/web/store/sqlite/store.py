"""Conversations in one SQLite file: one thread writes, one reads, and the event loop waits for neither."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from notso.web.store.protocol import (
    Chat,
    Conversation,
    Damage,
    Heartbeat,
    NewMessage,
    NewTurn,
    SavedPrompt,
    SearchHit,
    SettingValue,
    StoredMessage,
    StoredResponse,
    TurnAccepted,
    TurnRefused,
    WholeChat,
)
from notso.web.store.sqlite import responses, trash, tree_writes
from notso.web.store.sqlite.connection import open_nothing, open_reader, snapshot, storage_errors
from notso.web.store.sqlite.damage import damage_of, move_strange_log, roll_back, said_of
from notso.web.store.sqlite.directory_lock import DirectoryLock
from notso.web.store.sqlite.rows import chat_of, message_of, settings_text
from notso.web.store.sqlite.text_index import find, index_title
from notso.web.store.sqlite.writer import Writer
from notso.web.values.errors import StorageDamagedError, StorageError

T = TypeVar("T")

IDLE_SECONDS = 2.0
"""After so long without a write the log is folded into the file, so that a log that gets lost mostly held nothing.
An answer that is being written is saved more often than that."""

_CHAT = "SELECT * FROM chats WHERE id = ? AND owner = ? AND trash_id IS NULL"
_DEFAULTS = "SELECT settings FROM preferences WHERE owner = ?"
_MESSAGES = "SELECT * FROM messages WHERE chat_id = ? AND owner = ? AND trash_id IS NULL ORDER BY position"


class SQLiteStore:
    """A ChatStore in `directory`/notso.db (see protocol.py for the methods)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "notso.db"
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="notso-db-write")
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="notso-db-read")
        self._lock: DirectoryLock | None = None
        self._writer: Writer | None = None
        self._reader: sqlite3.Connection | None = None
        self._folding: asyncio.TimerHandle | None = None
        self._in_trash: dict[str, float] = {}
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

    async def heartbeat(self, running: Collection[str]) -> Heartbeat:
        """See ChatStore: nobody else is there, and what a crash left was interrupted when this was opened."""
        return Heartbeat()

    async def chats(self, owner: str) -> list[Chat]:
        rows = await self._read(
            "SELECT * FROM chats WHERE owner = ? AND trash_id IS NULL ORDER BY pinned DESC, updated_ms DESC, id DESC",
            owner,
        )
        return [chat_of(row) for row in rows]

    async def chat(self, owner: str, chat_id: str) -> Chat | None:
        rows = await self._read(_CHAT, chat_id, owner)
        return chat_of(rows[0]) if rows else None

    async def whole_chat(self, owner: str, chat_id: str) -> WholeChat | None:
        def read(db: sqlite3.Connection) -> WholeChat | None:
            with snapshot(db):
                chat = db.execute(_CHAT, (chat_id, owner)).fetchone()
                defaults = db.execute(_DEFAULTS, (owner,)).fetchone()
                messages = db.execute(_MESSAGES, (chat_id, owner)).fetchall()
            if chat is None:
                return None
            return WholeChat(chat_of(chat), _settings_in(defaults), tuple(map(self._message, messages)))

        return await self._look(read)

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        return [self._message(row) for row in await self._read(_MESSAGES, chat_id, owner)]

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None:
        rows = await self._read(
            "SELECT * FROM messages WHERE id = ? AND chat_id = ? AND owner = ? AND trash_id IS NULL",
            *(message_id, chat_id, owner),
        )
        return self._message(rows[0]) if rows else None

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None:
        rows = await self._read(
            "SELECT messages.* FROM messages JOIN chats ON chats.id = chat_id AND chats.trash_id IS NULL"
            " WHERE generation_id = ? AND messages.owner = ? AND messages.trash_id IS NULL",
            *(generation_id, owner),
        )
        return self._message(rows[0]) if rows else None

    def _message(self, row: sqlite3.Row) -> StoredMessage:
        message = message_of(row)
        return replace(message, state="interrupted") if self.read_only and message.active else message

    async def search(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        return await self._look(lambda db: find(db, owner, query, limit))

    async def add_turn(self, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
        return await self._write(lambda db: tree_writes.add_turn(db, owner, turn, new_chat))

    async def add_message(self, owner: str, new: NewMessage) -> TurnAccepted | TurnRefused:
        return await self._write(lambda db: tree_writes.add_message(db, owner, new))

    async def resume_message(
        self, owner: str, chat_id: str, message_id: str, generation_id: str
    ) -> TurnAccepted | TurnRefused:
        return await self._write(lambda db: tree_writes.resume_message(db, owner, chat_id, message_id, generation_id))

    async def edit_message(self, owner: str, chat_id: str, message_id: str, content: str) -> bool:
        return await self._write(lambda db: tree_writes.edit_message(db, owner, chat_id, message_id, content))

    async def choose(self, owner: str, chat_id: str, message_id: str) -> bool:
        return await self._write(lambda db: tree_writes.choose(db, owner, chat_id, message_id))

    async def remove_summary(self, owner: str, chat_id: str, message_id: str) -> bool:
        return await self._write(lambda db: tree_writes.remove_summary(db, owner, chat_id, message_id))

    async def set_thinking(self, owner: str, chat_id: str, thinking: bool) -> bool:
        return await self._change("UPDATE chats SET thinking = ? WHERE id = ? AND owner = ?", thinking, chat_id, owner)

    async def set_title(self, owner: str, chat_id: str, title: str) -> bool:
        def write(db: sqlite3.Connection) -> bool:
            found = db.execute("UPDATE chats SET title = ? WHERE id = ? AND owner = ?", (title, chat_id, owner))
            if found.rowcount:
                index_title(db, owner, chat_id, title)
            return found.rowcount > 0

        return await self._write(write)

    async def set_pinned(self, owner: str, chat_id: str, pinned: bool) -> bool:
        return await self._change("UPDATE chats SET pinned = ? WHERE id = ? AND owner = ?", pinned, chat_id, owner)

    async def set_unread(self, owner: str, chat_id: str, unread: bool) -> bool:
        return await self._change("UPDATE chats SET unread = ? WHERE id = ? AND owner = ?", unread, chat_id, owner)

    async def set_archived(self, owner: str, chat_id: str, archived: bool) -> bool:
        return await self._change("UPDATE chats SET archived = ? WHERE id = ? AND owner = ?", archived, chat_id, owner)

    async def keep(self, owner: str, chat_id: str) -> bool:
        return await self._change("UPDATE chats SET temporary = 0 WHERE id = ? AND owner = ?", chat_id, owner)

    async def lapsed(self, before_ms: int) -> list[tuple[str, str]]:
        rows = await self._read(
            "SELECT owner, id FROM chats WHERE temporary = 1 AND trash_id IS NULL AND updated_ms < ?", before_ms
        )
        return [(row["owner"], row["id"]) for row in rows]

    async def prompts(self, owner: str) -> list[SavedPrompt]:
        rows = await self._read("SELECT name, kind, text FROM prompts WHERE owner = ? ORDER BY name", owner)
        return [SavedPrompt(**row) for row in rows]

    async def save_prompt(self, owner: str, prompt: SavedPrompt) -> None:
        values = (owner, prompt.name, prompt.kind, prompt.text)
        await self._change("INSERT OR REPLACE INTO prompts (owner, name, kind, text) VALUES (?, ?, ?, ?)", *values)

    async def delete_prompt(self, owner: str, name: str) -> bool:
        return await self._change("DELETE FROM prompts WHERE owner = ? AND name = ?", owner, name)

    async def set_settings(self, owner: str, chat_id: str, settings: Mapping[str, SettingValue]) -> bool:
        text = settings_text(settings)
        return await self._change("UPDATE chats SET settings = ? WHERE id = ? AND owner = ?", text, chat_id, owner)

    async def defaults(self, owner: str) -> dict[str, SettingValue]:
        rows = await self._read(_DEFAULTS, owner)
        return _settings_in(rows[0] if rows else None)

    async def set_defaults(self, owner: str, settings: Mapping[str, SettingValue]) -> None:
        await self._change("INSERT OR REPLACE INTO preferences VALUES (?, ?)", owner, settings_text(settings))

    async def trash_chat(self, owner: str, chat_id: str) -> str | None:
        return await self._write(lambda db: trash.trash_chat(db, owner, chat_id))

    async def trash_messages(self, owner: str, chat_id: str, *, reset: bool) -> str | None:
        return await self._write(lambda db: trash.trash_messages(db, owner, chat_id, reset=reset))

    async def restore(self, owner: str, trash_id: str) -> str | None:
        return await self._write(lambda db: trash.restore(db, owner, trash_id))

    async def thrown_away(self, seconds: float, now: float | None = None) -> list[Conversation]:
        return await self._write(lambda db: trash.thrown_away(db, trash.due(db, self._in_trash, seconds, now)))

    async def purge(self, seconds: float, now: float | None = None) -> int:
        return await self._write(lambda db: trash.purge(db, trash.due(db, self._in_trash, seconds, now)))

    async def add_chat(self, owner: str, chat: Chat, messages: Sequence[StoredMessage]) -> None:
        await self._write(lambda db: tree_writes.add_chat(db, owner, chat, messages))

    async def save_message(self, assistant_message: StoredMessage) -> None:
        await self._write(lambda db: tree_writes.save_message(db, assistant_message))

    async def keep_html(self, messages: Sequence[StoredMessage]) -> None:
        await self._write(lambda db: tree_writes.keep_html(db, messages))

    async def backup(self, target: Path) -> None:
        work = lambda: self._require_writer().copy(target)  # noqa: E731
        await asyncio.get_running_loop().run_in_executor(self._write_thread, work)

    async def save_response(self, owner: str, response: StoredResponse) -> None:
        await self._write(lambda db: responses.save_response(db, owner, response))

    async def response(self, owner: str, response_id: str) -> StoredResponse | None:
        rows = await self._read("SELECT * FROM responses WHERE id = ? AND owner = ?", response_id, owner)
        return responses.response_of(rows[0]) if rows else None

    async def delete_response(self, owner: str, response_id: str) -> bool:
        return await self._change("DELETE FROM responses WHERE id = ? AND owner = ?", response_id, owner)

    # ---- threads

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
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

    async def _change(self, sql: str, *parameters: str | float | bool | None) -> bool:
        return await self._write(lambda db: db.execute(sql, parameters).rowcount > 0)

    async def _read(self, sql: str, *parameters: str | int) -> list[sqlite3.Row]:
        return await self._look(lambda db: db.execute(sql, parameters).fetchall())

    async def _look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            with storage_errors():
                if self._reader is None:
                    self._reader = open_nothing() if self.damage == "gone" else open_reader(self._path)
                return work(self._reader)

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


def _settings_in(row: sqlite3.Row | None) -> dict[str, SettingValue]:
    return dict(json.loads(row["settings"])) if row is not None else {}
