"""What clients can bring about as often as they like is logged a few times, then counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST = 20
WINDOW_SECONDS = 60.0
"""Twenty lines or tracebacks of one kind a minute show what is the matter; a log without end fills the disk."""
MAX_KINDS = 256
CAUSED_BY_CLIENTS = ("asyncio", "uvicorn", "notso")
"""Loggers, with those below them: nearly everything that is logged while a server runs follows from a request."""


class LogPace(logging.Filter):
    """Lets so many records of one kind pass within a window; the first of the next says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # kind -> when its window began, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if record.name.split(".", 1)[0] not in CAUSED_BY_CLIENTS:
            return True
        now, kind = self._clock(), (record.name, str(record.msg))
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= WINDOW_SECONDS:
            if count > MOST:
                record.msg = f"{record.msg} (and {count - MOST} more like it)"
            began, count = now, 0
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = began, count + 1
        return count < MOST


def pace_logs() -> None:
    """Pace what these loggers, and those below them, write in this process. A filter of a logger does not see the
    records of those below it, so the handlers have it."""
    for name in ("", *CAUSED_BY_CLIENTS):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(each, LogPace) for each in handler.filters):
                handler.addFilter(LogPace())
