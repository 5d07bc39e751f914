"""What an answer is made of while it is written: events, and what they carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from notso.smollm3.errors import NotsoError
from notso.smollm3.values.messages import ToolCall

EventKind = Literal[
    "queued",
    "progress",
    "trimmed",
    "prompt",
    "reasoning",
    "text",
    "tool_call_part",
    "tool_call",
    "usage",
    "error",
    "end",
]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens, times in milliseconds. `cached_tokens` of the prompt were not computed again.

    Of `drafted_tokens` that were guessed ahead, `accepted_tokens` were right (see speculation).
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    prompt_ms: float = 0.0
    completion_ms: float = 0.0
    queue_ms: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt has been read. `done_tokens` counts the cached ones; the rate is that of computed ones."""

    done_tokens: int
    total_tokens: int
    cached_tokens: int
    tokens_per_s: float = 0.0  # 0 until the first chunk has been timed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability by the model alone: before penalties, bias, temperature,
    filters and grammar. `top`: the likeliest tokens at its place, the likeliest first, as many as were asked for.

    Of a prompt's first token, before which nothing stands, `logprob` is not a number, and there is no `top`.
    `bytes` of several tokens may make one character; `text` shows such a part as U+FFFD, and control tokens as spelt.
    `id` is the token's, -1 where nobody told it.
    """

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    id: int = -1


@dataclass(frozen=True, slots=True)
class Event:
    """One step of an answer.

    A stream is: `trimmed` if whole turns had to be left out, `queued` each time the place in the queue changes until it
    begins, `progress` while the prompt is read and, if they were asked for, `prompt` with the log probabilities of its
    next tokens, any number of reasoning, text and tool_call events, then one usage and one `end`, or `error` in their
    place. What is set, besides `kind`:
    queued: `place` (1 is next); trimmed: `dropped_messages`; progress: `progress`; reasoning and text: `text`,
    `tokens`, how many the answer has so far, thinking included, and `logprobs`, if asked for; tool_call: `tool_call`;
    tool_call_part, where a grammar holds the calls: `text`, more of the arguments of `begun_call`, whose own are empty;
    the tool_call of that id comes when they are whole, and not at all where the answer is cut;
    prompt: `logprobs`; usage: `usage`; error: `error`; end: `finish_reason`, `stop`, the stop string that ended it, if
    one did, and, where those of the prompt were asked for too, `logprobs` of tokens of which no text was shown.
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
