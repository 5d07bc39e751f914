"""What crosses the border between the model's floor and those above: frozen values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from notso.smollm3.errors import NotsoError

Role = Literal["system", "user", "assistant", "tool"]
EventKind = Literal["queued", "progress", "trimmed", "reasoning", "text", "tool_call", "usage", "error", "end"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Priority = Literal["interactive", "api", "background"]
WhenFull = Literal["stop", "drop_oldest"]

ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is JSON text (an object), exactly as the API shows it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Its text is content, never markup: a control token's spelling stays plain text.

    An earlier turn's `reasoning_content` is left out of the prompt unless `keep_reasoning` asks for it.
    """

    role: Role
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    keep_reasoning: bool = False


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

    `bytes` of several tokens may make one character; `text` shows such a part as U+FFFD, and control tokens as spelt.
    """

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One step of an answer.

    A stream is: `trimmed` if whole turns had to be left out, `queued` each time the place in the queue changes until it
    begins, `progress` while the prompt is read, any number of reasoning, text and tool_call events, then one usage and
    one `end`, or `error` in their place. What is set, besides `kind`:
    queued: `place` (1 is next); trimmed: `dropped_messages`; progress: `progress`; reasoning and text: `text`,
    `tokens`, how many the answer has so far, thinking included, and `logprobs`, if asked for; tool_call: `tool_call`;
    usage: `usage`; error: `error`; end: `finish_reason`, and `stop`, the stop string that ended it, if one did.
    """

    kind: EventKind
    text: str = ""
    tool_call: ToolCall | None = None
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    place: int = 0
    dropped_messages: int = 0
    progress: Progress | None = None
    tokens: int = 0
    error: NotsoError | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None


Tool = Mapping[str, Any]
"""A tool as the OpenAI API writes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What the model was planned to occupy, and what there was to plan with. `source` names what bounds it. Bytes."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    process_bytes: int
    available_bytes: int
    source: str

    @property
    def needed_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes + self.process_bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a page or a person may know of the loaded model. Sizes in bytes and tokens."""

    name: str
    path: str
    is_demo: bool
    size_bytes: int
    parameter_count: int
    context_tokens: int
    quantisation: Mapping[str, int] = field(default_factory=dict)  # format name -> number of tensors
    kernels: str = "generic"
    threads: int = 1
    kv_format: str = "f16"
    kv_bytes: int = 0  # reserved for keys and values
    max_num_seqs: int = 1  # answers that can be written at the same time
    num_hidden_layers: int = 0
    layers_without_rope: tuple[int, ...] = ()  # NoPE
    memory: MemoryBudget | None = None


@dataclass(frozen=True, slots=True)
class PromptEstimate:
    """What reading a prompt would cost now: its length, how much of it is cached, and the likely time for the rest."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float | None  # None before anything was measured


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at this moment, and totals since it was loaded. Rates are those of the last seconds of work."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0  # by running answers; what only the prefix cache holds counts as free
    kv_blocks_cached: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    preemptions_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    weights_residency: str = "mmap"
