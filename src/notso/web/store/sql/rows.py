"""Conversion between database rows and values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from notso.web.store.protocol import Attachment, Chat, Numbers, SettingValue, StoredMessage, ToolUse
from notso.web.store.sql.database import Database

ROW_CHARACTERS = 500  # counted for a message besides its text
_PLAIN: tuple[str, ...] = (
    "id",
    "chat_id",
    "role",
    "content",
    "reasoning",
    "state",
    "created_ms",
    "generation_id",
    "note",
)
_PLAIN += ("answer_html", "reasoning_html", "renderer", "parent_id", "kind", "chosen_child", "dropped_messages")
_NUMBERS = tuple(Numbers.__dataclass_fields__)

_SAVED: tuple[str, ...] = (
    "content",
    "reasoning",
    "state",
    "note",
    *_NUMBERS,
    "answer_html",
    "reasoning_html",
    "renderer",
)
_SAVED += ("dropped_messages", "tool_uses", "size")
_SAVE = f"UPDATE messages SET {', '.join(f'{name} = ?' for name in _SAVED)} WHERE id = ? AND owner = ?"


def chat_of(row: Any) -> Chat:
    return Chat(
        id=row["id"],
        title=row["title"],
        thinking=bool(row["thinking"]),
        prompt_date=date.fromisoformat(row["prompt_date"]),
        created_ms=row["created_ms"],
        updated_ms=row["updated_ms"],
        pinned=bool(row["pinned"]),
        unread=bool(row["unread"]),
        archived=bool(row["archived"]),
        temporary=bool(row["temporary"]),
        settings=json.loads(row["settings"]),
        chosen_root=row["chosen_root"],
    )


def attachments_of(text: str) -> tuple[Attachment, ...]:
    return tuple(Attachment(**each) for each in json.loads(text))


def message_of(row: Any) -> StoredMessage:
    message = StoredMessage(
        **{name: row[name] for name in _PLAIN},
        numbers=Numbers(**{name: row[name] for name in _NUMBERS}),
        edited=bool(row["edited"]),
        attachments=attachments_of(row["attachments"]),
        tool_uses=tuple(ToolUse(**each) for each in json.loads(row["tool_uses"])),
    )
    if message.active or all(use.is_final for use in message.tool_uses):
        return message
    # The answer has ended, so no process will finish these calls.
    uses = (use if use.is_final else replace(use, state="interrupted") for use in message.tool_uses)
    return replace(message, tool_uses=tuple(uses))


def insert_chat(db: Database, owner: str, chat: Chat) -> None:
    db.execute(
        "INSERT INTO chats (id, owner, title, thinking, prompt_date, created_ms, updated_ms, pinned, settings,"
        " chosen_root, unread, archived, temporary) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            chat.id,
            owner,
            chat.title,
            chat.thinking,
            chat.prompt_date.isoformat(),
            chat.created_ms,
            chat.updated_ms,
            chat.pinned,
            settings_text(chat.settings),
            chat.chosen_root,
            chat.unread,
            chat.archived,
            chat.temporary,
        ),
    )


def insert_message(db: Database, owner: str, message: StoredMessage, key: str | None) -> None:
    """Append a message; `update_message` adds numbers and HTML."""
    attachments = json.dumps([{"name": each.name, "text": each.text} for each in message.attachments])
    db.execute(
        "INSERT INTO messages (id, chat_id, owner, parent_id, position, role, content, reasoning, state, generation_id,"
        " idempotency_key, created_ms, kind, chosen_child, edited, attachments, note, size)"
        " VALUES (?,?,?,?,(SELECT coalesce(max(position), 0) + 1 FROM messages WHERE chat_id = ? AND owner = ?)"
        ",?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            message.id,
            message.chat_id,
            owner,
            message.parent_id,
            message.chat_id,
            owner,
            message.role,
            message.content,
            message.reasoning,
            message.state,
            message.generation_id,
            key,
            message.created_ms,
            message.kind,
            message.chosen_child,
            message.edited,
            attachments,
            message.note,
            _size(message, attachments),
        ),
    )


def update_message(db: Database, owner: str, assistant_message: StoredMessage) -> bool:
    """Save everything about an answer that changes while it is generated."""
    tool_uses = json.dumps([asdict(use) for use in assistant_message.tool_uses])
    made: dict[str, str | int] = {"tool_uses": tool_uses, "size": _size(assistant_message, tool_uses)}
    numbers = assistant_message.numbers
    values = [
        made[name] if name in made else getattr(numbers if name in _NUMBERS else assistant_message, name)
        for name in _SAVED
    ]
    return db.execute(_SAVE, (*values, assistant_message.id, owner)).rowcount > 0


def _size(message: StoredMessage, more: str) -> int:
    return ROW_CHARACTERS + len(message.content) + len(message.reasoning) + len(more)


def settings_text(settings: Mapping[str, SettingValue]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
