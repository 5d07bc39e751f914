"""All that the web floor asks of an engine, so that a scripted one can stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from typing import Protocol

from notso.smollm3 import (
    EngineStats,
    Event,
    FinishReason,
    InvalidRequestError,
    Message,
    ModelError,
    ModelInfo,
    Priority,
    Progress,
    PromptEstimate,
    SamplingParams,
    Tool,
    Usage,
    WhenFull,
)

__all__ = [
    "ChatEngine",
    "EngineSource",
    "EngineStats",
    "Event",
    "FinishReason",
    "Generation",
    "InvalidRequestError",
    "Message",
    "ModelError",
    "ModelInfo",
    "Priority",
    "Progress",
    "PromptEstimate",
    "Request",
    "SamplingParams",
    "Tool",
    "Usage",
    "WhenFull",
]


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked. `owner` keeps one person's cached prompts from another's.

    `continue_last`: the last message is an unfinished answer, and only what is new comes as events.
    """

    messages: tuple[Message, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool = True
    date: Date | None = None
    priority: Priority = "interactive"
    owner: str = ""
    continue_last: bool = False
    when_full: WhenFull = "stop"


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


class ChatEngine(Protocol):
    """Answers many questions at a time, by a thread of its own. Methods take their time: never on the event loop."""

    @property
    def info(self) -> ModelInfo: ...

    def submit(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Tool] | None = None,
        date: Date | None = None,
        priority: Priority = "interactive",
        owner: str = "",
        continue_last: bool = False,
        when_full: WhenFull = "stop",
    ) -> Generation:
        """Queue a question. May raise ModelError: it does not fit, or the engine is full or closed."""

    def count_tokens(self, messages: Sequence[Message], thinking: bool = True, *, date: Date | None = None) -> int:
        """Length of the whole rendered prompt."""

    def estimate(
        self, messages: Sequence[Message], *, thinking: bool = True, date: Date | None = None, owner: str = ""
    ) -> PromptEstimate:
        """What reading that prompt would cost now."""

    def stats(self) -> EngineStats: ...

    def forget(self) -> None:
        """Remove what is cached of any conversation, in memory and on disk."""

    def close(self) -> None: ...


EngineSource = Callable[[], ChatEngine]
"""Loads the engine, in a thread of its own, so it may take its time. May raise ModelError."""
