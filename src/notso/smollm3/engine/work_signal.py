"""Wake-up signal of the engine's thread, and its idle time."""

from __future__ import annotations

import threading
import time


class WorkSignal:
    """Wake-up signal and idle time. `wake` and `idle_s` are thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._woken = False
        self._is_busy = False
        self._idle_since = time.monotonic()

    def wake(self) -> None:
        """End the current or next `wait`."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def wait(self, timeout_s: float) -> None:
        with self._condition:
            if not self._woken and timeout_s > 0:
                self._condition.wait(timeout_s)
            self._woken = False

    def busy(self) -> None:
        self._is_busy = True

    def idle(self) -> None:
        self._idle_since = time.monotonic()
        self._is_busy = False

    @property
    def idle_s(self) -> float:
        return 0.0 if self._is_busy else time.monotonic() - self._idle_since
