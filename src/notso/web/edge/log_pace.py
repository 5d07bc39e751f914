"""What clients can bring about as often as they like is written down a few times, then counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST = 20
WINDOW_SECONDS = 60.0
"""Twenty lines or tracebacks of one kind a minute show what is the matter; a log without end fills the disk."""
MAX_KINDS = 256
CAUSED_BY_CLIENTS = ("asyncio", "uvicorn.error", "notso.web.connections", "notso.web.access")


class LogPace(logging.Filter):
    """Lets so many records of one kind pass within a window; the first of the next says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # kind -> when its window began, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
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


_PACE = LogPace()


def pace_logs() -> None:
    """From now on, in this process."""
    for name in CAUSED_BY_CLIENTS:
        logging.getLogger(name).addFilter(_PACE)
