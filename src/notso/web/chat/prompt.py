"""What the model reads of a chat: the shown branch as messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from notso.web.chat.attachments import with_attachments
from notso.web.chat.engine_port import Message
from notso.web.store.protocol import StoredMessage

SUMMARY_HEADING = "Summary of the conversation so far:"
SUMMARY_REQUEST = (
    "Summarise our conversation so far in a few short paragraphs. Keep names, numbers, decisions and open questions."
    " Write only the summary."
)


def prompt_messages(line: Sequence[StoredMessage], system_prompt: str = "") -> tuple[Message, ...]:
    """System text, the newest summary in place of all that is above it, then questions and answers without thoughts.

    An earlier question that failed without a word of answer is left out: one that did not fit would make every later
    one fail. The last message of `line` is always kept.
    """
    summary = next((at for at in reversed(range(len(line))) if _stands(line[at])), None)
    system = [system_prompt.strip()] if system_prompt.strip() else []
    if summary is not None:
        system.append(f"{SUMMARY_HEADING}\n{line[summary].content}")
        line = line[summary + 1 :]
    messages = [Message("system", "\n\n".join(system))] if system else []
    for message, after in zip_longest(line, line[1:]):
        if message.kind == "summary" or (after is not None and _left_out(message, after)):
            continue
        if message.role == "user":
            messages.append(Message("user", with_attachments(message.content, message.attachments)))
        elif message.content and not message.active:
            messages.append(Message("assistant", message.content))
    return tuple(messages)


def unfinished_answer(answer: StoredMessage) -> Message:
    """An answer that shall be written on, thoughts included."""
    return Message("assistant", answer.content, reasoning_content=answer.reasoning or None)


def _stands(message: StoredMessage) -> bool:
    return message.kind == "summary" and message.state == "done" and bool(message.content)


def _left_out(message: StoredMessage, after: StoredMessage) -> bool:
    failed_empty = after.role == "assistant" and after.state == "failed" and not after.content
    return message.role == "user" and failed_empty
