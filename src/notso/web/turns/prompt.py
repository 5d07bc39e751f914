"""Convert a chat's visible branch to prompt messages.

An answer with tool calls becomes several messages. `continuation_request` continues an unfinished answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from notso.smollm3 import Message, ToolCall
from notso.web.engine.port import Request
from notso.web.store.protocol import StoredMessage, ToolUse
from notso.web.turns.chat_settings import ChatSettings
from notso.web.turns.documents import NO_DOCUMENTS, PromptDocuments

NO_RESULT = "error: the call was interrupted, there is no result"


def answer_messages(message: StoredMessage, *, keep_thinking: bool = False) -> list[Message]:
    messages = list(_tool_round_messages(message, keep_thinking))
    text, reasoning = _last_part(message)
    return [*messages, _to_assistant_message(text, reasoning, keep_thinking)] if text else messages


def continuation_request(request: Request, message: StoredMessage, *, keep_thinking: bool = False) -> Request:
    """Return the request that continues a partial answer to `request`."""
    messages = (*request.messages, *_tool_round_messages(message, keep_thinking))
    text, reasoning = _last_part(message)
    if not text and not reasoning:
        return replace(request, messages=messages)
    started = Message("assistant", text, reasoning_content=reasoning or None)
    options = replace(request.options, thinking=bool(reasoning), continue_last=True)
    return replace(request, messages=(*messages, started), options=options)


def split_at_tool_calls(message: StoredMessage) -> list[str]:
    ends = [use.content_at for use in message.tool_uses]
    starts = [0, *ends]
    return [message.content[start:end].lstrip("\n") for start, end in zip(starts, [*ends, None], strict=True)]


def _tool_round_messages(message: StoredMessage, keep_thinking: bool) -> Iterator[Message]:
    start = reasoning_start = 0
    for _, group in groupby(message.tool_uses, key=lambda use: use.round):
        uses = list(group)
        end, reasoning_end = _end(uses[-1]), uses[-1].reasoning_at
        text = message.content[start:end].lstrip("\n")
        reasoning = message.reasoning[reasoning_start:reasoning_end].lstrip("\n")
        calls = tuple(ToolCall(use.id, use.name, use.arguments) for use in uses)
        yield replace(_to_assistant_message(text, reasoning, keep_thinking), tool_calls=calls)
        for use in uses:
            yield Message("tool", use.result if use.is_final else NO_RESULT, tool_call_id=use.id)
        start, reasoning_start = end, reasoning_end


def _to_assistant_message(text: str, reasoning: str, keep_thinking: bool) -> Message:
    prompt_reasoning = reasoning if keep_thinking and reasoning else None
    return Message("assistant", text, prompt_reasoning, keep_reasoning=prompt_reasoning is not None)


def _last_part(message: StoredMessage) -> tuple[str, str]:
    if not message.tool_uses:
        return message.content, message.reasoning
    last = message.tool_uses[-1]
    return message.content[_end(last) :].lstrip("\n"), message.reasoning[last.reasoning_at :].lstrip("\n")


def _end(last: ToolUse) -> int:
    return max(last.content_at, last.round_end)


SUMMARY_HEADING = "Summary of the conversation so far:"
SUMMARY_REQUEST = (
    "Summarize our conversation so far in a few short paragraphs. Keep names, numbers, decisions and open questions."
    " Write only the summary."
)


def prompt_messages(
    line: Sequence[StoredMessage], settings: ChatSettings, documents: PromptDocuments = NO_DOCUMENTS
) -> tuple[Message, ...]:
    """Return the system prompt, the newest summary and the messages after it, with documents inserted."""
    summary = next((at for at in reversed(range(len(line))) if _is_usable_summary(line[at])), None)
    system = [each for each in (documents.instructions, settings.system_prompt.strip()) if each]
    if summary is not None:
        system.append(f"{SUMMARY_HEADING}\n{line[summary].content}")
        line = line[summary + 1 :]
    last = next((each.id for each in reversed(line) if each.role == "user"), None)
    messages = [Message("system", "\n\n".join(system))] if system else []
    for message, after in zip_longest(line, line[1:]):
        if message.kind == "summary" or (after is not None and _is_omitted(message, after)):
            # Omit an empty failed answer and its question. A question that did not fit in the context would make all
            # later requests fail, too.
            continue
        if message.role == "user":
            messages.append(Message("user", documents.user_text(message, is_last=message.id == last)))
        elif not message.active:
            messages += answer_messages(message, keep_thinking=settings.keep_thinking)
    return documents.with_head(messages)


def text_size(line: Sequence[StoredMessage]) -> int:
    return sum(
        len(each.content) + len(each.reasoning) + sum(len(file.text) for file in each.attachments) for each in line
    )


def _is_usable_summary(message: StoredMessage) -> bool:
    return message.kind == "summary" and message.state == "done" and bool(message.content)


def _is_omitted(message: StoredMessage, after: StoredMessage) -> bool:
    answer = after if message.role == "user" else message
    return answer.role == "assistant" and answer.state == "failed" and not answer.content
