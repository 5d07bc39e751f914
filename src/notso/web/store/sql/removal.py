"""Removal of everything that is stored for an owner, in transactions of bounded size."""

from __future__ import annotations

import json
import time

from notso.web.store.sql.database import Database
from notso.web.store.sql.tree_writes import PURGED_MESSAGES

OWNED = (
    "kept_answers",
    "responses",
    "api_files",
    "api_batches",
    "prompts",
    "preferences",
    "memories",
    "shares",
    "trash",
)
ROWS_AT_ONCE = 200


def forget_conversations(db: Database, owner: str) -> None:
    """Record that engines must forget what they computed for the owner's chats and stored responses."""
    columns = "INSERT INTO stale_caches (owner, conversation, scope, reading, since_ms)"
    now = time.time_ns() // 1_000_000
    for source in ("messages WHERE owner = ? AND parent_id IS NULL", "responses WHERE owner = ?"):
        db.execute(f"{columns} SELECT owner, id, '', '', {now} FROM {source}", (owner,))


def remove_piece(db: Database, owner: str) -> bool:
    """Delete a part of what an owner has besides libraries; return whether more is left."""
    return _remove_messages(db, owner) or _remove_records(db, owner)


def _remove_messages(db: Database, owner: str) -> bool:
    chat = db.execute("SELECT id FROM chats WHERE owner = ? LIMIT 1" + db.for_update, (owner,)).fetchone()
    if chat is None:
        return False
    # Newest first, as in tree_writes.purge_piece: SQLite's cascades end at 1,000 levels.
    sql = "SELECT id FROM messages WHERE chat_id = ? ORDER BY position DESC LIMIT ?"
    messages = db.execute(sql, (chat["id"], PURGED_MESSAGES)).fetchall()
    for each in messages:
        db.remove_message(each["id"])
        db.execute("DELETE FROM messages WHERE id = ?", (each["id"],))
    if len(messages) < PURGED_MESSAGES:
        db.remove_chat(chat["id"])
        db.execute("DELETE FROM chats WHERE id = ?", (chat["id"],))
    return True


def _remove_records(db: Database, owner: str) -> bool:
    plans = db.execute("SELECT plan FROM api_batches WHERE owner = ?", (owner,)).fetchall()
    files = [json.loads(row["plan"]).get(name) for row in plans for name in ("output_file_id", "error_file_id")]
    files += [row["id"] for row in db.execute("SELECT id FROM api_files WHERE owner = ?", (owner,)).fetchall()]
    for each in filter(None, files):
        part = "SELECT part FROM api_file_parts WHERE file_id = ? LIMIT ?"
        parts = db.execute(part, (each, ROWS_AT_ONCE)).fetchall()
        for row in parts:
            db.execute("DELETE FROM api_file_parts WHERE file_id = ? AND part = ?", (each, row["part"]))
        if parts:
            return True
    for table in (*OWNED, "library_members"):
        column = "member" if table == "library_members" else "owner"
        db.execute(f"DELETE FROM {table} WHERE {column} = ?", (owner,))
    return False
