"""Training rows from chats: the shown branch as a conversation, and preferred against rejected answers.

Columns are named as in TRL: `messages` for supervised tuning; `prompt`, `chosen` and `rejected` for preferences;
`chat_template_kwargs` for the template's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from notso.web.engine.port import Message
from notso.web.store.protocol import StoredMessage, WholeChat
from notso.web.store.tree import line_to, shown_path
from notso.web.turns.chat_settings import settings_from
from notso.web.turns.prompt import prompt_messages
from notso.web.turns.tool_rounds import answer_messages

Row = dict[str, Any]
NO_THOUGHTS = "<think>\n\n</think>\n"
"""What the template puts before answers in conversations without thinking."""


def conversation(whole: WholeChat) -> Row | None:
    """Return the shown branch up to its last finished answer that is not rated down, if any."""
    shown = [each.message for each in shown_path(whole.messages, whole.chat.chosen_root)]
    # Nothing after an unfinished message is used.
    cut = next((at for at, message in enumerate(shown) if not _is_whole(message)), len(shown))
    last = next((at for at in reversed(range(cut)) if _teaches(shown[at]) and _is_good(shown[at])), None)
    if last is None:
        return None
    messages = _prompt(whole, shown[: last + 1])
    thinking = any(message.reasoning_content for message in messages)
    return {"messages": [_as_row(each, thinking) for each in messages], "chat_template_kwargs": _options(thinking)}


def preferences(whole: WholeChat) -> Iterator[Row]:
    """Pair the preferred answer of each question with each of its other finished answers.

    Preferred is the edited version, else the one rated highest, else the shown one or the newest. An answer rated down
    is preferred to none.
    """
    shown = {each.message.id for each in shown_path(whole.messages, whole.chat.chosen_root)}
    for question in (message for message in whole.messages if message.role == "user"):
        answers = [each for each in whole.messages if each.parent_id == question.id and _teaches(each)]
        if len(answers) < 2:
            continue
        chosen = max(
            reversed(answers),
            key=lambda each: (each.edited, each.rating, each.id in shown or each.id == question.chosen_child),
        )
        if chosen.rating < 0 and not chosen.edited:
            continue
        line = line_to(whole.messages, question.id)
        if not all(_is_whole(message) for message in line):
            continue
        before = _prompt(whole, line)
        for rejected in answers:
            if rejected.content == chosen.content:
                continue
            pair = [answer_messages(each, keep_thinking=True) for each in (chosen, rejected)]
            thinking = any(message.reasoning_content for message in (*before, *pair[0], *pair[1]))
            rows = [[_as_row(each, thinking) for each in part] for part in (before, *pair)]
            yield {
                **dict(zip(("prompt", "chosen", "rejected"), rows, strict=True)),
                "chat_template_kwargs": _options(thinking),
            }


def _is_whole(message: StoredMessage) -> bool:
    return message.role == "user" or message.state == "done"


def _teaches(message: StoredMessage) -> bool:
    return message.role == "assistant" and message.kind == "turn" and message.state == "done" and bool(message.content)


def _is_good(message: StoredMessage) -> bool:
    return message.rating >= 0 or message.edited


def _prompt(whole: WholeChat, line: Sequence[StoredMessage]) -> tuple[Message, ...]:
    settings = settings_from(whole.base.defaults, whole.chat.settings)
    return prompt_messages(line, settings.system_prompt, keep_thinking=True)


def _options(thinking: bool) -> Row:
    return {"enable_thinking": thinking}


def _as_row(message: Message, thinking: bool) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.role == "assistant" and thinking:
        # Thoughts are part of the text, as the model writes them.
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
        return json.loads(text)
    except ValueError:  # the model wrote invalid JSON: keep the text
        return text
