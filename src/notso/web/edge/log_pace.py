"""Log throttling: repeated records are counted instead of written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST = 20
WINDOW_SECONDS = 60.0
"""Twenty records of a kind per minute suffice for diagnosis; unbounded logs fill the disk."""
MAX_KINDS = 256
CAUSED_BY_CLIENTS = ("asyncio", "uvicorn", "notso")
"""Loggers, with their children, that log in response to client requests."""


class LogPace(logging.Filter):
    """Passes MOST records of a kind per window; the next window's first record has the number omitted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # kind -> window start, count
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # kind -> when its window began, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".", 1)[0] not in CAUSED_BY_CLIENTS:
            return True
        now, kind = self._clock(), (record.name, str(record.msg))
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= WINDOW_SECONDS:
            if count > MOST:
                record.msg = f"{record.msg} (and {count - MOST} more of this kind)"
            began, count = now, 0
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = began, count + 1
        return count < MOST


def pace_logs() -> None:
    """Throttle these loggers and their children."""
    # A logger's filter does not apply to records of its children, so the handlers get it.
    for name in ("", *CAUSED_BY_CLIENTS):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(each, LogPace) for each in handler.filters):
                handler.addFilter(LogPace())
