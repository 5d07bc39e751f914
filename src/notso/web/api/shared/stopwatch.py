"""What an answer has taken so far, for who asked to be told with every piece of it."""

from __future__ import annotations

import time
from typing import Any

from notso.smollm3 import Event
from notso.web.api.shared.completion import timings_body


class Stopwatch:
    """Fed with one choice's events as they come."""

    def __init__(self) -> None:
        self._cached = self._read = 0
        self._began = self._first = 0.0

    def take(self, event: Event) -> dict[str, Any] | None:
        """`timings` as of this event, where it is a piece of the answer or tells how far the prompt is read."""
        now = time.monotonic()
        self._began = self._began or now
        if event.progress is not None:
            self._cached = event.progress.cached_tokens
            self._read = event.progress.done_tokens - self._cached
            return timings_body(self._cached, self._read, 1000 * (now - self._began), 0, 0.0)
        if event.kind not in ("reasoning", "text"):
            return None
        self._first = self._first or now
        reading, writing = 1000 * (self._first - self._began), 1000 * (now - self._first)
        return timings_body(self._cached, self._read, reading, event.tokens, writing)
