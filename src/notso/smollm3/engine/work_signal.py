"""Wake-up signal of the engine's thread."""

from __future__ import annotations

import threading


class WorkSignal:
    """Wake-up signal. `wake` is thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._woken = False

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
