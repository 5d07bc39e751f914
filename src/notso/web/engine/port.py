"""Interface through which the web layer uses an engine. The real engine, the remote engine and the tests' scripted
engine implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from notso.smollm3 import (
    AdapterInfo,
    AdapterSource,
    EngineStats,
    Event,
    Message,
    ModelInfo,
    PromptEstimate,
    PromptInput,
    RequestOptions,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class Request:
    messages: tuple[Message, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    options: RequestOptions = field(default_factory=RequestOptions)
    model: str | None = None  # key of a ServedModel, or None for the default model


class Generation(Protocol):
    """Events of one answer, kept for later readers. Thread-safe."""

    @property
    def finished(self) -> bool: ...

    def read(self, after: int = 0) -> list[Event]:
        """Return the available events from index `after` on. Never blocks."""

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield all events from index `after` on. Blocks until each event is available."""

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` on every change, and at once if events are already available. `notify` must not block."""

    def stop(self) -> None:
        """End the answer within one engine step, with finish reason 'cancelled'."""

    def answer_now(self) -> None:
        """End the reasoning, so that the model writes the answer now."""


class Adapters(Protocol):
    @property
    def infos(self) -> Mapping[str, AdapterInfo]: ...

    def add(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter. Raises NotsoError if the name is taken or the file is unusable."""

    def remove(self, name: str) -> None:
        """Unload an adapter. Raises InvalidRequestError if unknown."""


class ChatEngine(Protocol):
    """Generates answers in its own thread. Most methods block: on the event loop, call only `stats` and `when_lost`."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def adapters(self) -> Adapters: ...

    def submit(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Generation:
        """Queue a request. Raises ModelError."""

    def prepare(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Callable[[], Generation]:
        """Render and check the prompt; return a function that submits it."""

    def speculative_prefill(
        self, messages: Sequence[Message], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> None:
        """Prefill a prompt before it is sent, while the engine is idle. Raises the same errors as `submit`."""

    def render(self, messages: Sequence[Message], options: RequestOptions | None = None) -> str: ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return token ids. `special`: whether to parse control tokens."""

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]: ...

    def encode_chat(self, messages: Sequence[Message], options: RequestOptions | None = None) -> list[int]: ...

    def count_tokens(self, messages: Sequence[Message], options: RequestOptions | None = None) -> int: ...

    def estimate(self, messages: Sequence[Message], options: RequestOptions | None = None) -> PromptEstimate: ...

    def receipt(
        self,
        messages: PromptInput,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        sealed: bool = False,
    ) -> Mapping[str, Any]:
        """Return a receipt for verifying an answer. Raises the same errors as `submit`.

        `params` must contain the answer's seed, and `options.replay` the answer's tokens.
        """

    def stats(self) -> EngineStats: ...

    def clear_cache(self, owner: str | None = None, conversation: str | None = None) -> None:
        """Delete a conversation's cache, in memory and on disk; without arguments, the whole cache."""

    def forget_reading(self, name: str, *, scope: str | None = None) -> None:
        """Delete the cache of a pinned prompt prefix, in memory and on disk."""

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when the GPU or connection has failed and the engine must be reloaded."""

    def close(self) -> None: ...


EngineSource = Callable[[], ChatEngine]
"""Function that loads an engine. Raises NotsoError. It blocks, so it is called in a separate thread."""


@runtime_checkable
class ReturningSource(Protocol):
    """EngineSource of an engine that may be temporarily unavailable."""

    def __call__(self) -> ChatEngine: ...

    def when_back(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, from any thread, when a retry may succeed."""
