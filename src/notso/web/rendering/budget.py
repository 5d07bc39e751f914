"""Rendering budget of one message: CPU seconds of its thread, and characters of HTML.

Deadlines are checked at every position of a text and every block, so that no input runs far past its budget. CPU time
is used because a pause of the system says nothing about the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE_SECONDS = 1.0  # 256 KiB of ordinary Markdown take 0.1 to 0.5 s
TICK_SECONDS = 0.05
MAX_HTML_CHARACTERS = 2 * 1024 * 1024  # ordinary text doubles in size, highlighted code grows fivefold


class OverBudgetError(Exception):
    """Rendering exceeds its budget; the text is shown plain."""


class Deadline:
    """A point in CPU time of the creating thread."""

    def __init__(self, seconds: float) -> None:
        self._at = time.thread_time() + seconds
        self.charged = 0.0

    @property
    def passed(self) -> bool:
        return time.thread_time() > self._at

    def charge(self, seconds: float) -> None:
        self._at -= seconds
        self.charged += seconds

    def check(self) -> None:
        """Raise OverBudgetError if passed."""
        if time.thread_time() > self._at:
            raise OverBudgetError


class Budget:
    """Remaining budget of a message. `is_noted`: a note already explains the plain text."""

    def __init__(self, seconds: float = MESSAGE_SECONDS, characters: int = MAX_HTML_CHARACTERS) -> None:
        self.is_noted = False
        self._seconds = seconds
        self._characters = characters

    @property
    def spent(self) -> bool:
        return self._seconds <= 0 or self._characters < 0

    @contextmanager
    def spending(self) -> Iterator[Deadline]:
        """Charge the block's time. Raises OverBudgetError if nothing is left."""
        if self.spent:
            raise OverBudgetError
        began, deadline = time.thread_time(), Deadline(self._seconds)
        try:
            yield deadline
        finally:
            self._seconds -= time.thread_time() - began + deadline.charged

    def take(self, html: str) -> str:
        """Charge the HTML's length. Raises OverBudgetError."""
        self._characters -= len(html)
        if self._characters < 0:
            raise OverBudgetError
        return html
