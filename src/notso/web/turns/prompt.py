"""Conversion of a chat's visible branch to prompt messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from notso.web.engine.port import Message
from notso.web.store.protocol import StoredMessage
from notso.web.turns.documents import NO_DOCUMENTS, PromptDocuments
from notso.web.turns.tool_rounds import answer_messages

SUMMARY_HEADING = "Summary of the conversation so far:"
SUMMARY_REQUEST = (
    "Summarise our conversation so far in a few short paragraphs. Keep names, numbers, decisions and open questions."
    " Write only the summary."
)


def prompt_messages(
    line: Sequence[StoredMessage],
    system_prompt: str = "",
    *,
    keep_thinking: bool = False,
    documents: PromptDocuments = NO_DOCUMENTS,
) -> tuple[Message, ...]:
    """Return system prompt, newest summary and the messages after it, with documents where they belong."""
    summary = next((at for at in reversed(range(len(line))) if _stands(line[at])), None)
    system = [each for each in (documents.instructions, system_prompt.strip()) if each]
    if summary is not None:
        system.append(f"{SUMMARY_HEADING}\n{line[summary].content}")
        line = line[summary + 1 :]
    last = next((each.id for each in reversed(line) if each.role == "user"), None)
    messages = [Message("system", "\n\n".join(system))] if system else []
    for message, after in zip_longest(line, line[1:]):
        if message.kind == "summary" or (after is not None and _left_out(message, after)):
            # A failed empty answer is dropped with its question: a question that did not fit would make every later one
            # fail too. The last message is always kept.
            continue
        if message.role == "user":
            messages.append(Message("user", documents.user_text(message, is_last=message.id == last)))
        elif not message.active:
            messages += answer_messages(message, keep_thinking=keep_thinking)
    return documents.headed(messages)


def text_size(line: Sequence[StoredMessage]) -> int:
    """Return the number of characters in these messages."""
    return sum(
        len(each.content) + len(each.reasoning) + sum(len(file.text) for file in each.attachments) for each in line
    )


def conversation_of(line: Sequence[StoredMessage]) -> str | None:
    """Return the conversation id for the engine's cache: that of the first message."""
    # An emptied chat therefore continues as another conversation.
    return line[0].id if line else None


def _stands(message: StoredMessage) -> bool:
    return message.kind == "summary" and message.state == "done" and bool(message.content)


def _left_out(message: StoredMessage, after: StoredMessage) -> bool:
    return _failed_empty(after if message.role == "user" else message)


def _failed_empty(message: StoredMessage) -> bool:
    return message.role == "assistant" and message.state == "failed" and not message.content
