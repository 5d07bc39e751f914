"""SQLite connection for the shared statements, and the full-text index."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from notso.web.store.protocol import StoredMessage
from notso.web.store.sql.database import Database, Rows, Value
from notso.web.store.sql.search_words import Term, fts5_query, indexed_text
from notso.web.store.sqlite.connection import snapshot

_FIND = """
SELECT indexed.chat_id, indexed.message_id, chats.title, coalesce(messages.content, chats.title) AS text,
    coalesce(messages.created_ms, chats.updated_ms) AS at_ms
FROM texts
JOIN indexed ON indexed.number = texts.rowid
JOIN chats ON chats.id = indexed.chat_id AND chats.trash_id IS NULL AND chats.temporary = 0
LEFT JOIN messages ON messages.id = indexed.message_id
WHERE texts MATCH ? AND indexed.owner = ? AND messages.trash_id IS NULL
ORDER BY indexed.message_id IS NOT NULL, at_ms DESC, indexed.message_id DESC, indexed.chat_id LIMIT ?
"""


class SQLiteDatabase(Database):
    """Database in which every unfinished answer is this process's."""

    # One process owns the file, and only one of its connections writes.
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
        db = self._connection
        row = db.execute("SELECT number FROM indexed WHERE chat_id = ? AND message_id IS NULL", (chat_id,)).fetchone()
        number = row[0] if row else _number(db, owner, chat_id, None)
        db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (number, indexed_text(title)))

    def index_message(self, owner: str, message: StoredMessage) -> None:
        db = self._connection
        row = db.execute("SELECT number FROM indexed WHERE message_id = ?", (message.id,)).fetchone()
        number = row[0] if row else _number(db, owner, message.chat_id, message.id)
        body = indexed_text(message.content)
        db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (number, body))

    # Not done by triggers: SQLite 3.40 does not allow them to write to an FTS table.
    def remove_chat(self, chat_id: str) -> None:
        self.execute("DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE chat_id = ?)", (chat_id,))

    def remove_message(self, message_id: str) -> None:
        sql = "DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE message_id = ?)"
        self.execute(sql, (message_id,))

    def find(self, owner: str, terms: Sequence[Term], limit: int) -> list[Any]:
        return self.execute(_FIND, (fts5_query(terms), owner, limit)).fetchall()

    def vocabulary(self, owner: str) -> Iterator[str]:
        for row in self.execute("SELECT term FROM vocabulary"):
            yield row["term"]

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


def _number(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str | None) -> int:
    cursor = db.execute(
        "INSERT INTO indexed (owner, chat_id, message_id) VALUES (?, ?, ?)", (owner, chat_id, message_id)
    )
    return int(cursor.lastrowid or 0)
