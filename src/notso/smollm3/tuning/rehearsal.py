"""Rehearsal: answers of the untuned model, trained together with new rows to preserve its abilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notso.smollm3.errors import InvalidRequestError, one_line
from notso.smollm3.tuning.rows import THINK_CLOSE, THINK_OPEN, messages_of, tools_of
from notso.smollm3.values.request_options import RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams

if TYPE_CHECKING:
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.output.generation import Generation

SHIPPED = Path(__file__).with_name("rehearsal.txt")  # default questions of many kinds, written for this project

AT_ONCE = 64  # conversations submitted to the engine together

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Conversation:
    """Conversation to be answered by the model."""

    # Answers are generated wherever a user or tool message lacks one; a final answer is replaced by the model's.
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    thinking: bool = False
    said: list[dict[str, Any]] = field(default_factory=list)

    def is_asked(self) -> bool:
        """Advance to the next message due an answer, if any."""
        while self.messages and not self._waits():
            if self.messages[0]["role"] == "tool" and not self.said[-1].get("tool_calls"):
                return False  # result of a call that was not made
            self.said.append(self.messages.pop(0))
        return self._waits()

    def _waits(self) -> bool:
        last = self.said[-1]["role"] if self.said else "system"
        following = self.messages[0]["role"] if self.messages else "user"
        answers_are_due = {"user": ("system", "user", "tool"), "tool": ("system", "user")}
        return following in answers_are_due.get(last, ())


def read(text: str, name: str) -> list[Conversation]:
    """Parse questions, one per line, or JSON conversations. Raises InvalidRequestError naming the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            given: Any = {"messages": [{"role": "user", "content": line}]}
            if line.startswith("{"):
                given = json.loads(line)
            messages = given.get("messages")
            list(messages_of(messages, "messages"))
            if messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            thinks = (given.get("chat_template_kwargs") or {}).get("enable_thinking")
            # Both modes, unless chat_template_kwargs selects one.
            for thinking in (False, True) if thinks is None else (thinks is not False,):
                found.append(Conversation(list(messages), tools_of(given.get("tools")), thinking))
        except (ValueError, RecursionError, AttributeError) as error:
            raise InvalidRequestError(f"{name}, line {number}: {one_line(str(error))}", param="rehearse") from None
    return found


def answered(
    engine: Engine,
    conversations: Sequence[Conversation],
    max_tokens: int,
    day: date,
    progress: Progress = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Return a row per greedy answer; `day` is the date that the model sees."""
    rows = []
    for start in range(0, len(conversations), AT_ONCE):
        progress("answering before", start, len(conversations))
        open_ones = list(conversations[start : start + AT_ONCE])
        while open_ones := [each for each in open_ones if each.is_asked()]:
            asked = [_submit(engine, each, max_tokens, day) for each in open_ones]
            made = [_answer(generation, each.thinking) for generation, each in zip(asked, open_ones, strict=True)]
            for each, answer in zip(open_ones, made, strict=True):
                # Truncated answers, and answers in the wrong thinking mode, are dropped along with what follows them.
                if answer is None:
                    each.said.clear()
                    each.messages.clear()
                    continue
                rows.append(_row(each, answer))
                each.said.append(answer | {"content": answer["content"].rpartition(THINK_CLOSE)[2]})
    progress("answering before", len(conversations), len(conversations))
    return rows


def _submit(engine: Engine, conversation: Conversation, max_tokens: int, day: date) -> Generation:
    options = RequestOptions(thinking=conversation.thinking, tools=conversation.tools, date=day)
    said = list(messages_of(conversation.said, "messages"))
    return engine.submit(said, SamplingParams(temperature=0, max_tokens=max_tokens), options)


def _answer(generation: Generation, thinking: bool) -> dict[str, Any] | None:
    parts = {"reasoning": "", "text": ""}
    calls, reason = [], None
    for event in generation.events():
        if event.kind in parts:
            parts[event.kind] += event.text
        elif event.kind == "tool_call" and event.tool_call is not None:
            call = event.tool_call
            calls.append(
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            )
        elif event.kind == "error" and event.error is not None:
            raise event.error
        reason = event.finish_reason or reason
    thoughts, text = (part.strip() for part in parts.values())
    if reason not in ("stop", "tool_calls") or bool(thoughts) != thinking or not (text or calls):
        return None
    content = f"{THINK_OPEN}{thoughts}{THINK_CLOSE}{text}" if thinking else text
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _row(conversation: Conversation, answer: dict[str, Any]) -> dict[str, Any]:
    row = {
        "prompt": list(conversation.said),
        "completion": [answer],
        "chat_template_kwargs": {"enable_thinking": conversation.thinking},
    }
    return row | ({"tools": conversation.tools} if conversation.tools else {})
