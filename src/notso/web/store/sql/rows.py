"""Convert between database rows and values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import date
from typing import Any, get_origin, get_type_hints

from notso.web.store.documents import Citation
from notso.web.store.protocol import (
    AnswerRun,
    AnswerStats,
    AnswerTrace,
    Attachment,
    Chat,
    SettingsChange,
    SettingValue,
    StoredMessage,
    ToolUse,
)
from notso.web.store.sql.database import Database, placeholders

ROW_CHARACTERS = 500  # added to the length of each message's text to account for the row itself
_CHAT_KINDS = get_type_hints(Chat)
CHAT_FIELDS = tuple(_CHAT_KINDS)
CHAT_COLUMNS = (*CHAT_FIELDS, "owner", "trash_id")
CHAT_BOOLEANS = frozenset(name for name, kind in _CHAT_KINDS.items() if kind is bool)
_NUMBERS = tuple(each.name for each in fields(AnswerStats))
# Fields that are converted before they are stored, or for which there is no column of the same name.
_CONVERTED = ("numbers", "edited", "attachments", "tool_uses", "citations", "source")
_PLAIN = tuple(each.name for each in fields(StoredMessage) if each.name not in _CONVERTED)
_SAVED = (
    *("content", "reasoning", "state", "note", *_NUMBERS, "answer_html", "reasoning_html", "renderer"),
    *("dropped_messages", "tool_uses", "citations", "size"),
)
_INSERTED = (*(name for name in _PLAIN if name not in _SAVED), "content", "reasoning", "state", "note", "edited")
_SAVE = f"UPDATE messages SET {', '.join(f'{name} = ?' for name in _SAVED)} WHERE id = ? AND owner = ?"
MESSAGE_COLUMNS = (
    *(*_PLAIN, *_NUMBERS, "edited", "attachments", "tool_uses", "citations"),
    *("owner", "position", "idempotency_key", "trash_id", "size"),
)


def chat_from_row(row: Any) -> Chat:
    return Chat(**{name: _chat_value(kind, row[name]) for name, kind in _CHAT_KINDS.items()})


def _chat_value(kind: Any, stored: Any) -> Any:
    if kind is bool:
        return bool(stored)
    if kind is date:
        return date.fromisoformat(stored)
    return json.loads(stored) if get_origin(kind) is Mapping else stored


def stored_value(value: Any) -> Any:
    if isinstance(value, date):
        return value.isoformat()
    return settings_json(value) if isinstance(value, Mapping) else value


def attachments_from_json(text: str) -> tuple[Attachment, ...]:
    return tuple(Attachment(**each) for each in json.loads(text))


def message_from_row(row: Any) -> StoredMessage:
    message = StoredMessage(
        **{name: row[name] for name in _PLAIN},
        numbers=AnswerStats(**{name: row[name] for name in _NUMBERS}),
        edited=bool(row["edited"]),
        attachments=attachments_from_json(row["attachments"]),
        tool_uses=tuple(ToolUse(**each) for each in json.loads(row["tool_uses"])),
        citations=tuple(Citation(**each) for each in json.loads(row["citations"])),
    )
    if message.active or all(use.is_final for use in message.tool_uses):
        return message
    # Tool calls that were unfinished when the answer ended will never finish.
    uses = (use if use.is_final else replace(use, state="interrupted") for use in message.tool_uses)
    return replace(message, tool_uses=tuple(uses))


def insert_chat(db: Database, owner: str, chat: Chat) -> None:
    values = [owner, *(stored_value(getattr(chat, name)) for name in CHAT_FIELDS)]
    db.execute(f"INSERT INTO chats (owner, {', '.join(CHAT_FIELDS)}) VALUES ({placeholders(values)})", values)


def insert_message(db: Database, owner: str, message: StoredMessage, key: str | None) -> None:
    """Append a message, without the statistics, HTML, tool calls and citations that `update_message` saves."""
    attachments = json.dumps([asdict(each) for each in message.attachments])
    values: dict[str, Any] = {name: getattr(message, name) for name in _INSERTED}
    values |= {"attachments": attachments, "size": _size(message, attachments), "owner": owner, "idempotency_key": key}
    position = "(SELECT coalesce(max(position), 0) + 1 FROM messages WHERE chat_id = ? AND owner = ?)"
    db.execute(
        f"INSERT INTO messages ({', '.join(values)}, position) VALUES ({placeholders(values)}, {position})",
        (*values.values(), message.chat_id, owner),
    )
    for each in message.attachments:
        if each.document:
            db.execute(
                "INSERT INTO chat_documents (message_id, document_id, chat_id)"
                " SELECT ?, id, ? FROM documents WHERE id = ? ON CONFLICT DO NOTHING",
                (message.id, message.chat_id, each.document),
            )
    if message.source:
        db.execute(
            "INSERT INTO imported_messages (chat_id, source, message_id) VALUES (?, ?, ?)",
            (message.chat_id, message.source, message.id),
        )


def update_message(db: Database, owner: str, assistant_message: StoredMessage) -> bool:
    """Save the columns of an answer that change during generation."""
    tool_uses = json.dumps([asdict(use) for use in assistant_message.tool_uses])
    converted: dict[str, str | int] = {"tool_uses": tool_uses, "size": _size(assistant_message, tool_uses)}
    converted["citations"] = json.dumps([asdict(each) for each in assistant_message.citations])
    numbers = assistant_message.numbers
    values = [
        converted[name] if name in converted else getattr(numbers if name in _NUMBERS else assistant_message, name)
        for name in _SAVED
    ]
    return db.execute(_SAVE, (*values, assistant_message.id, owner)).rowcount > 0


_OF_A_TURN = ("own", "every", "hurry", "parts")


def save_trace(db: Database, owner: str, message_id: str, trace: AnswerTrace) -> None:
    values = asdict(trace)
    text = json.dumps({name: values[name] for name in ("runs", "model", *_OF_A_TURN)}, separators=(",", ":"))
    db.execute(
        "INSERT INTO answer_traces (message_id, trace, tries, resumes)"
        " SELECT id, CAST(? AS TEXT), CAST(? AS BIGINT), CAST(? AS BIGINT) FROM messages WHERE id = ? AND owner = ?"
        " ON CONFLICT (message_id)"
        " DO UPDATE SET trace = excluded.trace, tries = excluded.tries, resumes = excluded.resumes",
        (text, trace.tries, trace.resumes, message_id, owner),
    )


def trace_from_row(row: Any) -> AnswerTrace:
    stored = json.loads(row["trace"])
    runs = (each | {name: tuple(each[name]) for name in ("ids", "closed_at")} for each in stored["runs"])
    others = {name: stored[name] for name in _OF_A_TURN if name in stored}  # older releases did not store all fields
    return AnswerTrace(tuple(AnswerRun(**run) for run in runs), stored["model"], row["tries"], row["resumes"], **others)


def _size(message: StoredMessage, more: str) -> int:
    return ROW_CHARACTERS + len(message.content) + len(message.reasoning) + len(more)


def load_settings(row: Any) -> dict[str, SettingValue]:
    return dict(json.loads(row["settings"])) if row is not None else {}


def change_row_settings(
    db: Database, table: str, condition: str, values: Sequence[Any], change: SettingsChange
) -> bool:
    """Lock a row and change its settings. Return False if there is no such row."""
    row = db.execute(f"SELECT settings FROM {table} WHERE {condition}{db.for_update}", values).fetchone()
    if row is not None:
        changed = settings_json(change(load_settings(row)))
        db.execute(f"UPDATE {table} SET settings = ? WHERE {condition}", (changed, *values))
    return row is not None


def settings_json(settings: Mapping[str, SettingValue]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
