"""Two-step Ctrl-C: the first stops the answer, the second exits."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interruption:
    """Context manager: the first SIGINT sets `requested`, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: object = None
        # Signals can only be caught in the main thread.
        self._catches = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interruption:
        if self._catches:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._catches:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def requested(self) -> bool:
        return self._requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
