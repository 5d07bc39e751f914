"""An answer while it is written: a log of events that any number of readers may follow, and two ways to steer it."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from uuid import uuid4

from notso.smollm3.values.events import Event

_log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class Generation:
    """The events of one answer. Readers come and go as they like, from any thread; the log keeps everything.

    `changed` is called when somebody stops it or wants the answer now, so that the engine looks.
    """

    def __init__(self, changed: Callable[[], None] = _nothing) -> None:
        self.id = uuid4().hex
        self.context = contextvars.copy_context()  # of the caller, so that the engine's log records carry its ids
        self.stop_requested = False
        self.answer_requested = False
        self._engine_changed = changed
        self._events: list[Event] = []
        self._finished = False
        self._condition = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    # Readers

    @property
    def finished(self) -> bool:
        """Whether the last event is there."""
        return self._finished

    def read(self, after: int = 0) -> list[Event]:
        """The events from number `after` (the first is 0) that are there now."""
        return self._events[after:]

    def wait(self, after: int, timeout_s: float | None = None) -> bool:
        """Block until there are more than `after` events, or all. False if the time was over before."""
        with self._condition:
            return self._condition.wait_for(lambda: len(self._events) > after or self._finished, timeout_s)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Events from number `after` on, as they come, to the last. Blocks between them."""
        while True:
            self.wait(after)
            events = self.read(after)
            yield from events
            after += len(events)
            if not events and self._finished:
                return

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Have `notify` called whenever something is new, at once if something is there. It runs in the thread that
        writes the answer and must not block."""
        with self._condition:
            self._listeners.append(notify)
            is_new = bool(self._events)
        if is_new:
            notify()

    # Steering

    def stop(self) -> None:
        """End it within a step, wherever it is: waiting, reading, answering. The reason is "cancelled"."""
        self.stop_requested = True
        self._engine_changed()

    def answer_now(self) -> None:
        """Close the thought it is in, if it is in one; the answer begins."""
        self.answer_requested = True
        self._engine_changed()

    # The writer

    def write(self, events: list[Event], *, last: bool = False) -> None:
        """Append events; with `last` there will be no more. For the engine."""
        if not events and not last:
            return
        with self._condition:
            self._events += events
            self._finished = self._finished or last
            listeners = list(self._listeners)
            if last:  # who keeps the log does not keep the engine
                self._engine_changed, self._listeners = _nothing, []
            self._condition.notify_all()
        for notify in listeners:
            try:
                notify()
            except Exception:
                _log.exception("a reader's notification failed")


def events_until(generation: Generation, cancelled: Callable[[], bool]) -> Iterator[Event]:
    """The events of a generation; `cancelled()` turning true, or closing the iterator, stops it. An `error` event is
    raised."""
    after = 0
    try:
        while True:
            ready = generation.wait(after, timeout_s=0.02)
            if cancelled():
                generation.stop()
            if not ready:
                continue
            events = generation.read(after)
            after += len(events)
            for event in events:
                if event.error is not None:
                    raise event.error
                yield event
            if generation.finished and not generation.read(after):
                return
    finally:
        generation.stop()
