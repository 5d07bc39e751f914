"""An answer, event by event."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from notso.smollm3.output.generation import Generation, events_until
from notso.smollm3.values.completion import Completion
from notso.smollm3.values.events import Event


class AnswerStream(Iterator[Event]):
    """Iterator over an answer's events, for one thread. A context manager: leaving it stops the answer.

    Raises the error of a failed answer. `result` returns the whole answer.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._events = events_until(generation, lambda: False)
        weakref.finalize(self, generation.stop)

    def __next__(self) -> Event:
        return next(self._events)

    def result(self) -> Completion:
        """Wait for the end, and return the whole answer, events that were read before included."""
        return self.generation.result()

    def close(self) -> None:
        """Stop the answer; `result` then returns what was written, as "cancelled"."""
        self._events.close()
        self.generation.stop()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<AnswerStream of {self.generation!r}>"
