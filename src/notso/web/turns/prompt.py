"""What the model reads of a chat: the shown branch as messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from notso.web.engine.port import Message
from notso.web.store.protocol import StoredMessage
from notso.web.turns.attachments import with_attachments
from notso.web.turns.tool_rounds import answer_messages

SUMMARY_HEADING = "Summary of the conversation so far:"
SUMMARY_REQUEST = (
    "Summarise our conversation so far in a few short paragraphs. Keep names, numbers, decisions and open questions."
    " Write only the summary."
)


def prompt_messages(
    line: Sequence[StoredMessage], system_prompt: str = "", *, keep_thinking: bool = False
) -> tuple[Message, ...]:
    """System text, the newest summary in place of all that is above it, then questions and answers, calls of tools and
    their results among them; thoughts are left out unless `keep_thinking`.

    An earlier question that failed without a word of answer is left out, with the tools' results: what did not fit
    would make every later one fail. The last message of `line` is always kept.
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
        elif not message.active:
            messages += answer_messages(message, keep_thinking=keep_thinking)
    return tuple(messages)


def text_size(line: Sequence[StoredMessage]) -> int:
    """Characters of all that may be read of these messages."""
    return sum(
        len(each.content) + len(each.reasoning) + sum(len(file.text) for file in each.attachments) for each in line
    )


def conversation_of(line: Sequence[StoredMessage]) -> str | None:
    """By what name the engine can forget what it has computed for a branch: its first message. So an emptied chat goes
    on as another conversation."""
    return line[0].id if line else None


def _stands(message: StoredMessage) -> bool:
    return message.kind == "summary" and message.state == "done" and bool(message.content)


def _left_out(message: StoredMessage, after: StoredMessage) -> bool:
    return _failed_empty(after if message.role == "user" else message)


def _failed_empty(message: StoredMessage) -> bool:
    return message.role == "assistant" and message.state == "failed" and not message.content
