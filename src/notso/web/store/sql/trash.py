"""Deleting with a way back: things are hidden first, and deleted for good when nobody took that back in time."""

from __future__ import annotations

import time
import uuid
from typing import Any

from notso.web.store.protocol import Conversation
from notso.web.store.sql.database import Database
from notso.web.store.sql.rows import settings_text


def trash_chat(db: Database, owner: str, chat_id: str) -> str | None:
    """See ChatStore."""
    trash_id = _throw(db, owner, chat_id, "chat")
    if trash_id is not None:
        db.execute("UPDATE chats SET trash_id = ? WHERE id = ? AND owner = ?", (trash_id, chat_id, owner))
    return trash_id


def trash_messages(db: Database, owner: str, chat_id: str, *, reset: bool) -> str | None:
    """See ChatStore."""
    trash_id = _throw(db, owner, chat_id, "messages")
    if trash_id is not None:
        db.execute(
            "UPDATE messages SET trash_id = ? WHERE chat_id = ? AND owner = ? AND trash_id IS NULL",
            (trash_id, chat_id, owner),
        )
        db.execute("UPDATE chats SET chosen_root = NULL WHERE id = ? AND owner = ?", (chat_id, owner))
        if reset:
            db.execute("UPDATE chats SET settings = ? WHERE id = ? AND owner = ?", (settings_text({}), chat_id, owner))
    return trash_id


def is_hidden(db: Database, owner: str, trash_id: str) -> bool:
    """Whether something is hidden by that id. It is not purged until the transaction has ended."""
    return _row(db, owner, trash_id) is not None


def hide_too(db: Database, owner: str, chat_ids: list[str], trash_id: str) -> None:
    """Hide more chats by an id that hides some, so that all are restored or purged in one go."""
    for chat_id in chat_ids:
        db.execute("UPDATE chats SET trash_id = ? WHERE id = ? AND owner = ?", (trash_id, chat_id, owner))


def renew(db: Database, owner: str, trash_id: str) -> str:
    """Hide the same by another id: to all who purge, it was hidden just now."""
    new = uuid.uuid4().hex
    db.execute("UPDATE trash SET id = ? WHERE id = ? AND owner = ?", (new, trash_id, owner))
    db.execute("UPDATE chats SET trash_id = ? WHERE trash_id = ? AND owner = ?", (new, trash_id, owner))
    return new


def restore(db: Database, owner: str, trash_id: str) -> str | None:
    """See ChatStore."""
    row = _row(db, owner, trash_id)
    if row is None:
        return None
    chat_id = str(row["chat_id"])
    db.execute("SELECT id FROM chats WHERE id = ? AND owner = ?" + db.for_update, (chat_id, owner))
    unfinished = "state IN ('queued', 'running') AND chat_id = ? AND owner = ?"
    db.execute(  # a chat has one unfinished turn: of two, the one that was asked for since goes on
        f"UPDATE messages SET state = 'interrupted' WHERE trash_id = ? AND {unfinished}"
        f" AND EXISTS (SELECT 1 FROM messages WHERE trash_id IS NULL AND {unfinished})",
        (trash_id, chat_id, owner, chat_id, owner),
    )
    for table in ("chats", "messages"):
        db.execute(f"UPDATE {table} SET trash_id = NULL WHERE trash_id = ? AND owner = ?", (trash_id, owner))
    if row["kind"] == "messages":
        db.execute(
            "UPDATE chats SET settings = ?, chosen_root = ? WHERE id = ? AND owner = ?",
            (row["settings"], row["chosen_root"], chat_id, owner),
        )
    db.execute("DELETE FROM trash WHERE id = ? AND owner = ?", (trash_id, owner))
    return chat_id


def due(db: Database, seen: dict[str, float], seconds: float, now: float | None) -> list[str]:
    """What has lain here for so long. `seen` says since when each thing is known to lie here, by a clock that nobody
    sets: were the time of day set forward, what was thrown away a moment ago would be gone with no way back."""
    now, known = time.monotonic() if now is None else now, dict(seen)
    ids = [row["id"] for row in db.execute("SELECT id FROM trash")]
    seen.clear()
    seen.update({trash_id: known.get(trash_id, now) for trash_id in ids})
    return [trash_id for trash_id, since in seen.items() if now - since >= seconds]


def thrown_away(db: Database, old: list[str]) -> list[Conversation]:
    """The conversations that `purge` of the same deletes."""
    found: list[Any] = []
    for trash_id in old:
        found += db.execute(
            "SELECT owner, id FROM messages WHERE parent_id IS NULL AND"
            " (trash_id = ? OR chat_id IN (SELECT id FROM chats WHERE trash_id = ?))",
            (trash_id, trash_id),
        ).fetchall()
    return list(dict.fromkeys(Conversation(row["owner"], row["id"]) for row in found))


def purge(db: Database, old: list[str]) -> int:
    """See ChatStore."""
    for conversation in thrown_away(db, old):
        db.forget(conversation.owner, conversation.first_message_id)
    for trash_id in old:
        chats = db.execute("SELECT id FROM chats WHERE trash_id = ?", (trash_id,)).fetchall()
        messages = db.execute("SELECT id FROM messages WHERE trash_id = ?", (trash_id,)).fetchall()
        for row in chats:
            db.remove_chat(row["id"])
        for row in messages:  # all words first: a deleted message takes those below it along
            db.remove_message(row["id"])
        db.execute("DELETE FROM messages WHERE trash_id = ?", (trash_id,))
        db.execute("DELETE FROM chats WHERE trash_id = ?", (trash_id,))
        db.execute("DELETE FROM trash WHERE id = ?", (trash_id,))
    return len(old)


def _row(db: Database, owner: str, trash_id: str) -> Any:
    return db.execute("SELECT * FROM trash WHERE id = ? AND owner = ?" + db.for_update, (trash_id, owner)).fetchone()


def _throw(db: Database, owner: str, chat_id: str, kind: str) -> str | None:
    chat = db.execute(
        "SELECT settings, chosen_root FROM chats WHERE id = ? AND owner = ? AND trash_id IS NULL" + db.for_update,
        (chat_id, owner),
    ).fetchone()
    if chat is None:
        return None
    trash_id = uuid.uuid4().hex
    db.execute(
        "INSERT INTO trash (id, owner, chat_id, kind, settings, chosen_root, thrown_ms) VALUES (?,?,?,?,?,?,?)",
        (trash_id, owner, chat_id, kind, chat["settings"], chat["chosen_root"], time.time_ns() // 1_000_000),
    )
    return trash_id
