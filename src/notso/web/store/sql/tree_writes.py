"""Change the message tree, move parts of it to the trash, restore them, and delete them permanently.

Functions named like a method of ChatStore are documented there.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from notso.web.store.protocol import (
    ACTIVE_STATES,
    AnswerTrace,
    Chat,
    EarlierImport,
    NewMessage,
    NewTurn,
    Rating,
    StoredMessage,
    TurnAccepted,
    TurnRefused,
)
from notso.web.store.sql.database import Database, Rows, Value, placeholders
from notso.web.store.sql.documents import mark_stale, verify_citations
from notso.web.store.sql.rows import (
    insert_chat,
    insert_message,
    message_from_row,
    save_trace,
    settings_json,
    update_message,
)
from notso.web.store.sql.shown_part import query_last_shown
from notso.web.values.durations import current_ms
from notso.web.values.errors import Sentence, StorageError

Piece: TypeAlias = list[Chat | StoredMessage]

TOO_SLOW = Sentence("storing the chats took too long and was rolled back: please try again", "storage_slow")
PIECE_ROWS = 200
PIECE_CHARACTERS = 256 * 1024

_LINE = """
WITH RECURSIVE line(id, parent_id, below) AS (
    SELECT id, parent_id, nullif(id, id) FROM messages WHERE id = ? AND owner = ?
    UNION ALL
    SELECT m.id, m.parent_id, line.id FROM line JOIN messages m ON m.id = line.parent_id
)
"""


def add_turn(db: Database, owner: str, turn: NewTurn, new_chat: Chat | None = None) -> TurnAccepted | TurnRefused:
    stored = _first_message(db, "owner = ? AND idempotency_key = ?", owner, turn.idempotency_key)
    if stored is not None:
        return _load_accepted_turn(db, owner, stored)
    chat_id = turn.user_message.chat_id
    if new_chat is not None:
        insert_chat(db, owner, new_chat)
        db.index_title(owner, new_chat.id, new_chat.title)
    refused = _find_refusal(db, owner, chat_id)
    if refused is not None:
        return refused
    parent: str | None
    if turn.instead_of is not None:
        other = _message(db, owner, chat_id, turn.instead_of)
        if other is None or other.role != "user":
            return TurnRefused(None)
        parent = other.parent_id
    elif turn.after is not None:
        if not _is_last(db, owner, chat_id, turn.after):
            return TurnRefused(None, moved=True)
        parent = turn.after or None
    else:
        last = query_last_shown(db, owner, chat_id).fetchone()
        parent = last["id"] if last is not None else None
    user_message = replace(turn.user_message, parent_id=parent)
    assistant_message = replace(turn.assistant_message, parent_id=user_message.id)
    insert_message(db, owner, user_message, turn.idempotency_key)
    insert_message(db, owner, assistant_message, None)
    _replace_trace(db, owner, assistant_message.id, turn.trace)
    db.acquire(owner, assistant_message.id)
    db.index_message(owner, user_message)
    _select_branch(db, owner, chat_id, user_message.id)
    _touch(db, owner, chat_id)
    return TurnAccepted(user_message, assistant_message)


def add_message(db: Database, owner: str, new: NewMessage) -> TurnAccepted | TurnRefused:
    chat_id = new.assistant_message.chat_id
    stored = _first_message(db, "owner = ? AND idempotency_key = ?", owner, new.idempotency_key)
    if stored is not None:
        return _load_accepted_turn(db, owner, stored)
    refused = _find_refusal(db, owner, chat_id)
    if refused is not None:
        return refused
    before = _message(db, owner, chat_id, new.after)
    if before is None:
        return TurnRefused(None)
    if new.assistant_message.kind == "summary" and not _is_last(db, owner, chat_id, before.id):
        return TurnRefused(None, moved=True)
    assistant_message = replace(new.assistant_message, parent_id=before.id)
    insert_message(db, owner, assistant_message, new.idempotency_key)
    _replace_trace(db, owner, assistant_message.id, new.trace)
    db.acquire(owner, assistant_message.id)
    _select_branch(db, owner, chat_id, assistant_message.id)
    _touch(db, owner, chat_id)
    return TurnAccepted(before, assistant_message)


def resume_message(
    db: Database,
    owner: str,
    chat_id: str,
    message_id: str,
    generation_id: str,
    *,
    through: str | None = None,
    trace: AnswerTrace | None = None,
    model: str = "",
) -> TurnAccepted | TurnRefused:
    refused = _find_refusal(db, owner, chat_id)
    if refused is not None:
        return refused
    assistant_message = _message(db, owner, chat_id, message_id)
    user_message = (
        _message(db, owner, chat_id, assistant_message.parent_id or "") if assistant_message is not None else None
    )
    if assistant_message is None or assistant_message.role != "assistant" or user_message is None:
        return TurnRefused(None)
    model = model or assistant_message.model
    assistant_message = replace(assistant_message, state="queued", generation_id=generation_id, note="", model=model)
    db.execute(
        "UPDATE messages SET generation_id = ?, model = ? WHERE id = ? AND owner = ?",
        (generation_id, model, message_id, owner),
    )
    update_message(db, owner, assistant_message)
    _replace_trace(db, owner, message_id, trace)
    db.acquire(owner, message_id)
    _select_branch_through(db, owner, chat_id, message_id, through)
    _touch(db, owner, chat_id)
    return TurnAccepted(user_message, assistant_message)


def edit_message(
    db: Database, owner: str, chat_id: str, message_id: str, content: str, *, through: str | None = None
) -> bool:
    if not _lock(db, owner, chat_id):
        return False
    assistant_message = _message(db, owner, chat_id, message_id)
    if assistant_message is None or assistant_message.role != "assistant" or assistant_message.active:
        return False
    uses = tuple(
        replace(use, content_at=0, round_end=0) for use in assistant_message.tool_uses
    )  # the new text is placed after all tool calls
    assistant_message = replace(
        assistant_message, content=content, tool_uses=uses, citations=(), renderer=0, answer_html="", reasoning_html=""
    )
    update_message(db, owner, assistant_message)
    db.execute("UPDATE messages SET edited = TRUE WHERE id = ? AND owner = ?", (message_id, owner))
    _replace_trace(db, owner, message_id, None)  # delete the trace, which belongs to the old text
    _select_branch_through(db, owner, chat_id, message_id, through)
    db.index_message(owner, assistant_message)
    return True


def choose(db: Database, owner: str, chat_id: str, message_id: str) -> bool:
    if not _lock(db, owner, chat_id) or _message(db, owner, chat_id, message_id) is None:
        return False
    _select_branch(db, owner, chat_id, message_id)
    return True


def remove_summary(db: Database, owner: str, chat_id: str, message_id: str, *, through: str | None = None) -> bool:
    if not _lock(db, owner, chat_id):
        return False
    summary = _message(db, owner, chat_id, message_id)
    if summary is None or summary.kind != "summary" or summary.active:
        return False
    _select_branch_through(db, owner, chat_id, message_id, through)
    # Load the summary again, because selecting the branch may have changed its `chosen_child`.
    summary = _message(db, owner, chat_id, message_id) or summary
    above = summary.parent_id
    db.execute("UPDATE messages SET parent_id = ? WHERE parent_id = ? AND owner = ?", (above, message_id, owner))
    db.execute("UPDATE messages SET chosen_child = ? WHERE id = ? AND owner = ?", (summary.chosen_child, above, owner))
    db.unindex_message(message_id)
    db.execute("DELETE FROM messages WHERE id = ? AND owner = ?", (message_id, owner))
    return True


def _replace_trace(db: Database, owner: str, message_id: str, trace: AnswerTrace | None) -> None:
    if trace is not None:
        return save_trace(db, owner, message_id, trace)
    sql = "DELETE FROM answer_traces WHERE message_id = (SELECT id FROM messages WHERE id = ? AND owner = ?)"
    db.execute(sql, (message_id, owner))
    return None


def save_message(db: Database, assistant_message: StoredMessage, trace: AnswerTrace | None = None) -> None:
    row = db.execute(
        "SELECT owner, state, edited FROM messages WHERE id = ? AND chat_id = ? AND generation_id = ?" + db.for_update,
        (assistant_message.id, assistant_message.chat_id, assistant_message.generation_id),
    ).fetchone()
    if row is None or (assistant_message.active and row["state"] not in ACTIVE_STATES):
        return
    # If this process does not hold the lease, save the answer only if another process has marked it as interrupted and
    # it has not been edited since.
    if not db.holds_lease(assistant_message.id) and (row["state"] != "interrupted" or row["edited"]):
        return
    if not assistant_message.active:
        assistant_message = verify_citations(db, row["owner"], assistant_message)
    update_message(db, row["owner"], assistant_message)
    if trace is not None:
        save_trace(db, row["owner"], assistant_message.id, trace)
    if not assistant_message.active:
        db.release(assistant_message.id)
        db.index_message(row["owner"], assistant_message)


def keep_html(db: Database, owner: str, messages: Sequence[StoredMessage]) -> None:
    for m in messages:
        db.execute(
            "UPDATE messages SET answer_html = ?, reasoning_html = ?, renderer = ? WHERE id = ? AND owner = ?"
            " AND content = ? AND reasoning = ? AND state NOT IN ('queued', 'running')",
            (m.answer_html, m.reasoning_html, m.renderer, m.id, owner, m.content, m.reasoning),
        )


def split_into_chunks(items: Iterable[Chat | StoredMessage]) -> Iterator[Piece]:
    """Split chats and messages into chunks that usually take about 10 ms to write."""
    piece: Piece = []
    characters = 0
    for item in items:
        size = 0 if isinstance(item, Chat) else len(item.content) + len(item.reasoning)
        if piece and (len(piece) >= PIECE_ROWS or characters + size > PIECE_CHARACTERS):
            yield piece
            piece, characters = [], 0
        piece.append(item)
        characters += size
    yield piece


def add_piece(db: Database, owner: str, piece: Piece) -> None:
    for item in piece:
        if isinstance(item, Chat):
            insert_chat(db, owner, item)
            db.index_title(owner, item.id, item.title)
            continue
        insert_message(db, owner, item, None)
        if item.role == "assistant":
            update_message(db, owner, item)
            if item.active:
                db.acquire(owner, item.id)
        db.index_message(owner, item)


def load_earlier_imports(db: Database, owner: str, sources: Sequence[str]) -> dict[str, EarlierImport]:
    chats = db.execute(
        f"SELECT id, source FROM chats WHERE owner = ? AND source IN ({placeholders(sources)}) AND source <> ''"
        " AND trash_id IS NULL ORDER BY created_ms DESC, id DESC",
        (owner, *sources),
    ).fetchall()
    found: dict[str, EarlierImport] = {}
    for chat in chats:
        rows = db.execute(
            "SELECT imported_messages.source, messages.id FROM imported_messages LEFT JOIN messages"
            " ON messages.id = message_id AND messages.trash_id IS NULL WHERE imported_messages.chat_id = ?",
            (chat["id"],),
        )
        found[chat["source"]] = EarlierImport(chat["id"], {row["source"]: row["id"] for row in rows.fetchall()})
    return found


def _select_branch(db: Database, owner: str, chat_id: str, message_id: str) -> None:
    db.execute(
        f"{_LINE} UPDATE messages SET chosen_child = line.below FROM line WHERE messages.id = line.id"
        " AND line.below IS NOT NULL AND (chosen_child IS NULL OR chosen_child <> line.below)",
        (message_id, owner),
    )
    db.execute(
        f"{_LINE} UPDATE chats SET chosen_root = (SELECT id FROM line WHERE parent_id IS NULL)"
        " WHERE id = ? AND owner = ?",
        (message_id, owner, chat_id, owner),
    )


def _select_branch_through(db: Database, owner: str, chat_id: str, message_id: str, through: str | None) -> None:
    # Selects a branch that contains both `message_id` and `through` if there is one, otherwise a branch that contains
    # `message_id`.
    passes = (
        through is not None
        and db.execute(f"{_LINE} SELECT 1 FROM line WHERE id = ?", (through, owner, message_id)).fetchone()
    )
    _select_branch(db, owner, chat_id, through if through is not None and passes else message_id)


def _is_last(db: Database, owner: str, chat_id: str, message_id: str) -> bool:
    # If `message_id` is '', returns whether the chat is empty.
    if message_id and _message(db, owner, chat_id, message_id) is None:
        return False
    follows = "parent_id = ?" if message_id else "parent_id IS NULL"
    following = db.execute(
        f"SELECT 1 FROM messages WHERE {follows} AND chat_id = ? AND owner = ? AND trash_id IS NULL LIMIT 1",
        (message_id, chat_id, owner) if message_id else (chat_id, owner),
    )
    return following.fetchone() is None


def _message(db: Database, owner: str, chat_id: str, message_id: str) -> StoredMessage | None:
    which = "id = ? AND chat_id = ? AND owner = ? AND trash_id IS NULL"
    return _first_message(db, which, message_id, chat_id, owner)


def _first_message(db: Database, which: str, *values: Value) -> StoredMessage | None:
    row = db.execute(f"SELECT * FROM messages WHERE {which}", values).fetchone()
    return message_from_row(row) if row is not None else None


def _load_accepted_turn(db: Database, owner: str, stored: StoredMessage) -> TurnAccepted | TurnRefused:
    if stored.role == "assistant":
        question = _first_message(db, "id = ? AND owner = ?", stored.parent_id, owner)
        return TurnAccepted(question, stored, repeated=True) if question is not None else TurnRefused(None)
    which = "parent_id = ? AND owner = ? AND role = 'assistant' ORDER BY position"
    answer = _first_message(db, which, stored.id, owner)
    return TurnAccepted(stored, answer, repeated=True) if answer is not None else TurnRefused(None)


def _lock(db: Database, owner: str, chat_id: str) -> bool:
    # Locks the chat until the transaction ends, so that other transactions cannot change its messages.
    return _locked(db, owner, chat_id).fetchone() is not None


def _locked(db: Database, owner: str, chat_id: str) -> Rows:
    return db.execute(
        "SELECT id FROM chats WHERE id = ? AND owner = ? AND trash_id IS NULL" + db.for_update, (chat_id, owner)
    )


def _find_refusal(db: Database, owner: str, chat_id: str) -> TurnRefused | None:
    chat = _locked(db, owner, chat_id)
    db.interrupt_expired(owner, chat_id)
    unfinished = db.execute(
        "SELECT * FROM messages WHERE chat_id = ? AND owner = ? AND state IN ('queued', 'running')"
        " AND trash_id IS NULL",
        (chat_id, owner),
    )
    if chat.fetchone() is None:
        return TurnRefused(None)
    running = unfinished.fetchone()
    return TurnRefused(message_from_row(running), db.holds_lease(running["id"])) if running is not None else None


def _touch(db: Database, owner: str, chat_id: str) -> None:
    db.execute("UPDATE chats SET updated_ms = ? WHERE id = ? AND owner = ?", (current_ms(), chat_id, owner))


def trash_chat(db: Database, owner: str, chat_id: str) -> str | None:
    trash_id = _create_trash_entry(db, owner, chat_id, "chat")
    if trash_id is not None:
        db.execute("UPDATE chats SET trash_id = ? WHERE id = ? AND owner = ?", (trash_id, chat_id, owner))
    return trash_id


def trash_chats(db: Database, owner: str, chat_ids: Sequence[str]) -> tuple[str | None, int]:
    trash_id, count = None, 0
    for chat_id in sorted(chat_ids):  # sorted, so that concurrent transactions do not deadlock
        if trash_id is None:
            trash_id = trash_chat(db, owner, chat_id)
            count += trash_id is not None
        else:
            sql = "UPDATE chats SET trash_id = ? WHERE id = ? AND owner = ? AND trash_id IS NULL"
            count += db.execute(sql, (trash_id, chat_id, owner)).rowcount
    return trash_id, count


def trash_messages(db: Database, owner: str, chat_id: str, *, reset: bool) -> tuple[str | None, list[str]]:
    trash_id, unfinished = _create_trash_entry(db, owner, chat_id, "messages", with_settings=reset), list[str]()
    if trash_id is not None:
        sql = (
            "SELECT generation_id FROM messages WHERE chat_id = ? AND owner = ? AND trash_id IS NULL"
            " AND state IN ('queued', 'running')"
        )
        unfinished = [row["generation_id"] for row in db.execute(sql, (chat_id, owner))]
        db.execute(
            "UPDATE messages SET trash_id = ? WHERE chat_id = ? AND owner = ? AND trash_id IS NULL",
            (trash_id, chat_id, owner),
        )
        db.execute("UPDATE chats SET chosen_root = NULL WHERE id = ? AND owner = ?", (chat_id, owner))
        if reset:
            db.execute("UPDATE chats SET settings = ? WHERE id = ? AND owner = ?", (settings_json({}), chat_id, owner))
    return trash_id, unfinished


def trash_message(db: Database, owner: str, chat_id: str, message_id: str) -> str | None:
    if not _lock(db, owner, chat_id) or _message(db, owner, chat_id, message_id) is None:
        return None
    below = (
        "WITH RECURSIVE below(id) AS (SELECT id FROM messages WHERE id = ? AND owner = ? UNION ALL"
        " SELECT m.id FROM below JOIN messages m ON m.parent_id = below.id WHERE m.trash_id IS NULL)"
    )
    active = f"{below} SELECT 1 FROM messages JOIN below ON below.id = messages.id WHERE state IN ('queued', 'running')"
    if db.execute(active, (message_id, owner)).fetchone() is not None:
        return None
    trash_id = _create_trash_entry(db, owner, chat_id, "messages")
    db.execute(
        f"{below} UPDATE messages SET trash_id = ? WHERE owner = ? AND id IN (SELECT id FROM below)",
        (message_id, owner, trash_id, owner),
    )
    # The shown branch must no longer lead to a message in the trash.
    sql = "UPDATE messages SET chosen_child = NULL WHERE chosen_child = ? AND chat_id = ? AND owner = ?"
    db.execute(sql, (message_id, chat_id, owner))
    sql = "UPDATE chats SET chosen_root = NULL WHERE chosen_root = ? AND id = ? AND owner = ?"
    db.execute(sql, (message_id, chat_id, owner))
    return trash_id


def rate_message(db: Database, owner: str, chat_id: str, message_id: str, rating: Rating) -> bool:
    sql = (
        "UPDATE messages SET rating = ? WHERE id = ? AND chat_id = ? AND owner = ? AND trash_id IS NULL"
        " AND role = 'assistant' AND kind = 'turn'"
    )
    return db.execute(sql, (rating, message_id, chat_id, owner)).rowcount > 0


def add_hidden_piece(db: Database, owner: str, piece: Piece, trash_id: str | None) -> str:
    """Write a chunk of an import, hidden in the trash entry `trash_id`, or in a new one if it is None.

    Returns the entry's id. Raises StorageError if the entry has been purged.
    """
    if trash_id is not None and _lock_trash_row(db, owner, trash_id) is None:
        raise StorageError(TOO_SLOW)
    add_piece(db, owner, piece)
    chat_ids = [each.id for each in piece if isinstance(each, Chat)]
    hidden = trash_id or str(trash_chat(db, owner, chat_ids[0]))
    for chat_id in chat_ids:
        db.execute("UPDATE chats SET trash_id = ? WHERE id = ? AND owner = ?", (hidden, chat_id, owner))
    return hidden


def renew_trash_id(db: Database, owner: str, trash_id: str) -> str:
    """Replace the id of a trash entry, so that `purge` treats it as new."""
    new = uuid.uuid4().hex
    db.execute("UPDATE trash SET id = ? WHERE id = ? AND owner = ?", (new, trash_id, owner))
    db.execute("UPDATE chats SET trash_id = ? WHERE trash_id = ? AND owner = ?", (new, trash_id, owner))
    return new


def restore(db: Database, owner: str, trash_id: str) -> list[str]:
    row = _lock_trash_row(db, owner, trash_id)
    if row is None:
        return []
    chat_id = str(row["chat_id"])
    restored = [chat_id]
    db.execute("SELECT id FROM chats WHERE id = ? AND owner = ?" + db.for_update, (chat_id, owner))
    unfinished = "state IN ('queued', 'running') AND chat_id = ? AND owner = ?"
    db.execute(  # a chat may have only one unfinished turn; the newer one continues
        f"UPDATE messages SET state = 'interrupted' WHERE trash_id = ? AND {unfinished}"
        f" AND EXISTS (SELECT 1 FROM messages WHERE trash_id IS NULL AND {unfinished})",
        (trash_id, chat_id, owner, chat_id, owner),
    )
    if row["kind"] == "chat":
        hidden = db.execute("SELECT id FROM chats WHERE trash_id = ? AND owner = ?", (trash_id, owner)).fetchall()
        restored = [str(each["id"]) for each in hidden]
        db.execute("UPDATE chats SET trash_id = NULL WHERE trash_id = ? AND owner = ?", (trash_id, owner))
    else:
        # After a message and its replies have been restored, show the message's branch again.
        top = db.execute(
            "SELECT m.id FROM messages m JOIN messages p ON p.id = m.parent_id AND p.trash_id IS NULL"
            " WHERE m.chat_id = ? AND m.trash_id = ? AND m.owner = ?",
            (chat_id, trash_id, owner),
        ).fetchone()
        db.execute(
            "UPDATE messages SET trash_id = NULL WHERE chat_id = ? AND trash_id = ? AND owner = ?",
            (chat_id, trash_id, owner),
        )
        sql = "UPDATE chats SET chosen_root = ? WHERE id = ? AND owner = ?"
        db.execute(sql, (row["chosen_root"], chat_id, owner))
        if row["settings"]:  # restore the settings unless they have been changed since they were reset
            sql = "UPDATE chats SET settings = ? WHERE id = ? AND owner = ? AND settings = ?"
            db.execute(sql, (row["settings"], chat_id, owner, settings_json({})))
        if top is not None:
            _select_branch(db, owner, chat_id, top["id"])
    db.execute("DELETE FROM trash WHERE id = ? AND owner = ?", (trash_id, owner))
    return restored


def due_trash_ids(db: Database, seen: dict[str, float], seconds: float) -> list[str]:
    """Return the ids of old trash entries (see ChatStore.purge). `seen` maps ids to when they were first seen."""
    # Use monotonic times, so that setting the wall clock forward does not cause entries to be purged too early.
    now, first_seen = time.monotonic(), dict(seen)
    ids = [row["id"] for row in db.execute("SELECT id FROM trash")]
    seen.clear()
    seen.update({trash_id: first_seen.get(trash_id, now) for trash_id in ids})
    return [trash_id for trash_id, since in seen.items() if now - since >= seconds]


PURGED_MESSAGES = 200  # maximum per transaction, so that other writers do not wait long


def purge_piece(db: Database, trash_id: str) -> bool:
    """Delete part of a trash entry. Return whether any of it is left."""
    row = db.execute("SELECT * FROM trash WHERE id = ?" + db.for_update, (trash_id,)).fetchone()
    if row is None:
        return False
    if row["owner"]:
        if row["kind"] == "messages":
            _add_replies(db, row["chat_id"], trash_id)
        for chat_id, which, values in _trashed_chats(db, row):
            mark_stale(db, f"messages WHERE chat_id = ? AND parent_id IS NULL{which}", chat_id, *values)
        # An entry without an owner cannot be restored.
        db.execute("UPDATE trash SET owner = '' WHERE id = ?", (trash_id,))
    left = PURGED_MESSAGES
    for chat_id, which, values in _trashed_chats(db, row):
        left -= _delete_newest(db, f"chat_id = ?{which}", (chat_id, *values), left) + 1
        if left <= 0:
            return True
        if row["kind"] == "chat":
            _delete_chat(db, chat_id)
    db.execute("DELETE FROM trash WHERE id = ?", (trash_id,))
    return False


def _add_replies(db: Database, chat_id: str, trash_id: str) -> None:
    # Moves replies that belong to an earlier trash entry to this one. Otherwise, deleting a message would also delete
    # such replies (ON DELETE CASCADE), but not their words in the search index. In SQLite, the deletion would fail if
    # the replies were nested more than 1,000 levels deep.
    db.execute(
        "WITH RECURSIVE below(id) AS (SELECT id FROM messages WHERE chat_id = ? AND trash_id = ?"
        " UNION SELECT m.id FROM below JOIN messages m ON m.parent_id = below.id)"
        " UPDATE messages SET trash_id = ? WHERE id IN (SELECT id FROM below)",
        (chat_id, trash_id, trash_id),
    )


def _delete_newest(db: Database, which: str, values: tuple[str, ...], limit: int) -> int:
    # Returns the number of messages deleted. The newest are deleted first, because deletion cascades to replies, and
    # SQLite limits cascades to 1,000 levels.
    sql = f"SELECT id FROM messages WHERE {which} ORDER BY position DESC LIMIT ?"
    messages = db.execute(sql, (*values, limit)).fetchall()
    for message in messages:
        db.unindex_message(message["id"])
        db.execute("DELETE FROM messages WHERE id = ?", (message["id"],))
    return len(messages)


def _delete_chat(db: Database, chat_id: str) -> None:
    db.unindex_chat(chat_id)
    db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))


def _trashed_chats(db: Database, trash: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    # Returns the chats of a trash entry, each with a condition that selects its messages.
    if trash["kind"] == "messages":
        return [(trash["chat_id"], " AND trash_id = ?", (trash["id"],))]
    # The chat in `trash.chat_id` comes last, because deleting it also deletes the row in `trash` (ON DELETE CASCADE).
    sql = "SELECT id FROM chats WHERE trash_id = ? ORDER BY id = ?"
    rows = db.execute(sql, (trash["id"], trash["chat_id"])).fetchall()
    return [(row["id"], "", ()) for row in rows]


def _lock_trash_row(db: Database, owner: str, trash_id: str) -> Any:
    return db.execute("SELECT * FROM trash WHERE id = ? AND owner = ?" + db.for_update, (trash_id, owner)).fetchone()


def _create_trash_entry(
    db: Database, owner: str, chat_id: str, kind: str, *, with_settings: bool = False
) -> str | None:
    chat = db.execute(
        "SELECT settings, chosen_root FROM chats WHERE id = ? AND owner = ? AND trash_id IS NULL" + db.for_update,
        (chat_id, owner),
    ).fetchone()
    if chat is None:
        return None
    trash_id = uuid.uuid4().hex
    settings = chat["settings"] if with_settings else ""
    db.execute(
        "INSERT INTO trash (id, owner, chat_id, kind, settings, chosen_root, thrown_ms) VALUES (?,?,?,?,?,?,?)",
        (trash_id, owner, chat_id, kind, settings, chat["chosen_root"], current_ms()),
    )
    return trash_id


OWNED = (
    "kept_answers",
    "responses",
    "open_responses",
    "api_files",
    "api_batches",
    "prompts",
    "preferences",
    "memories",
    "shares",
    "trash",
)
ROWS_AT_ONCE = 200


def mark_owner_caches_stale(db: Database, owner: str) -> None:
    """Record that engines must clear the caches of the owner's chats and stored responses."""
    for table in ("messages WHERE parent_id IS NULL AND", "responses WHERE", "open_responses WHERE"):
        mark_stale(db, f"{table} owner = ?", owner)


def remove_piece(db: Database, owner: str) -> bool:
    """Delete some of an owner's rows, except libraries. Return whether there were any."""
    return _remove_messages(db, owner) or _remove_records(db, owner)


def _remove_messages(db: Database, owner: str) -> bool:
    chat = db.execute("SELECT id FROM chats WHERE owner = ? LIMIT 1" + db.for_update, (owner,)).fetchone()
    if chat is None:
        return False
    if _delete_newest(db, "chat_id = ?", (chat["id"],), PURGED_MESSAGES) < PURGED_MESSAGES:
        _delete_chat(db, chat["id"])
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
    deleted = 0
    for table in (*OWNED, "library_members"):
        column = "member" if table == "library_members" else "owner"
        deleted += db.execute(f"DELETE FROM {table} WHERE {column} = ?", (owner,)).rowcount
    return deleted > 0
