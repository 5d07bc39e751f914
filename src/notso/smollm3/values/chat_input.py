"""Convert strings, mappings and Messages to a list of Messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, cast

from notso.smollm3.errors import InvalidRequestError, iterate, require
from notso.smollm3.values.messages import ROLES, Message, Role, ToolCall
from notso.smollm3.values.request_options import RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams

# One turn: a Message, or a mapping in OpenAI's form.
Turn: TypeAlias = Message | Mapping[str, Any]
# A string is treated as one user message.
ChatInput: TypeAlias = str | Turn | Sequence[Turn]
_CHAT_INPUT = "text, a message, or a list of messages"


def conversation(messages: ChatInput, *more: Turn) -> list[Message]:
    """Convert chat input to messages.

    Mappings have OpenAI's form: `role`, `content` (text, text parts or, with `tool_calls`, None), `reasoning_content`,
    `tool_calls`, `tool_call_id`. Other keys are ignored. The role "developer" means "system". Raises
    InvalidRequestError with the message's position.
    """
    if isinstance(messages, str):
        messages = Message("user", messages)
    turns = [messages] if isinstance(messages, Message | Mapping) else messages
    require(not isinstance(turns, bytes | bytearray), "messages", _CHAT_INPUT)
    each_turn = chain(iterate(turns, "messages", _CHAT_INPUT), more)
    found = [_message(turn, f"messages[{place}]") for place, turn in enumerate(each_turn)]
    if not found:
        raise InvalidRequestError("messages are required", param="messages")
    return found


def split_batch(conversations: Iterable[ChatInput]) -> Iterator[ChatInput]:
    """Return an iterator over the conversations of a batch. Raises InvalidRequestError."""
    try:
        if not isinstance(conversations, str | Mapping | Message):
            return iter(conversations)
    except TypeError:
        pass
    raise InvalidRequestError("batch takes a list of conversations; use chat for one", param="conversations")


def _message(turn: object, where: str) -> Message:
    if isinstance(turn, Message):
        return turn
    if isinstance(turn, SamplingParams | RequestOptions):
        name = "params" if isinstance(turn, SamplingParams) else "options"
        raise InvalidRequestError(
            f"{type(turn).__name__} must be passed as {name}=, not among the messages", param=name
        )
    if not isinstance(turn, Mapping):
        raise _invalid(where, f"a Message, or a mapping with role and content, not {type(turn).__name__}")
    role = "system" if turn.get("role") == "developer" else turn.get("role")
    if role not in ROLES:
        raise _invalid(f"{where}.role", f"one of {', '.join(ROLES)}")
    calls = turn.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise _invalid(f"{where}.tool_calls", "a list")
    parsed = tuple(_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls))
    content = turn.get("content")
    if content is None and not parsed:
        raise _invalid(f"{where}.content", "text")
    text = "" if content is None else _text(content, f"{where}.content")
    optional = []
    for name in ("reasoning_content", "tool_call_id"):
        value = turn.get(name)
        if value is not None and not isinstance(value, str):
            raise _invalid(f"{where}.{name}", "text")
        optional.append(value)
    return Message(cast(Role, role), text, optional[0], parsed, optional[1])


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _invalid(where, "text, or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise _invalid(f"{where}[{place}]", "a text part; this model reads text only")
        texts.append(text)
    return "".join(texts)


def _call(call: object, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise _invalid(where, "a ToolCall, or a mapping with id and function (name, arguments)")
    arguments = function.get("arguments", "{}")
    try:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the arguments of {where} are not valid JSON: {error}", param=where) from None
    return ToolCall(str(call.get("id") or ""), name, written)


def _invalid(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} must be {what}", param=where)
