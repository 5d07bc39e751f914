"""Writing the tree: new turns, new versions, answers written on, choices, summaries. Each runs in one transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from notso.web.store.protocol import Chat, NewMessage, NewTurn, StoredMessage, TurnAccepted, TurnRefused
from notso.web.store.sqlite.rows import insert_chat, insert_message, message_of, update_message
from notso.web.store.sqlite.text_index import index_message, index_title, remove_message
from notso.web.store.tree import branch, line_to


@dataclass(frozen=True, slots=True)
class _Place:
    id: str
    parent_id: str | None
    chosen_child: str | None


def add_turn(db: sqlite3.Connection, owner: str, turn: NewTurn, new_chat: Chat | None) -> TurnAccepted | TurnRefused:
    """See ChatStore."""
    known = _by_key(db, owner, turn.idempotency_key)
    if known is not None:
        return _repeated(db, known)
    chat_id = turn.user_message.chat_id
    if new_chat is not None:
        insert_chat(db, owner, new_chat)
        index_title(db, owner, new_chat.id, new_chat.title)
    refused = _refusal(db, owner, chat_id)
    if refused is not None:
        return refused
    parent: str | None
    if turn.instead_of is not None:
        other = _message(db, owner, chat_id, turn.instead_of)
        if other is None or other.role != "user":
            return TurnRefused(None)
        parent = other.parent_id
    else:
        shown = _branch(db, chat_id)
        parent = shown[-1].id if shown else None
    user_message = replace(turn.user_message, parent_id=parent)
    assistant_message = replace(turn.assistant_message, parent_id=user_message.id)
    insert_message(db, owner, user_message, turn.idempotency_key)
    insert_message(db, owner, assistant_message, None)
    index_message(db, owner, user_message)
    _choose(db, chat_id, user_message.id)
    _touch(db, chat_id)
    return TurnAccepted(user_message, assistant_message)


def add_message(db: sqlite3.Connection, owner: str, new: NewMessage) -> TurnAccepted | TurnRefused:
    """See ChatStore."""
    chat_id = new.assistant_message.chat_id
    known = _by_key(db, owner, new.idempotency_key)
    if known is not None:
        return _repeated(db, known)
    refused = _refusal(db, owner, chat_id)
    if refused is not None:
        return refused
    before = _message(db, owner, chat_id, new.after)
    if before is None:
        return TurnRefused(None)
    assistant_message = replace(new.assistant_message, parent_id=before.id)
    insert_message(db, owner, assistant_message, new.idempotency_key)
    _choose(db, chat_id, assistant_message.id)
    _touch(db, chat_id)
    return TurnAccepted(before, assistant_message)


def resume_message(
    db: sqlite3.Connection, owner: str, chat_id: str, message_id: str, generation_id: str
) -> TurnAccepted | TurnRefused:
    """See ChatStore."""
    refused = _refusal(db, owner, chat_id)
    if refused is not None:
        return refused
    assistant_message = _message(db, owner, chat_id, message_id)
    user_message = (
        _message(db, owner, chat_id, assistant_message.parent_id or "") if assistant_message is not None else None
    )
    if assistant_message is None or assistant_message.role != "assistant" or user_message is None:
        return TurnRefused(None)
    assistant_message = replace(assistant_message, state="queued", generation_id=generation_id, note="")
    db.execute("UPDATE messages SET generation_id = ? WHERE id = ?", (generation_id, message_id))
    update_message(db, assistant_message)
    _touch(db, chat_id)
    return TurnAccepted(user_message, assistant_message)


def edit_message(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str, content: str) -> bool:
    """See ChatStore."""
    assistant_message = _message(db, owner, chat_id, message_id)
    if assistant_message is None or assistant_message.role != "assistant" or assistant_message.active:
        return False
    uses = tuple(
        replace(use, content_at=0, round_end=0) for use in assistant_message.tool_uses
    )  # the new text comes after all calls
    assistant_message = replace(
        assistant_message, content=content, tool_uses=uses, renderer=0, answer_html="", reasoning_html=""
    )
    update_message(db, assistant_message)
    db.execute("UPDATE messages SET edited = 1 WHERE id = ?", (message_id,))
    index_message(db, owner, assistant_message)
    return True


def choose(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str) -> bool:
    """See ChatStore."""
    if _message(db, owner, chat_id, message_id) is None:
        return False
    _choose(db, chat_id, message_id)
    return True


def remove_summary(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str) -> bool:
    """See ChatStore."""
    summary = _message(db, owner, chat_id, message_id)
    if summary is None or summary.kind != "summary" or summary.active:
        return False
    db.execute("UPDATE messages SET parent_id = ? WHERE parent_id = ?", (summary.parent_id, message_id))
    db.execute("UPDATE messages SET chosen_child = ? WHERE id = ?", (summary.chosen_child, summary.parent_id))
    remove_message(db, message_id)
    db.execute("DELETE FROM messages WHERE id = ?", (message_id,))
    return True


def save_message(db: sqlite3.Connection, assistant_message: StoredMessage) -> None:
    """See ChatStore. A finished answer becomes findable."""
    row = db.execute(
        "SELECT owner FROM messages WHERE id = ? AND chat_id = ? AND generation_id = ?",
        (assistant_message.id, assistant_message.chat_id, assistant_message.generation_id),
    ).fetchone()
    if row is not None and update_message(db, assistant_message) and not assistant_message.active:
        index_message(db, row["owner"], assistant_message)


def keep_html(db: sqlite3.Connection, messages: Iterable[StoredMessage]) -> None:
    """See ChatStore."""
    db.executemany(
        "UPDATE messages SET answer_html = ?, reasoning_html = ?, renderer = ? WHERE id = ? AND content = ?"
        " AND reasoning = ? AND state NOT IN ('queued', 'running')",
        ((m.answer_html, m.reasoning_html, m.renderer, m.id, m.content, m.reasoning) for m in messages),
    )


def add_chat(db: sqlite3.Connection, owner: str, chat: Chat, messages: Iterable[StoredMessage]) -> None:
    """See ChatStore."""
    insert_chat(db, owner, chat)
    index_title(db, owner, chat.id, chat.title)
    for message in messages:
        insert_message(db, owner, message, None)
        if message.role == "assistant":
            update_message(db, message)
        index_message(db, owner, message)


def _choose(db: sqlite3.Connection, chat_id: str, message_id: str) -> None:
    """Every choice on the way from the root to this message now leads to it."""
    line = line_to(_places(db, chat_id), message_id)
    db.execute("UPDATE chats SET chosen_root = ? WHERE id = ?", (line[0].id, chat_id))
    for above, below in pairwise(line):
        db.execute("UPDATE messages SET chosen_child = ? WHERE id = ?", (below.id, above.id))


def _branch(db: sqlite3.Connection, chat_id: str) -> list[_Place]:
    chosen_root = db.execute("SELECT chosen_root FROM chats WHERE id = ?", (chat_id,)).fetchone()[0]
    return branch(_places(db, chat_id), chosen_root)


def _places(db: sqlite3.Connection, chat_id: str) -> list[_Place]:
    rows = db.execute(
        "SELECT id, parent_id, chosen_child FROM messages WHERE chat_id = ? AND trash_id IS NULL ORDER BY position",
        (chat_id,),
    )
    return [_Place(*row) for row in rows]


def _message(db: sqlite3.Connection, owner: str, chat_id: str, message_id: str) -> StoredMessage | None:
    row = db.execute(
        "SELECT * FROM messages WHERE id = ? AND chat_id = ? AND owner = ? AND trash_id IS NULL",
        (message_id, chat_id, owner),
    ).fetchone()
    return message_of(row) if row is not None else None


def _by_key(db: sqlite3.Connection, owner: str, key: str) -> StoredMessage | None:
    row = db.execute("SELECT * FROM messages WHERE owner = ? AND idempotency_key = ?", (owner, key)).fetchone()
    return message_of(row) if row is not None else None


def _repeated(db: sqlite3.Connection, known: StoredMessage) -> TurnAccepted:
    if known.role == "assistant":
        other = db.execute("SELECT * FROM messages WHERE id = ?", (known.parent_id,)).fetchone()
        return TurnAccepted(message_of(other), known, repeated=True)
    other = db.execute(
        "SELECT * FROM messages WHERE parent_id = ? AND role = 'assistant' ORDER BY position", (known.id,)
    ).fetchone()
    return TurnAccepted(known, message_of(other), repeated=True)


def _refusal(db: sqlite3.Connection, owner: str, chat_id: str) -> TurnRefused | None:
    """One turn at a time, in a chat that exists."""
    known = db.execute("SELECT 1 FROM chats WHERE id = ? AND owner = ? AND trash_id IS NULL", (chat_id, owner))
    if known.fetchone() is None:
        return TurnRefused(None)
    running = db.execute(
        "SELECT * FROM messages WHERE chat_id = ? AND state IN ('queued', 'running') AND trash_id IS NULL", (chat_id,)
    ).fetchone()
    return TurnRefused(message_of(running)) if running is not None else None


def _touch(db: sqlite3.Connection, chat_id: str) -> None:
    db.execute("UPDATE chats SET updated_ms = ? WHERE id = ?", (time.time_ns() // 1_000_000, chat_id))
