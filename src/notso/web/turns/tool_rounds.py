"""An answer with calls of tools in it, as the messages it is made of, and what to ask the engine for its next part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from notso.web.engine.port import Message, Request, ToolCall
from notso.web.store.protocol import StoredMessage, ToolUse

NO_RESULT = "error: the call was interrupted, there is no result"


def answer_messages(answer: StoredMessage, *, keep_thinking: bool = False) -> list[Message]:
    """Text and calls, results, text again: as the model wrote and read it, its thoughts only if they are kept."""
    messages = list(_rounds(answer, keep_thinking))
    text, thoughts = _last_part(answer)
    return [*messages, _said(text, thoughts, keep_thinking)] if text else messages


def next_request(question: Request, answer: StoredMessage, *, keep_thinking: bool = False) -> Request:
    """What to ask for more of an answer that is there in part, possibly none of it; `question` asks for all of it."""
    messages = (*question.messages, *_rounds(answer, keep_thinking))
    text, thoughts = _last_part(answer)
    if not text and not thoughts:
        return replace(question, messages=messages)
    begun = Message("assistant", text, reasoning_content=thoughts or None)
    options = replace(question.options, thinking=bool(thoughts), continue_last=True)
    return replace(question, messages=(*messages, begun), options=options)


def parts_of(answer: StoredMessage) -> list[str]:
    """The text before each call, and the text after the last one."""
    ends = [use.content_at for use in answer.tool_uses]
    starts = [0, *ends]
    return [answer.content[start:end].lstrip("\n") for start, end in zip(starts, [*ends, None], strict=True)]


def _rounds(answer: StoredMessage, keep_thinking: bool) -> Iterator[Message]:
    start = thought_start = 0
    for _, group in groupby(answer.tool_uses, key=lambda use: use.round):
        uses = list(group)
        end, thought_end = _end(uses[-1]), uses[-1].reasoning_at
        text, thoughts = (
            answer.content[start:end].lstrip("\n"),
            answer.reasoning[thought_start:thought_end].lstrip("\n"),
        )
        calls = tuple(ToolCall(use.id, use.name, use.arguments) for use in uses)
        yield replace(_said(text, thoughts, keep_thinking), tool_calls=calls)
        for use in uses:
            yield Message("tool", _result(use), tool_call_id=use.id)
        start, thought_start = end, thought_end


def _said(text: str, thoughts: str, keep_thinking: bool) -> Message:
    kept = thoughts if keep_thinking and thoughts else None
    return Message("assistant", text, kept, keep_reasoning=kept is not None)


def _last_part(answer: StoredMessage) -> tuple[str, str]:
    """Text and thoughts after the last call."""
    if not answer.tool_uses:
        return answer.content, answer.reasoning
    last = answer.tool_uses[-1]
    return answer.content[_end(last) :].lstrip("\n"), answer.reasoning[last.reasoning_at :].lstrip("\n")


def _end(last: ToolUse) -> int:
    return max(last.content_at, last.round_end)


def _result(use: ToolUse) -> str:
    return use.result if use.settled else NO_RESULT
