"""Limit the CPU time for rendering a message, and the length of its HTML."""

# Deadlines are checked before every parsing step, so that no input exceeds its budget by much. They use CPU time
# because wall-clock time would include periods when the thread does not run.

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE_SECONDS = 1.0  # 256 KiB of typical Markdown take 0.1 to 0.5 s
TICK_SECONDS = 0.05  # for each update of a message that is being streamed (see streaming.py)
MAX_HTML_CHARACTERS = 2 * 1024 * 1024  # HTML is about twice as long as text, and five times as long as code


class OverBudgetError(Exception):
    """Rendering exceeded its budget. The text is shown as plain text."""


class Deadline:
    """A deadline in CPU time of the thread that creates it."""

    def __init__(self, seconds: float) -> None:
        self._at = time.thread_time() + seconds
        self.charged = 0.0

    @property
    def has_passed(self) -> bool:
        return time.thread_time() > self._at

    def charge(self, seconds: float) -> None:
        self._at -= seconds
        self.charged += seconds

    def check(self) -> None:
        if time.thread_time() > self._at:
            raise OverBudgetError


class Budget:
    """Remaining budget of a message. `is_noted`: whether the note about unformatted text has been added."""

    def __init__(self, seconds: float = MESSAGE_SECONDS, characters: int = MAX_HTML_CHARACTERS) -> None:
        self.is_noted = False
        self._seconds = seconds
        self._characters = characters

    @property
    def is_spent(self) -> bool:
        return self._seconds <= 0 or self._characters < 0

    @contextmanager
    def spending(self) -> Iterator[Deadline]:
        """Charge the CPU time of a `with` statement. Raises OverBudgetError if the budget is already spent."""
        if self.is_spent:
            raise OverBudgetError
        began, deadline = time.thread_time(), Deadline(self._seconds)
        try:
            yield deadline
        finally:
            self._seconds -= time.thread_time() - began + deadline.charged

    def charge_html(self, html: str) -> str:
        """Charge the length of `html` and return `html`. Raises OverBudgetError."""
        self._characters -= len(html)
        if self._characters < 0:
            raise OverBudgetError
        return html
