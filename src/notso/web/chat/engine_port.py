"""All that the web floor asks of an engine, so that a scripted one can stand in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date as Date
from typing import Protocol

from notso.smollm3 import Event, FinishReason, Message, ModelError, ModelInfo, SamplingParams, Usage

__all__ = [
    "ChatEngine",
    "EngineSource",
    "Event",
    "FinishReason",
    "Message",
    "ModelError",
    "ModelInfo",
    "SamplingParams",
    "Usage",
]


class ChatEngine(Protocol):
    """Answers one conversation at a time. Every method is called from one thread, never from the event loop."""

    @property
    def info(self) -> ModelInfo: ...

    def generate(
        self,
        messages: Sequence[Message],
        params: SamplingParams = ...,
        *,
        thinking: bool = True,
        date: Date | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        """Events as they come. It blocks between them, polls `cancelled`, and may raise ModelError at any step."""

    def close(self) -> None: ...


EngineSource = Callable[[], ChatEngine]
"""Loads the engine; it runs in the engine's own thread, so it may take its time. May raise ModelError."""
