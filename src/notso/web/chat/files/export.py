"""Export chats as JSON (all branches), Markdown (the shown branch) or training rows.

Training rows are conversations, or pairs of preferred and rejected answers. Their columns have the names that TRL
expects: `messages` (conversations) or `prompt`, `chosen` and `rejected` (pairs), and `chat_template_kwargs`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.smollm3 import Message
from notso.web.store.protocol import Chat, ChatSnapshot, ChatStore, StoredMessage, ToolUse
from notso.web.store.tree import path_to, shown_path
from notso.web.turns.chat_settings import SETTING_NAMES, merge_settings
from notso.web.turns.citations import markdown_with_citations
from notso.web.turns.documents import NO_DOCUMENTS, PromptDocuments, prompt_documents
from notso.web.turns.prompt import answer_messages, prompt_messages, split_at_tool_calls
from notso.web.values.wording import words

Row = dict[str, Any]
Line = Sequence[StoredMessage]
DocumentsOf = Callable[[Line], PromptDocuments]
"""Function that returns what the documents of a branch add to its prompt."""
NO_THOUGHTS = "<think>\n\n</think>\n"
"""Text that the chat template inserts before answers without reasoning."""


def _no_documents(line: Line) -> PromptDocuments:
    return NO_DOCUMENTS


def load_chats(store: ChatStore, chats: Iterable[tuple[str, str]]) -> Iterator[tuple[ChatSnapshot, DocumentsOf]]:
    """Open a store and yield the chats given as (owner, id) pairs, each with its `DocumentsOf` function. Raises
    StorageError."""
    with asyncio.Runner() as runner:
        runner.run(store.open())
        try:
            for owner, chat_id in chats:
                snapshot = runner.run(store.chat_snapshot(owner, chat_id))
                if snapshot is not None:
                    chat, project = snapshot.chat, snapshot.base.project
                    load = partial(prompt_documents, store, owner, chat.prompt_date, project=project)
                    yield snapshot, lambda line, load=load: runner.run(load(line))  # type: ignore[misc]
        finally:
            runner.run(store.close())


def conversation(snapshot: ChatSnapshot, documents_of: DocumentsOf = _no_documents) -> Row | None:
    """Return the shown branch as a training row, or None if no answer is suitable.

    The row ends with the last suitable answer before the first unfinished message. Answers rated down are suitable only
    if edited.
    """
    shown = [each.message for each in shown_path(snapshot.messages, snapshot.chat.chosen_root)]
    cut = next((at for at, message in enumerate(shown) if not _is_finished(message)), len(shown))
    last = next((at for at in reversed(range(cut)) if _is_trainable(shown[at]) and _is_good(shown[at])), None)
    if last is None:
        return None
    messages = _prompt(snapshot, shown[: last + 1], documents_of)
    thinking = any(message.reasoning_content for message in messages)
    rows = [_to_row(each, thinking) for each in messages]
    return {"messages": rows, "chat_template_kwargs": {"enable_thinking": thinking}}


def preference_rows(snapshot: ChatSnapshot, documents_of: DocumentsOf = _no_documents) -> Iterator[Row]:
    """Pair the preferred answer to each question with every other finished answer that differs from it."""
    # Order of preference: edited answers, higher ratings, the shown answer, newer answers. A question is skipped
    # if its preferred answer is rated down and not edited.
    shown = {each.message.id for each in shown_path(snapshot.messages, snapshot.chat.chosen_root)}
    answers_to: dict[str | None, list[StoredMessage]] = {}
    for each in filter(_is_trainable, snapshot.messages):
        answers_to.setdefault(each.parent_id, []).append(each)
    for question in (message for message in snapshot.messages if message.role == "user"):
        answers = answers_to.get(question.id, [])
        if len(answers) < 2:
            continue
        chosen = max(
            reversed(answers),
            key=lambda each: (each.edited, each.rating, each.id in shown or each.id == question.chosen_child),
        )
        if chosen.rating < 0 and not chosen.edited:
            continue
        line = path_to(snapshot.messages, question.id)
        if not all(_is_finished(message) for message in line):
            continue
        before = _prompt(snapshot, line, documents_of)
        for rejected in answers:
            if rejected.content == chosen.content:
                continue
            pair = [answer_messages(each, keep_thinking=True) for each in (chosen, rejected)]
            thinking = any(message.reasoning_content for message in (*before, *pair[0], *pair[1]))
            rows = [[_to_row(each, thinking) for each in part] for part in (before, *pair)]
            pairs = zip(("prompt", "chosen", "rejected"), rows, strict=True)
            yield {**dict(pairs), "chat_template_kwargs": {"enable_thinking": thinking}}


def _is_finished(message: StoredMessage) -> bool:
    return message.role == "user" or message.state == "done"


def _is_trainable(message: StoredMessage) -> bool:
    return message.role == "assistant" and message.kind == "turn" and message.state == "done" and bool(message.content)


def _is_good(message: StoredMessage) -> bool:
    return message.rating >= 0 or message.edited


def _prompt(snapshot: ChatSnapshot, line: Line, documents_of: DocumentsOf) -> tuple[Message, ...]:
    settings = replace(merge_settings(snapshot.base.defaults, snapshot.chat.settings), keep_thinking=True)
    return prompt_messages(line, settings, documents_of(line))


def _to_row(message: Message, thinking: bool) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.role == "assistant" and thinking:
        thoughts = f"<think>\n{message.reasoning_content}\n</think>\n" if message.reasoning_content else NO_THOUGHTS
        row["content"] = thoughts + message.content
    if message.tool_calls:
        row["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    return row


def _arguments(text: str) -> Any:
    try:
        check_shape(text.encode(), ARGUMENTS_LIMITS)  # only newer versions of Python parse deeply nested values
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, JsonShapeError):
        return text  # keep the text of invalid JSON, and of values that a row cannot contain, such as lone surrogates
    return arguments


ARGUMENTS_LIMITS = JsonLimits(64, objects=10_000, values=100_000)
FORMAT_NAME = "notso-chats"
FORMAT_VERSION = 3  # version 1 had no tool calls; version 2 had no models and no archived chats

_UNFIT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)

JSON_HEAD = f'{{\n "format": "{FORMAT_NAME}",\n "version": {FORMAT_VERSION},\n "chats": ['.encode()
JSON_TAIL = b"]\n}\n"
CHAT_TAIL = b"\n ]\n}"
MARKDOWN_TAIL = b"\n"


def json_head(chat: Chat) -> bytes:
    """Return the start of a chat's JSON, to be followed by comma-separated messages and CHAT_TAIL."""
    text = json.dumps(_chat_json(chat) | {"messages": []}, ensure_ascii=False, indent=1)
    return text.removesuffix("]\n}").encode()


def json_messages(messages: Iterable[StoredMessage]) -> bytes:
    return ",".join("\n  " + json.dumps(_message_json(each), ensure_ascii=False) for each in messages).encode()


def markdown_head(chat: Chat) -> bytes:
    return f"# {chat.title}".encode()


def markdown_messages(messages: Iterable[StoredMessage]) -> bytes:
    parts = [""]
    for message in messages:
        name = "summary" if message.kind == "summary" else "you" if message.role == "user" else "assistant"
        parts.append(f"## {words[name]}")
        for each in message.attachments:
            text = "" if each.document else f"\n\n{_fenced(each.text)}"
            parts.append(f"{words['attachment']}{words['colon']}{each.name}{text}")
        texts = split_at_tool_calls(message)
        if message.citations and not message.tool_uses:
            texts = [markdown_with_citations(message)]
        for part, use in zip_longest(texts, message.tool_uses):
            parts += [part] if part else []
            parts += [_tool_use(use)] if use is not None else []
    return "\n\n".join(parts).encode()


def file_name(chat: Chat, ending: str) -> str:
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


# HTML is omitted because it can be rendered again, and generation ids because they are internal.
_MESSAGE_FIELDS = (
    *("id", "parent_id", "chosen_child", "role", "kind", "content", "reasoning", "state", "note", "edited"),
    *("attachments", "tool_uses", "dropped_messages", "created_ms", "model", "rating", "numbers"),
)


def _message_json(message: StoredMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _MESSAGE_FIELDS} | {
        "attachments": [{"name": each.name, "text": each.text} for each in message.attachments],
        "tool_uses": [asdict(each) for each in message.tool_uses],
        "numbers": asdict(message.numbers),
    }


def _tool_use(use: ToolUse) -> str:
    name = " ".join(use.name.replace("`", "'").split())
    heading = words["tool_named"].format(name=name, state=words["tool_" + use.state])
    parts = [heading, _fenced(use.arguments)]
    return "\n\n".join([*parts, _fenced(use.result)] if use.result else parts)


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
