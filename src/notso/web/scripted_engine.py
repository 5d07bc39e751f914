"""An engine that says what it is told, at the pace it is told: for tests of pages, and for working on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date as Date

from notso.web.chat.engine_port import Event, Message, ModelInfo, SamplingParams, Usage

DEFAULT_THOUGHTS = "The user greets me. I should answer politely and say what I am."
DEFAULT_ANSWER = "Hello! I say what my **script** says."

Script = Callable[[Sequence[Message], bool], Iterable[Event]]
"""From the messages and the thinking flag to the events of the answer, without usage and end. May take its time."""


def say(answer: str, thoughts: str = "", *, piece: int = 4) -> list[Event]:
    """Events that think and then answer, `piece` characters at a time."""
    reasoning = [Event("reasoning", text=thoughts[at : at + piece]) for at in range(0, len(thoughts), piece)]
    return reasoning + [Event("text", text=answer[at : at + piece]) for at in range(0, len(answer), piece)]


def default_script(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
    """The same friendly words whatever was asked."""
    return say(DEFAULT_ANSWER, DEFAULT_THOUGHTS if thinking else "")


class ScriptedEngine:
    """A ChatEngine. `pace_seconds` passes before each event; `requests` keeps what was asked; `failure` is raised
    after the script instead of ending. While `gate` is cleared nothing is said.
    """

    def __init__(
        self,
        script: Script = default_script,
        *,
        pace_seconds: float = 0.0,
        failure: Exception | None = None,
        is_demo: bool = True,
    ) -> None:
        self.script = script
        self.pace_seconds = pace_seconds
        self.failure = failure
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[tuple[tuple[Message, ...], bool, Date | None]] = []
        self.info = ModelInfo(
            name="Scripted",
            path="",
            is_demo=is_demo,
            size_bytes=8_000_000,
            parameter_count=10_000_000,
            context_tokens=4096,
            quantisation={"Q4_K": 48, "Q6_K": 9, "F32": 17},
        )

    def generate(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        date: Date | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        """The script's events, then usage and end, unless cancelled."""
        self.requests.append((tuple(messages), thinking, date))
        started = time.perf_counter()
        counts = {"reasoning": 0, "text": 0}
        stopped = False
        for event in self.script(messages, thinking):
            if stopped := self._wait(cancelled):
                break
            counts[event.kind] = counts.get(event.kind, 0) + 1
            yield event
        if self.failure is not None and not stopped:
            raise self.failure
        yield Event(
            "usage",
            usage=Usage(
                prompt_tokens=sum(len(message.content.split()) for message in messages) + 20,
                completion_tokens=sum(counts.values()),
                reasoning_tokens=counts["reasoning"],
                completion_ms=1000 * (time.perf_counter() - started),
            ),
        )
        yield Event("end", finish_reason="cancelled" if stopped else "stop")

    def close(self) -> None:
        """Nothing to let go of."""

    def _wait(self, cancelled: Callable[[], bool] | None) -> bool:
        """Keep the pace. True when cancelled."""
        ready = time.monotonic() + self.pace_seconds
        while True:
            if cancelled is not None and cancelled():
                return True
            left = ready - time.monotonic()
            if left <= 0 and self.gate.wait(0.01):
                return False
            if left > 0:
                time.sleep(min(left, 0.02))
