"""Define the events of an answer, the values in them, and the complete answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from notso.smollm3.errors import EngineError, NotsoError
from notso.smollm3.values.messages import Message, ToolCall

EventKind = Literal[
    "queued",
    "started",
    "progress",
    "trimmed",
    "prompt",
    "embedding",
    "reasoning",
    "text",
    "tool_call_part",
    "tool_call",
    "tokens",
    "usage",
    "error",
    "end",
]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, and times in milliseconds."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0  # number of prompt tokens that were found in the cache
    prompt_ms: float = 0.0
    completion_ms: float = 0.0
    queue_ms: float = 0.0
    drafted_tokens: int = 0  # number of draft tokens in speculative decoding, including `accepted_tokens`
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of prefill."""

    done_tokens: int  # including cached tokens
    total_tokens: int
    cached_tokens: int
    tokens_per_s: float = 0.0  # excluding cached tokens; 0 until measured


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability, computed from the model's unmodified logits."""

    # Incomplete characters are shown as U+FFFD.
    text: str
    bytes: tuple[int, ...]
    # NaN for the first token of a prompt, because no logits precede it.
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the most likely tokens, in descending order; may include this token
    id: int = -1  # -1: unknown


@dataclass(frozen=True, slots=True, repr=False)
class Event:
    """One event of an answer.

    Order: `trimmed` if turns were dropped; `queued` for the initial queue position and for each change within the first
    16 places; `started` if token ids are requested; events of `replay`; `progress`, and `prompt` if requested, during
    prefill; `embedding` if requested; then `reasoning`, `text`, `tool_call_part`, `tool_call` and `tokens` events;
    finally `usage` and `end`, or `error`.

    Fields by kind:

    queued: `place` (1 is next).
    started: `origin` (a digest of the prompt's ids, the model, the adapter, the KV format and the version of the
        numerical code); `limit` (maximum number of tokens in the answer).
    trimmed: `dropped_messages`.
    reasoning, text: `text`; `tokens` (number so far, including reasoning); `logprobs` if requested.
    tool_call: `tool_call`.
    tool_call_part: `text` (next part of the arguments of `begun_call`); `tokens`. Sent only if a grammar constrains
        calls. The tool_call with the same id follows unless the answer is cut off.
    tokens: `token_ids` since the last `tokens` event; `tokens`; `is_forced` if the engine inserted these tokens to
        end the reasoning. Sent after the events with these tokens' text.
    prompt: `logprobs`.
    end: `finish_reason`; `stop`, the matched stop string; `logprobs` of tokens without visible text.
    progress, embedding, usage, error: the field with this name.
    """

    kind: EventKind
    text: str = ""
    tool_call: ToolCall | None = None
    begun_call: ToolCall | None = None
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    place: int = 0
    dropped_messages: int = 0
    progress: Progress | None = None
    tokens: int = 0
    error: NotsoError | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None
    embedding: tuple[float, ...] = ()
    origin: str = ""
    limit: int = 0
    token_ids: tuple[int, ...] = ()
    is_forced: bool = False

    def __repr__(self) -> str:
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self)[1:])
        shown = [f", {name}={value!r}" for name, value, default in values if value != default]
        return f"Event({self.kind!r}{''.join(shown)})"


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer; `str(completion)` is its text.

    text: without reasoning, tool calls and the stop string.
    reasoning: "" if there is none.
    finish_reason: "stop", "tool_calls", "length" (cut off by max_tokens or the context) or "cancelled" (stopped by a
        caller or by `close`).
    stop: matched stop string.
    logprobs: of the generated tokens, if requested.
    dropped_messages: how many of the oldest messages were omitted from the prompt.
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
        """Collect all events of an answer. Raises an `error` event's error, or EngineError if `end` is missing."""
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
                answer, thoughts = "".join(text), "".join(reasoning)
                reason = event.finish_reason
                return cls(answer, thoughts, tuple(calls), usage, reason, event.stop, tuple(logprobs), dropped)
        raise EngineError("the answer has no `end` event")

    @property
    def is_cut(self) -> bool:
        """Whether the answer was cut off."""
        return self.finish_reason in ("length", "cancelled")

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, self.reasoning or None, self.tool_calls)

    def __str__(self) -> str:
        return self.text
