"""Convert lists of messages, as other programs store them, to messages of the OpenAI API.

Fields without a counterpart are ignored. What notso cannot store is omitted and counted, as in `other_programs`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, Protocol

JSON = dict[str, Any]

MAX_SYSTEM_PROMPT = 20_000
MAX_DEPTH = 5
"""Maximum depth to which a document is searched for lists of messages."""

_ROLES = {
    **{role: role for role in ("user", "assistant", "system", "developer", "tool")},
    **{"human": "user", "function": "tool", "gpt": "assistant", "ai": "assistant", "model": "assistant"},
}
_CONTENTS = ("content", "text", "value", "mes", "parts", "contentParts", "fragments")
_REASONING = ("reasoning_content", "reasoning", "thinking", "aText")
_TITLES = ("title", "name", "topic", "chatTitle", "userTitle", "autoTitle")
_CHAT_KEYS = ("sessionId", "session_id", "thread_id", "history_id", "conversationId", "conversation_id", "chat_id")
_TIMES = ("createdAt", "created_at")
_SYSTEM_PROMPTS = ("system", "systemPrompt", "system_prompt")
THOUGHTS = re.compile(r"\s*(?:<think>(.*?)</think>|:::thinking\n(.*?)\n:::)\s*", re.DOTALL)
"""Reasoning at the beginning of an answer."""


class Reader(Protocol):
    """The members of `ExportReader` that this module uses."""

    left_out: Counter[str]

    def text(self, value: Any) -> str: ...


def is_message(value: Any) -> bool:
    return (
        isinstance(value, dict) and _role(value) is not None and not value.keys().isdisjoint((*_CONTENTS, "tool_calls"))
    )


def find_lists(value: Any, depth: int = MAX_DEPTH) -> Iterator[JSON]:
    """Yield the objects within a document that have a list of messages as `messages` or `conversations`."""
    if isinstance(value, dict):
        for name in ("messages", "conversations"):
            listed = value.get(name)
            if isinstance(listed, list) and any(map(is_message, listed)):
                yield from separate_chats({**value, "messages": listed})
                return
    if depth:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(each, dict | list):
                yield from find_lists(each, depth - 1)


def separate_chats(document: JSON) -> Iterator[JSON]:
    """Yield the chats of a document, whose list of messages may be a database table, as in LobeChat's exports.

    In a table, each message has the id of its chat, and the messages of each chat are sorted by time.
    """
    listed = document["messages"]
    key = next((name for name in _CHAT_KEYS if all(isinstance(each, dict) and each.get(name) for each in listed)), None)
    if key is None or not listed:
        yield document
        return
    chats: dict[str, list[JSON]] = {}
    for message in listed:
        chats.setdefault(f"{message[key]} {message.get('topicId')}", []).append(message)
    for messages in chats.values():
        times = [_time(next((each[name] for name in _TIMES if each.get(name)), None)) for each in messages]
        with suppress(TypeError):  # if a time is unknown, or only some have a time zone, keep the order
            messages = [each for _, each in sorted(zip(times, messages, strict=True), key=lambda pair: pair[0])]
        yield ({} if len(chats) > 1 else document) | {"messages": messages}


def _time(value: Any) -> Any:
    # Returns a value that can be compared with the times of other messages, or None, for which comparison raises
    # TypeError.
    if isinstance(value, str):
        with suppress(ValueError):
            return datetime.fromisoformat(value)
        return None
    return value if type(value) in (int, float) else None


def to_openai(document: JSON, reader: Reader) -> JSON:
    """Return the title and the messages of a document that has a list of messages as `messages`."""
    given = (document.get(name) for name in _SYSTEM_PROMPTS)
    prompts = (_Content(reader, {"content": each}).text for each in given if isinstance(each, str | dict | list))
    system = next(filter(None, prompts), "")
    messages: list[JSON] = [{"role": "system", "content": system}] if system else []
    waiting: dict[str, str] = {}  # the last answer's calls that have no result yet: id -> function name
    for message in document["messages"]:
        role = _role(message) if isinstance(message, dict) else None
        if role is None:
            messages.append(message)  # rejected when the chat is validated
        elif role == "tool":
            identity = _call_of(message, waiting)
            if identity is None:
                reader.left_out["tool_calls"] += 1
                continue
            del waiting[identity]
            content = _Content(reader, message).text
            messages.append({"role": role, "content": content, "tool_call_id": identity})
        else:
            converted = _convert(role, message, reader)
            if role in ("user", "assistant"):
                waiting = {call["id"]: call["function"]["name"] for call in converted.get("tool_calls", ())}
            if len(converted) > 2 or converted["content"] or message.get("content") == "":
                messages.append(converted)
    _shorten_system(messages, reader)
    title = next((text for name in _TITLES if (text := reader.text(document.get(name)).strip())), "")
    return {"messages": messages} | ({"title": " ".join(title.split())[:200]} if title else {})


def _role(message: JSON) -> str | None:
    if isinstance(message.get("is_user"), bool):  # SillyTavern's format
        return "user" if message["is_user"] else "assistant"
    role = message.get("role", message.get("from"))
    return _ROLES.get(role) if isinstance(role, str) else None


def _convert(role: str, message: JSON, reader: Reader) -> JSON:
    content = _Content(reader, message)
    if role != "assistant":
        return {"role": role, "content": content.text or content.note}
    thoughts = [text for name in _REASONING if (text := reader.text(message.get(name)))][:1] + content.reasoning
    text = content.text or reader.text(message.get("refusal"))
    if found := THOUGHTS.match(text):
        text = text[found.end() :]
        thoughts.append((found[1] or found[2] or "").strip())
    reasoning = reader.text("\n\n".join(filter(None, thoughts)))
    calls = _calls(message, reader)
    return (
        {"role": role, "content": text}
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": calls} if calls else {})
    )


class _Content:
    # Collects the text of a message, its reasoning, and a note that names omitted pictures and files.
    def __init__(self, reader: Reader, message: JSON) -> None:
        self._reader = reader
        self.reasoning: list[str] = []
        self._texts: list[str] = []
        self._omitted: list[str] = []
        for name in _CONTENTS:
            if message.get(name):
                self._add(message[name])
                break
        images = message.get("images")
        for _ in images if isinstance(images, list) else ():
            self._omit("pictures")
        self.text = reader.text("\n\n".join(filter(None, self._texts)))
        self.note = " ".join(f"[{each}]" for each in self._omitted)

    def _add(self, value: Any) -> None:
        if isinstance(value, str):
            self._texts.append(self._reader.text(value))
        elif isinstance(value, list):
            for each in value:
                self._add(each)
        elif isinstance(value, dict):
            self._add_part(value)
        elif value is not None:
            raise ValueError("content must be text or a list of parts")

    def _add_part(self, part: JSON) -> None:
        inner = part.get("part")
        part = inner if isinstance(inner, dict) else part
        kind = str(part.get("type") or part.get("pt") or "text").replace("-", "_").lower()
        if kind in ("thinking", "reasoning", "think", "ma"):
            found = next((part[name] for name in (*_REASONING, "text", "think") if part.get(name)), "")
            self.reasoning.append(self._reader.text(found.get("value") if isinstance(found, dict) else found))
        elif "image" in kind:
            self._omit("pictures")
        elif "text" in kind or kind == "value":
            self._add(next((part[name] for name in ("text", "value", "content") if part.get(name) is not None), None))
        elif "tool" in kind or kind == "function_call":
            self._reader.left_out["tool_calls"] += kind not in ("tool_result", "tool_response")
        elif kind not in ("ph", "annotations", "step_start", "refusal"):
            self._omit("files")
        if kind == "refusal":
            self._add(part.get("refusal"))

    def _omit(self, kind: str) -> None:
        self._reader.left_out[kind] += 1
        self._omitted.append({"pictures": "picture"}.get(kind, "file"))


def _calls(message: JSON, reader: Reader) -> list[JSON]:
    listed = message.get("tool_calls") or []
    listed = listed if isinstance(listed, list) else [listed]
    if isinstance(message.get("function_call"), dict):  # format of OpenAI's API until 2023
        listed = [*listed, {"function": message["function_call"]}]
    calls: dict[str, JSON] = {}
    for number, call in enumerate(listed):
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = reader.text(function.get("name"))[:200], _arguments(function.get("arguments"))
        identity = reader.text(call.get("id"))[:200] or f"call {number}"
        if not name or arguments is None or identity in calls:
            reader.left_out["tool_calls"] += 1
            continue
        calls[identity] = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return list(calls.values())


def _arguments(value: Any) -> str | None:
    if isinstance(value, str) and value.strip():
        try:
            return value if isinstance(json.loads(value), dict) else None
        except (ValueError, RecursionError):
            return None
    return json.dumps(value or {}, ensure_ascii=False) if isinstance(value, dict | str | None) else None


def _call_of(result: JSON, waiting: dict[str, str]) -> str | None:
    # Returns the id of the call that a result belongs to. In Ollama's format, results have no id, but may have a name.
    identity = result.get("tool_call_id")
    if identity is not None:
        return identity if isinstance(identity, str) and identity in waiting else None
    name = result.get("tool_name") or result.get("name")
    return next((each for each, called in waiting.items() if name in (None, called)), None)


def _shorten_system(messages: list[JSON], reader: Reader) -> None:
    left = MAX_SYSTEM_PROMPT
    for message in messages:
        if isinstance(message, dict) and message.get("role") in ("system", "developer"):
            if len(message["content"]) > left:
                reader.left_out["texts"] += 1
                message["content"] = message["content"][:left]
            left = max(0, left - len(message["content"]) - 2)
