"""What wakes the engine's thread, and tells others for how long it has had nothing to answer."""

from __future__ import annotations

import threading
import time


class WorkSignal:
    """Made before everything that uses it: it knows none of them. Any thread may call `wake` and read `idle_s`; the
    rest is the engine's thread's."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._woken = False
        self._is_busy = False
        self._idle_since = time.monotonic()

    def wake(self) -> None:
        """There may be something to do: the next `wait` returns at once, or the one under way."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def wait(self, timeout_s: float) -> None:
        """Until `wake` is called, or was since the last wait, or the time is over."""
        with self._condition:
            if not self._woken and timeout_s > 0:
                self._condition.wait(timeout_s)
            self._woken = False

    def busy(self) -> None:
        """From now on there are requests."""
        self._is_busy = True

    def idle(self) -> None:
        """From now on there are none."""
        self._idle_since = time.monotonic()
        self._is_busy = False

    @property
    def idle_s(self) -> float:
        """For how many seconds there have been no requests."""
        return 0.0 if self._is_busy else time.monotonic() - self._idle_since
