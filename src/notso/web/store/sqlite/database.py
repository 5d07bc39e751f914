"""SQLite connection for the shared statements, and the full-text index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager

from notso.web.store.protocol import HIT_BEGINS, HIT_ENDS, SearchHit, StoredMessage
from notso.web.store.sql.database import Database, Rows, Value
from notso.web.store.sqlite.connection import snapshot

MAX_INDEXED_CHARACTERS = 262_144

# snippet() takes time proportional to the text: it runs on the limited rows only.
_FIND = f"""
WITH found AS MATERIALIZED (
    SELECT texts.rowid AS number, indexed.chat_id, indexed.message_id, chats.title, rank AS score
    FROM texts
    JOIN indexed ON indexed.number = texts.rowid
    JOIN chats ON chats.id = indexed.chat_id AND chats.trash_id IS NULL AND chats.temporary = 0
    LEFT JOIN messages ON messages.id = indexed.message_id
    WHERE texts MATCH ? AND indexed.owner = ? AND messages.trash_id IS NULL
    ORDER BY indexed.message_id IS NOT NULL, rank LIMIT ?
)
SELECT found.chat_id, found.message_id, found.title,
       snippet(texts, 0, '{HIT_BEGINS}', '{HIT_ENDS}', '…', 14) AS snippet
FROM found JOIN texts ON texts.rowid = found.number
WHERE texts MATCH ? ORDER BY found.message_id IS NOT NULL, found.score
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
        db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (number, title))

    def index_message(self, owner: str, message: StoredMessage) -> None:
        db = self._connection
        row = db.execute("SELECT number FROM indexed WHERE message_id = ?", (message.id,)).fetchone()
        number = row[0] if row else _number(db, owner, message.chat_id, message.id)
        text = message.content[:MAX_INDEXED_CHARACTERS]
        db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (number, text))

    # Not done by triggers: SQLite 3.40 does not allow them to write to an FTS table.
    def remove_chat(self, chat_id: str) -> None:
        self.execute("DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE chat_id = ?)", (chat_id,))

    def remove_message(self, message_id: str) -> None:
        sql = "DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE message_id = ?)"
        self.execute(sql, (message_id,))

    def find(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        words = query.replace("\x00", " ").split()
        if not words:
            return []
        phrases = _phrases(words)
        return [SearchHit(*row) for row in self._connection.execute(_FIND, (phrases, owner, limit, phrases))]

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


def _phrases(words: list[str]) -> str:
    """Quote each word, so that none is an operator; the last is a prefix."""
    return " ".join('"' + word.replace('"', '""') + '"' for word in words) + "*"


def _number(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str | None) -> int:
    cursor = db.execute(
        "INSERT INTO indexed (owner, chat_id, message_id) VALUES (?, ?, ?)", (owner, chat_id, message_id)
    )
    return int(cursor.lastrowid or 0)
