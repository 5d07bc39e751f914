"""Conversations in one SQLite file: one thread writes, one reads, and the event loop waits for neither."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TypeVar

from notso.web.store.connection import close_writer, open_reader, open_writer, storage_errors, transaction
from notso.web.store.directory_lock import DirectoryLock
from notso.web.store.protocol import Chat, NewTurn, Numbers, StoredMessage, TurnAccepted, TurnRefused

T = TypeVar("T")


class SQLiteStore:
    """A ChatStore in `directory`/notso.db (see protocol.py for the methods)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "notso.db"
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="notso-db-write")
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="notso-db-read")
        self._lock: DirectoryLock | None = None
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Lock the directory, bring the schema up to date, mark what a crash left running as interrupted.

        Opening an open store does nothing.
        """
        if self._writer is None:
            await asyncio.get_running_loop().run_in_executor(self._write_thread, self._open)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._read_thread, self._close_reader)
        await loop.run_in_executor(self._write_thread, self._close_writer)
        self._read_thread.shutdown()
        self._write_thread.shutdown()

    async def chats(self, owner: str) -> list[Chat]:
        rows = await self._read("SELECT * FROM chats WHERE owner = ? ORDER BY updated_ms DESC, id DESC", owner)
        return [_chat(row) for row in rows]

    async def chat(self, owner: str, chat_id: str) -> Chat | None:
        rows = await self._read("SELECT * FROM chats WHERE id = ? AND owner = ?", chat_id, owner)
        return _chat(rows[0]) if rows else None

    async def messages(self, owner: str, chat_id: str) -> list[StoredMessage]:
        rows = await self._read(
            "SELECT * FROM messages WHERE chat_id = ? AND owner = ? ORDER BY position", chat_id, owner
        )
        return [_message(row) for row in rows]

    async def message(self, owner: str, chat_id: str, message_id: str) -> StoredMessage | None:
        rows = await self._read(
            "SELECT * FROM messages WHERE id = ? AND chat_id = ? AND owner = ?", message_id, chat_id, owner
        )
        return _message(rows[0]) if rows else None

    async def generation(self, owner: str, generation_id: str) -> StoredMessage | None:
        rows = await self._read("SELECT * FROM messages WHERE generation_id = ? AND owner = ?", generation_id, owner)
        return _message(rows[0]) if rows else None

    async def add_turn(self, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
        return await self._write(lambda db: _add_turn(db, owner, turn, new_chat))

    async def set_thinking(self, owner: str, chat_id: str, thinking: bool) -> bool:
        return await self._change("UPDATE chats SET thinking = ? WHERE id = ? AND owner = ?", thinking, chat_id, owner)

    async def set_title(self, owner: str, chat_id: str, title: str) -> bool:
        return await self._change("UPDATE chats SET title = ? WHERE id = ? AND owner = ?", title, chat_id, owner)

    async def delete_chat(self, owner: str, chat_id: str) -> bool:
        return await self._change("DELETE FROM chats WHERE id = ? AND owner = ?", chat_id, owner)

    async def save_answer(self, answer: StoredMessage) -> None:
        numbers = answer.numbers
        await self._change(
            "UPDATE messages SET content = ?, reasoning = ?, state = ?, note = ?, prompt_tokens = ?, cached_tokens = ?,"
            " completion_tokens = ?, reasoning_tokens = ?, prompt_ms = ?, completion_ms = ?, thinking_ms = ?,"
            " answer_html = ?, reasoning_html = ?, renderer = ? WHERE id = ?",
            *(
                answer.content,
                answer.reasoning,
                answer.state,
                answer.note,
                numbers.prompt_tokens,
                numbers.cached_tokens,
            ),
            *(numbers.completion_tokens, numbers.reasoning_tokens, numbers.prompt_ms, numbers.completion_ms),
            *(numbers.thinking_ms, answer.answer_html, answer.reasoning_html, answer.renderer, answer.id),
        )

    # ---- threads

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            with storage_errors():
                if self._writer is None:
                    raise sqlite3.ProgrammingError("closed")
                with transaction(self._writer):
                    return work(self._writer)

        return await asyncio.get_running_loop().run_in_executor(self._write_thread, run)

    async def _change(self, sql: str, *parameters: str | float | bool | None) -> bool:
        return await self._write(lambda db: db.execute(sql, parameters).rowcount > 0)

    async def _read(self, sql: str, *parameters: str) -> list[sqlite3.Row]:
        def run() -> list[sqlite3.Row]:
            with storage_errors():
                if self._reader is None:
                    self._reader = open_reader(self._path)
                return self._reader.execute(sql, parameters).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._read_thread, run)

    def _open(self) -> None:
        self._lock = DirectoryLock(self._directory)
        try:
            self._writer = open_writer(self._path)
            with storage_errors(), transaction(self._writer):
                self._writer.execute("UPDATE messages SET state = 'interrupted' WHERE state IN ('queued', 'running')")
        except BaseException:
            self._close_writer()
            raise

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _close_writer(self) -> None:
        if self._writer is not None:
            close_writer(self._writer)
            self._writer = None
        if self._lock is not None:
            self._lock.release()


def _add_turn(db: sqlite3.Connection, owner: str, turn: NewTurn, new_chat: Chat | None) -> TurnAccepted | TurnRefused:
    known = db.execute(
        "SELECT * FROM messages WHERE owner = ? AND idempotency_key = ?", (owner, turn.idempotency_key)
    ).fetchone()
    if known is not None:
        answer = db.execute("SELECT * FROM messages WHERE parent_id = ? AND role = 'assistant'", (known["id"],))
        return TurnAccepted(_message(known), _message(answer.fetchone()), repeated=True)
    chat_id = turn.question.chat_id
    if new_chat is not None:
        _insert_chat(db, owner, new_chat)
    elif not db.execute("SELECT 1 FROM chats WHERE id = ? AND owner = ?", (chat_id, owner)).fetchone():
        return TurnRefused(None)
    running = db.execute(
        "SELECT * FROM messages WHERE chat_id = ? AND state IN ('queued', 'running')", (chat_id,)
    ).fetchone()
    if running is not None:
        return TurnRefused(_message(running))
    last = db.execute(
        "SELECT id, position FROM messages WHERE chat_id = ? ORDER BY position DESC LIMIT 1", (chat_id,)
    ).fetchone()
    parent, position = (last["id"], last["position"]) if last is not None else (None, 0)
    _insert_message(db, owner, turn.question, parent, position + 1, turn.idempotency_key)
    _insert_message(db, owner, turn.answer, turn.question.id, position + 2, None)
    db.execute("UPDATE chats SET updated_ms = ? WHERE id = ?", (_now_ms(), chat_id))
    return TurnAccepted(turn.question, turn.answer)


def _insert_chat(db: sqlite3.Connection, owner: str, chat: Chat) -> None:
    db.execute(
        "INSERT INTO chats (id, owner, title, thinking, prompt_date, created_ms, updated_ms) VALUES (?,?,?,?,?,?,?)",
        (chat.id, owner, chat.title, chat.thinking, chat.prompt_date.isoformat(), chat.created_ms, chat.updated_ms),
    )


def _insert_message(
    db: sqlite3.Connection, owner: str, message: StoredMessage, parent: str | None, position: int, key: str | None
) -> None:
    db.execute(
        "INSERT INTO messages (id, chat_id, owner, parent_id, position, role, content, reasoning, state, generation_id,"
        " idempotency_key, created_ms) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            *(message.id, message.chat_id, owner, parent, position, message.role, message.content, message.reasoning),
            *(message.state, message.generation_id, key, message.created_ms),
        ),
    )


def _chat(row: sqlite3.Row) -> Chat:
    return Chat(
        id=row["id"],
        title=row["title"],
        thinking=bool(row["thinking"]),
        prompt_date=date.fromisoformat(row["prompt_date"]),
        created_ms=row["created_ms"],
        updated_ms=row["updated_ms"],
    )


def _message(row: sqlite3.Row) -> StoredMessage:
    message = StoredMessage(
        **{name: row[name] for name in ("id", "chat_id", "role", "content", "reasoning", "state", "created_ms")},
        generation_id=row["generation_id"],
        note=row["note"],
        numbers=Numbers(**{name: row[name] for name in Numbers.__dataclass_fields__}),
    )
    return replace(
        message, answer_html=row["answer_html"], reasoning_html=row["reasoning_html"], renderer=row["renderer"]
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
