"""What the HTML of one message may cost: seconds of its thread's own time, and characters.

Time is looked at where markup is read, at each position of a text and each block, so that nothing runs far past the
end of its budget, whatever is written. It is the CPU time of the thread: a pause that others caused says nothing of
the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE_SECONDS = 1.0  # 256 KiB of honest Markdown take 0.1 to 0.5 s
TICK_SECONDS = 0.05
MAX_HTML_CHARACTERS = 2 * 1024 * 1024  # honest text grows to the double, and code with colours to the fivefold


class OverBudgetError(Exception):
    """It would cost more than it may; the text is shown plain instead."""


class Deadline:
    """A moment in the time of the thread that made it."""

    def __init__(self, seconds: float) -> None:
        self._at = time.thread_time() + seconds
        self.charged = 0.0

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return time.thread_time() > self._at

    def charge(self, seconds: float) -> None:
        """Time that another process spent for it counts as the thread's."""
        self._at -= seconds
        self.charged += seconds

    def check(self) -> None:
        """Raises OverBudgetError when the time is over."""
        if time.thread_time() > self._at:
            raise OverBudgetError


class Budget:
    """What is left for one message. `is_noted`: its reader knows already that a part of it is shown plain."""

    def __init__(self, seconds: float = MESSAGE_SECONDS, characters: int = MAX_HTML_CHARACTERS) -> None:
        self.is_noted = False
        self._seconds = seconds
        self._characters = characters

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self._seconds <= 0 or self._characters < 0

    @contextmanager
    def spending(self) -> Iterator[Deadline]:
        """Work that is paid for. Raises OverBudgetError when nothing is left, or by the deadline's check."""
        if self.spent:
            raise OverBudgetError
        began, deadline = time.thread_time(), Deadline(self._seconds)
        try:
            yield deadline
        finally:
            self._seconds -= time.thread_time() - began + deadline.charged

    def take(self, html: str) -> str:
        """The same HTML, paid for by its length. Raises OverBudgetError."""
        self._characters -= len(html)
        if self._characters < 0:
            raise OverBudgetError
        return html
