"""Event log of one answer, and an iterator over it."""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from uuid import uuid4

from notso.smollm3.errors import EngineError
from notso.smollm3.values.events import Completion, Event

_log = logging.getLogger(__name__)


def require_process(process: int) -> None:
    """Raise EngineError in a child that was forked from `process`."""
    # A fork does not copy threads: requests would hang, and locks held by other threads would stay locked.
    if os.getpid() != process:
        raise EngineError(
            "the engine was loaded before a fork and cannot be used in the forked process: "
            "load an engine there, or start processes with spawn"
        )


def _no_op() -> None:
    pass


class Generation:
    """Events of one answer, for any number of readers in any thread. All events are kept."""

    # changed: called by `stop` and `answer_now` to wake the engine.
    def __init__(self, changed: Callable[[], None] = _no_op) -> None:
        self.id = uuid4().hex
        # The engine writes log records in the caller's context, so that they contain the ids of the caller's request.
        self.context = contextvars.copy_context()
        self.stop_requested = False
        self.answer_requested = False
        self._engine_changed = changed
        self._process = os.getpid()
        self._events: list[Event] = []
        self._finished = False
        self._condition = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "finished" if self._finished else "running"
        return f"<Generation {self.id[:8]}: {state}, {len(self._events)} events>"

    @property
    def finished(self) -> bool:
        return self._finished

    def read(self, after: int = 0) -> list[Event]:
        return self._events[after:]

    def wait(self, after: int, timeout_s: float | None = None) -> bool:
        """Wait for the event at index `after`, or for the end; return False on timeout.

        Raises EngineError in a forked child.
        """
        require_process(self._process)
        with self._condition:
            return self._condition.wait_for(lambda: len(self._events) > after or self._finished, timeout_s)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield events from index `after` on, waiting for new ones. A failed answer ends with an `error` event."""
        while True:
            self.wait(after)
            events = self.read(after)
            yield from events
            after += len(events)
            if not events and self._finished:
                return

    def result(self) -> Completion:
        """Wait for the end and return the whole answer. Raises the error of a failed answer."""
        return Completion.from_events(self.events())

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` for existing events, for new ones, and at the end. `notify` must not block."""
        with self._condition:
            if not self._finished:
                self._listeners.append(notify)
            is_new = bool(self._events) or self._finished
        if is_new:
            notify()

    def stop(self) -> None:
        """Cancel the answer; it ends after the current step at the latest."""
        self.stop_requested = True
        if os.getpid() == self._process:
            self._engine_changed()

    def answer_now(self) -> None:
        self.answer_requested = True
        self._engine_changed()

    def write(self, events: list[Event], *, last: bool = False) -> None:
        """Append events; `last` closes the log. A closed log ignores events."""
        if not events and not last:
            return
        with self._condition:
            if self._finished:  # finished by another thread, for example by one that closes the engine
                return
            self._events += events
            self._finished = self._finished or last
            listeners = list(self._listeners)
            if last:  # references to a finished log must not keep the engine alive
                self._engine_changed, self._listeners = _no_op, []
            self._condition.notify_all()
        for notify in listeners:
            try:
                notify()
            except Exception:
                _log.exception("a subscriber's callback failed")


def events_until(generation: Generation, cancelled: Callable[[], bool]) -> Generator[Event, None, None]:
    """Yield events; stop the answer if `cancelled()` is true or the generator is closed.

    Raises the error of an `error` event.
    """
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


class AnswerStream(Iterator[Event]):
    """Iterator over an answer's events, for use in one thread. As a context manager, it stops the answer on exit.

    Raises the error of a failed answer.
    """

    # engine: kept alive until `close`, because an engine that is garbage-collected ends its answers.
    def __init__(self, generation: Generation, engine: object) -> None:
        self.generation = generation
        self._engine: object = engine
        self._events = events_until(generation, lambda: False)
        weakref.finalize(self, generation.stop)

    def __next__(self) -> Event:
        return next(self._events)

    def result(self) -> Completion:
        """Wait for the end and return the whole answer, including events already read."""
        return self.generation.result()

    def close(self) -> None:
        """Stop the answer; `result` then returns what was generated."""
        self._events.close()
        self.generation.stop()
        self._engine = None

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<AnswerStream of {self.generation!r}>"
