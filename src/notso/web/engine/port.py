"""All that the web floor asks of an engine, so that a scripted one can stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from notso.smollm3 import (
    AdapterInfo,
    AdapterSource,
    ContextLengthError,
    EngineError,
    EngineStats,
    Event,
    FinishReason,
    Grammar,
    InvalidRequestError,
    Message,
    ModelError,
    ModelInfo,
    Priority,
    Progress,
    PromptEstimate,
    PromptInput,
    RequestOptions,
    SamplingParams,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
    Usage,
    WhenFull,
    dropped_parts,
    thinking_set_by,
)

__all__ = [
    "AdapterInfo",
    "AdapterSource",
    "Adapters",
    "ChatEngine",
    "ContextLengthError",
    "EngineError",
    "EngineSource",
    "EngineStats",
    "Event",
    "FinishReason",
    "Generation",
    "Grammar",
    "InvalidRequestError",
    "Message",
    "ModelError",
    "ModelInfo",
    "Priority",
    "Progress",
    "PromptEstimate",
    "PromptInput",
    "Request",
    "RequestOptions",
    "ReturningSource",
    "SamplingParams",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolName",
    "Usage",
    "WhenFull",
    "dropped_parts",
    "thinking_set_by",
]


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked: a conversation, how to choose tokens, the options, and which model: the key of a
    ServedModel, None for the default one."""

    messages: tuple[Message, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    model: str | None = None


class Generation(Protocol):
    """One answer as a replayable log of events. Everything may be called from any thread."""

    @property
    def finished(self) -> bool:
        """Whether the last event is there."""

    def read(self, after: int = 0) -> list[Event]:
        """The events number `after` and later that exist now; never blocks."""

    def events(self, after: int = 0) -> Iterator[Event]:
        """All of them, blocking between events; ends after the last."""

    def subscribe(self, notify: Callable[[], None]) -> None:
        """`notify` is called from the engine's thread whenever something is new, and must not block."""

    def stop(self) -> None:
        """End with finish reason 'cancelled' within a step, wherever it is."""

    def answer_now(self) -> None:
        """Close the thought for the model, so that the answer begins."""


class Adapters(Protocol):
    """Adapters by name, loaded and removed while the engine answers."""

    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        """Those that there are now; never blocks."""

    def add(self, source: AdapterSource) -> AdapterInfo:
        """Read one. Raises NotsoError: the name is taken, the file cannot be used."""

    def remove(self, name: str) -> None:
        """No request may name it any more. Raises InvalidRequestError where none is called that."""


class ChatEngine(Protocol):
    """Answers many questions at a time, by a thread of its own. Methods take their time: never on the event loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def adapters(self) -> Adapters: ...

    def submit(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Generation:
        """Queue a question. May raise ModelError: it does not fit, or the engine is full or closed."""

    def prepare(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Callable[[], Generation]:
        """`submit` without its last step, which is what comes back: the prompt is written, and it fits."""

    def speculative_prefill(
        self, messages: Sequence[Message], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> None:
        """A person still types what is about to be submitted: when idle, read what is certain of it. Refuses what
        `submit` refuses."""

    def render(self, messages: Sequence[Message], options: RequestOptions | None = None) -> str:
        """The prompt as text."""

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; with `special` control tokens are known by their spelling."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""

    def count_tokens(self, messages: Sequence[Message], options: RequestOptions | None = None) -> int:
        """Length of the whole rendered prompt."""

    def estimate(self, messages: Sequence[Message], options: RequestOptions | None = None) -> PromptEstimate:
        """What reading that prompt would cost now."""

    def stats(self) -> EngineStats: ...

    def clear_cache(self, owner: str | None = None, conversation: str | None = None) -> None:
        """Remove what is cached of a conversation and no other, in memory and on disk; without arguments: of all."""

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call it, from a thread of the engine's, when it can answer no more because its GPU failed. What was being
        answered has ended with an error by then; loading it anew helps."""

    def close(self) -> None: ...


EngineSource = Callable[[], ChatEngine]
"""Loads the engine, in a thread of its own, so it may take its time. May raise ModelError."""


@runtime_checkable
class ReturningSource(Protocol):
    """An EngineSource of an engine that may be away for a while."""

    def __call__(self) -> ChatEngine: ...

    def when_back(self, callback: Callable[[], None]) -> None:
        """Call it, once, from any thread, when loading that failed is worth trying again."""
