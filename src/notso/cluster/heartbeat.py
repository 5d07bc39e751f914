"""Whether an engine still works: while it has something to do, it takes steps."""

from __future__ import annotations

from notso.smollm3 import EngineError, EngineStats

STILL_SECONDS = 120.0
"""A step of the largest prompt on a slow machine takes half a minute."""


class Heartbeat:
    """Remembers when an engine was last seen to do something, or to have nothing to do."""

    def __init__(self) -> None:
        self._steps, self._moved = -1, 0.0

    def beat(self, stats: EngineStats, now: float) -> None:
        """Look at it, at `now` seconds. Raises EngineError where it stands still."""
        if stats.steps_total != self._steps or not stats.running + stats.waiting:
            self._steps, self._moved = stats.steps_total, now
        elif now - self._moved > STILL_SECONDS:
            raise EngineError(f"the engine has taken no step for {now - self._moved:.0f} s")
