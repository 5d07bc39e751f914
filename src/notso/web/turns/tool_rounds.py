"""Conversion of an answer with tool calls to messages and to the next engine request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from notso.web.engine.port import Message, Request, ToolCall
from notso.web.store.protocol import StoredMessage, ToolUse

NO_RESULT = "error: the call was interrupted, there is no result"


def answer_messages(message: StoredMessage, *, keep_thinking: bool = False) -> list[Message]:
    """Return an answer with its tool calls as messages."""
    messages = list(_rounds(message, keep_thinking))
    text, reasoning = _last_part(message)
    return [*messages, _said(text, reasoning, keep_thinking)] if text else messages


def next_request(request: Request, message: StoredMessage, *, keep_thinking: bool = False) -> Request:
    """Return the request that continues a partial answer of `request`."""
    messages = (*request.messages, *_rounds(message, keep_thinking))
    text, reasoning = _last_part(message)
    if not text and not reasoning:
        return replace(request, messages=messages)
    started = Message("assistant", text, reasoning_content=reasoning or None)
    options = replace(request.options, thinking=bool(reasoning), continue_last=True)
    return replace(request, messages=(*messages, started), options=options)


def parts_of(message: StoredMessage) -> list[str]:
    """Split the text at its calls."""
    ends = [use.content_at for use in message.tool_uses]
    starts = [0, *ends]
    return [message.content[start:end].lstrip("\n") for start, end in zip(starts, [*ends, None], strict=True)]


def _rounds(message: StoredMessage, keep_thinking: bool) -> Iterator[Message]:
    start = reasoning_start = 0
    for _, group in groupby(message.tool_uses, key=lambda use: use.round):
        uses = list(group)
        end, reasoning_end = _end(uses[-1]), uses[-1].reasoning_at
        text, reasoning = (
            message.content[start:end].lstrip("\n"),
            message.reasoning[reasoning_start:reasoning_end].lstrip("\n"),
        )
        calls = tuple(ToolCall(use.id, use.name, use.arguments) for use in uses)
        yield replace(_said(text, reasoning, keep_thinking), tool_calls=calls)
        for use in uses:
            yield Message("tool", _result(use), tool_call_id=use.id)
        start, reasoning_start = end, reasoning_end


def _said(text: str, reasoning: str, keep_thinking: bool) -> Message:
    kept = reasoning if keep_thinking and reasoning else None
    return Message("assistant", text, kept, keep_reasoning=kept is not None)


def _last_part(message: StoredMessage) -> tuple[str, str]:
    if not message.tool_uses:
        return message.content, message.reasoning
    last = message.tool_uses[-1]
    return message.content[_end(last) :].lstrip("\n"), message.reasoning[last.reasoning_at :].lstrip("\n")


def _end(last: ToolUse) -> int:
    return max(last.content_at, last.round_end)


def _result(use: ToolUse) -> str:
    return use.result if use.is_final else NO_RESULT
