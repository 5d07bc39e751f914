"""A whole answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from notso.smollm3.errors import EngineError
from notso.smollm3.values.events import Event, FinishReason, TokenLogprob, Usage
from notso.smollm3.values.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; `str(completion)` is its text.

    text: without reasoning, tool calls and the stop string. reasoning: "" if there is none. usage: token counts, and
    times in milliseconds. finish_reason: "stop", "tool_calls", "length" (cut by max_tokens or the context) or
    "cancelled" (stopped by a caller or by `close`). stop: matched stop string. logprobs: of written tokens in order, if
    requested. dropped_messages: oldest turns left out of the prompt.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    usage: Usage
    finish_reason: FinishReason
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    dropped_messages: int = 0

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Completion:
        """Gather all events of an answer. Raises the error of an `error` event, and EngineError without an `end`."""
        text, reasoning, calls = [], [], []
        logprobs: list[TokenLogprob] = []
        usage, dropped = None, 0
        for event in events:
            if event.error is not None:
                raise event.error
            if event.kind == "text":
                text.append(event.text)
            elif event.kind == "reasoning":
                reasoning.append(event.text)
            elif event.tool_call is not None:
                calls.append(event.tool_call)
            elif event.kind == "trimmed":
                dropped = event.dropped_messages
            usage = event.usage or usage
            if event.kind != "prompt":
                logprobs += event.logprobs
            if event.kind == "end" and usage is not None and event.finish_reason is not None:
                said, thought = "".join(text), "".join(reasoning)
                reason = event.finish_reason
                return cls(said, thought, tuple(calls), usage, reason, event.stop, tuple(logprobs), dropped)
        raise EngineError("the answer has no end")

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended before the model ended it."""
        return self.finish_reason in ("length", "cancelled")

    @property
    def message(self) -> Message:
        """The assistant's turn, for the next request."""
        return Message("assistant", self.text, self.reasoning or None, self.tool_calls)

    def __str__(self) -> str:
        return self.text
