"""A SQLite connection for the shared statements, and the full-text index, written with what it indexes."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager

from notso.web.store.protocol import HIT_BEGINS, HIT_ENDS, SearchHit, StoredMessage
from notso.web.store.sql.database import Database, Rows, Value
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
        index_title(self._connection, owner, chat_id, title)

    def index_message(self, owner: str, message: StoredMessage) -> None:
        index_message(self._connection, owner, message)

    def remove_chat(self, chat_id: str) -> None:
        remove_chat(self._connection, chat_id)

    def remove_message(self, message_id: str) -> None:
        remove_message(self._connection, message_id)

    def find(self, owner: str, query: str, limit: int) -> list[SearchHit]:
        return find(self._connection, owner, query, limit)

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


MAX_INDEXED_CHARACTERS = 262_144

# A snippet takes as long as its text: it is made of what is shown alone.
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


def index_title(db: sqlite3.Connection, owner: str, chat_id: str, title: str) -> None:
    """Make a title findable, in place of its former one."""
    row = db.execute("SELECT number FROM indexed WHERE chat_id = ? AND message_id IS NULL", (chat_id,)).fetchone()
    number = row[0] if row else _number(db, owner, chat_id, None)
    db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (number, title))


def index_message(db: sqlite3.Connection, owner: str, message: StoredMessage) -> None:
    """Make a message findable, in place of its former text."""
    row = db.execute("SELECT number FROM indexed WHERE message_id = ?", (message.id,)).fetchone()
    number = row[0] if row else _number(db, owner, message.chat_id, message.id)
    text = message.content[:MAX_INDEXED_CHARACTERS]
    db.execute("INSERT OR REPLACE INTO texts (rowid, body) VALUES (?, ?)", (number, text))


def remove_chat(db: sqlite3.Connection, chat_id: str) -> None:
    """Before a chat is deleted: its words go too. (SQLite 3.40 allows no trigger to write this table.)"""
    db.execute("DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE chat_id = ?)", (chat_id,))


def remove_message(db: sqlite3.Connection, message_id: str) -> None:
    """Before a message is deleted, likewise."""
    db.execute("DELETE FROM texts WHERE rowid IN (SELECT number FROM indexed WHERE message_id = ?)", (message_id,))


def find(db: sqlite3.Connection, owner: str, query: str, limit: int) -> list[SearchHit]:
    """See ChatStore.search."""
    words = query.replace("\x00", " ").split()
    if not words:
        return []
    phrases = _phrases(words)
    return [SearchHit(*row) for row in db.execute(_FIND, (phrases, owner, limit, phrases))]


def _phrases(words: list[str]) -> str:
    """Each word quoted, so that none is an operator; the last one may go on."""
    return " ".join('"' + word.replace('"', '""') + '"' for word in words) + "*"


def _number(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str | None) -> int:
    cursor = db.execute(
        "INSERT INTO indexed (owner, chat_id, message_id) VALUES (?, ?, ?)", (owner, chat_id, message_id)
    )
    return int(cursor.lastrowid or 0)
