"""All chats of a copy that nobody writes to: for those who go over them without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from notso.web.store.protocol import WholeChat
from notso.web.store.sql.rows import chat_of, message_of
from notso.web.store.sqlite.connection import open_reader, storage_errors
from notso.web.store.sqlite.migrations import SCHEMA_VERSION
from notso.web.values.errors import StorageError


def whole_chats(copy: Path) -> Iterator[WholeChat]:
    """Of every owner, oldest first; none that is temporary or thrown away. Raises StorageError, also where the copy is
    of another version."""
    db = open_reader(copy)
    try:
        with storage_errors():
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version != SCHEMA_VERSION:
                raise StorageError("the conversations were written by another version of notso")
            defaults = {row["owner"]: json.loads(row["settings"]) for row in db.execute("SELECT * FROM preferences")}
            chats = db.execute(
                "SELECT * FROM chats WHERE trash_id IS NULL AND NOT temporary ORDER BY created_ms, id"
            ).fetchall()
            for row in chats:
                messages = db.execute(
                    "SELECT * FROM messages WHERE chat_id = ? AND trash_id IS NULL ORDER BY position", (row["id"],)
                )
                owned = defaults.get(row["owner"], {})
                yield WholeChat(chat_of(row), owned, tuple(message_of(message) for message in messages))
    finally:
        db.close()
