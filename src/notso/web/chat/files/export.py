"""Chat export: JSON of the whole tree, or Markdown of the shown branch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from notso.web.store.protocol import Chat, StoredMessage, ToolUse
from notso.web.turns.chat_settings import SETTING_NAMES
from notso.web.turns.citations import markdown_with_citations
from notso.web.turns.tool_rounds import parts_of
from notso.web.values.wording import words

FORMAT_NAME = "notso-chats"
FORMAT_VERSION = 3  # version 1 had no tool calls, version 2 no models and no archived chats

_UNFIT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)


JSON_HEAD = f'{{\n "format": "{FORMAT_NAME}",\n "version": {FORMAT_VERSION},\n "chats": ['.encode()
JSON_TAIL = b"]\n}\n"


CHAT_TAIL = b"\n ]\n}"
MARKDOWN_TAIL = b"\n"


def json_head(chat: Chat) -> bytes:
    """Begin one of the chats between JSON_HEAD and JSON_TAIL; comma-separated messages and CHAT_TAIL follow."""
    text = json.dumps(_chat_json(chat) | {"messages": []}, ensure_ascii=False, indent=1)
    return text.removesuffix("]\n}").encode()


def json_messages(messages: Iterable[StoredMessage]) -> bytes:
    """Return messages as JSON, one a line, comma-separated."""
    return ",".join("\n  " + json.dumps(_message_json(each), ensure_ascii=False) for each in messages).encode()


def markdown_head(chat: Chat) -> bytes:
    return f"# {chat.title}".encode()


def markdown_messages(messages: Iterable[StoredMessage]) -> bytes:
    """Return messages as Markdown, without thoughts."""
    parts = [""]
    for message in messages:
        if message.kind == "summary":
            name = words["summary"]
        else:
            name = words["you"] if message.role == "user" else words["assistant"]
        text = [f"## {name}"]
        file = words["attachment"]
        text += [
            f"{file}: {each.name}" + ("" if each.document else f"\n\n{_fenced(each.text)}")
            for each in message.attachments
        ]
        cited = [markdown_with_citations(message)] if message.citations and not message.tool_uses else parts_of(message)
        for part, use in zip_longest(cited, message.tool_uses):
            text += [part] if part else []
            text += [_tool_use(use)] if use is not None else []
        parts += text
    return "\n\n".join(parts).encode()


def file_name(chat: Chat, ending: str) -> str:
    """Return a file name valid on every system."""
    return (_UNFIT_IN_NAMES.sub("-", chat.title).strip("-.").lower()[:60] or "chat") + f".{ending}"


def _chat_json(chat: Chat) -> dict[str, Any]:
    return {
        "title": chat.title,
        "thinking": chat.thinking,
        "prompt_date": chat.prompt_date.isoformat(),
        "created_ms": chat.created_ms,
        "updated_ms": chat.updated_ms,
        "pinned": chat.pinned,
        "archived": chat.archived,
        "settings": {name: value for name, value in chat.settings.items() if name in SETTING_NAMES},
        "chosen_root": chat.chosen_root,
    }


def _message_json(message: StoredMessage) -> dict[str, Any]:
    return {
        # Left out: HTML, which can be rendered again, and generation ids, which are internal.
        "id": message.id,
        "parent_id": message.parent_id,
        "chosen_child": message.chosen_child,
        "role": message.role,
        "kind": message.kind,
        "content": message.content,
        "reasoning": message.reasoning,
        "state": message.state,
        "note": message.note,
        "edited": message.edited,
        "attachments": [{"name": each.name, "text": each.text} for each in message.attachments],
        "tool_uses": [asdict(each) for each in message.tool_uses],
        "dropped_messages": message.dropped_messages,
        "created_ms": message.created_ms,
        "model": message.model,
        "rating": message.rating,
        "numbers": asdict(message.numbers),
    }


def _tool_use(use: ToolUse) -> str:
    name = " ".join(use.name.replace("`", "'").split())
    heading = words["tool_named"].format(name=name, state=words["tool_" + use.state])
    parts = [heading, _fenced(use.arguments)]
    return "\n\n".join([*parts, _fenced(use.result)] if use.result else parts)


def _fenced(text: str) -> str:
    # The fence must be longer than any run of backticks in the text.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
