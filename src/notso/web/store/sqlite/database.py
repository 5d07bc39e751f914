"""A SQLite connection as the common statements see it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager

from notso.web.store.protocol import SearchHit, StoredMessage
from notso.web.store.sql.database import Database, Rows, Value
from notso.web.store.sqlite import text_index
from notso.web.store.sqlite.connection import snapshot


class SQLiteDatabase(Database):
    """One process owns the file, and one connection of it writes: whatever is unfinished is its own."""

    for_update = ""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> Rows:
        return self._connection.execute(sql, parameters)

    def snapshot(self) -> AbstractContextManager[None]:
        return snapshot(self._connection)

    def begin_much(self) -> None:
        self.execute("PRAGMA defer_foreign_keys=ON")

    def index_title(self, owner: str, chat_id: str, title: str) -> None:
        text_index.index_title(self._connection, owner, chat_id, title)

    def index_message(self, owner: str, message: StoredMessage) -> None:
        text_index.index_message(self._connection, owner, message)

    def remove_chat(self, chat_id: str) -> None:
        text_index.remove_chat(self._connection, chat_id)

    def remove_message(self, message_id: str) -> None:
        text_index.remove_message(self._connection, message_id)

    def find(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        return text_index.find(self._connection, owner, query, limit)

    def take(self, owner: str, message_id: str) -> None:
        pass

    def interrupt_expired(self, owner: str, chat_id: str) -> None:
        pass

    def holds(self, message_id: str) -> bool:
        return True

    def let_go(self, message_id: str) -> None:
        pass

    def forget(self, owner: str, first_message_id: str) -> None:
        pass
