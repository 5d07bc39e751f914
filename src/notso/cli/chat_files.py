"""Files of a terminal conversation: message lists in JSON, which the page imports too, and Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from notso.regular_file import read_regular

if TYPE_CHECKING:
    from notso.smollm3.values.messages import Message
    from notso.web.store.protocol import StoredMessage

MAX_BYTES = 16 << 20  # the page's own limit for an import


class LoadedChat(NamedTuple):
    """A conversation read from a file."""

    messages: list[Message]
    system: str | None


class ChatFileError(Exception):
    """The file cannot be read or written; the message names it."""


def write_chat(path: Path, content: str, *, replace: bool = False) -> None:
    """Write a file that only its owner can read. Raises ChatFileError, also if it exists and `replace` is false."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
    except FileExistsError:
        raise ChatFileError(f"{path} exists already; use another name") from None
    except (OSError, ValueError) as error:
        raise ChatFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def as_json(messages: Sequence[Message], system: str | None) -> str:
    listed: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for each in messages:
        listed.append({"role": each.role, "content": each.content})
        if each.reasoning_content:
            listed[-1]["reasoning_content"] = each.reasoning_content
    return json.dumps({"messages": listed}, ensure_ascii=False, indent=1) + "\n"


def as_markdown(messages: Sequence[Message], system: str | None) -> str:
    """Return the conversation without thoughts."""
    from notso.web.values.wording import words

    names = {"user": words["you"], "assistant": words["assistant"]}
    parts = [f"> {line}".rstrip() for line in (system or "").splitlines()]
    head = ["\n".join(parts)] if parts else []
    return "\n\n".join([*head, *(f"## {names.get(m.role, m.role)}\n\n{m.content.strip()}" for m in messages)]) + "\n"


def read_chat(path: Path) -> LoadedChat:
    """Read a message list, or the newest chat of the page's export. Raises ChatFileError."""
    from notso.smollm3.values.messages import Message
    from notso.web.chat.files.imports import read_chats
    from notso.web.values.problems import Problem

    try:
        chats = read_chats(read_regular(path, MAX_BYTES), lambda text: text)
    except OSError as error:
        raise ChatFileError(f"{path}: {error.strerror or error}") from None
    except Problem as problem:
        raise ChatFileError(f"{path}: {problem.sentence.rstrip('.')}") from None
    if not chats:
        raise ChatFileError(f"{path}: there is no chat in it")
    chat, stored = max(chats, key=lambda each: each[0].updated_ms)
    line = _shown(stored, chat.chosen_root)
    messages = [Message(each.role, each.content, reasoning_content=each.reasoning or None) for each in line]
    return LoadedChat(messages, str(chat.settings.get("system_prompt") or "") or None)


def _shown(stored: Sequence[StoredMessage], chosen: str | None) -> list[StoredMessage]:
    # A chat of the page is a tree of versions: the shown line follows the choices, or the newest version.
    below: dict[str | None, dict[str, StoredMessage]] = {}
    for each in stored:
        below.setdefault(each.parent_id, {})[each.id] = each
    line: list[StoredMessage] = []
    parent = None
    while choices := below.get(parent):
        line.append(choices.get(chosen or "") or [*choices.values()][-1])
        parent, chosen = line[-1].id, line[-1].chosen_child
    return line
