"""Health check and autoscaling policy of replicas, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from notso.smollm3 import EngineError, EngineStats

# Reported metric: requests that the engine runs or that wait for it.
METRIC = "requests"


class Context(Protocol):
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    target_num_replicas: int


class ByQueue:
    # Open pages do not count: they cost the engine nothing.
    def __init__(self, requests_per_replica: float) -> None:
        self._each = requests_per_replica

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get(METRIC) or {}
        if not reported:  # nothing reported yet
            return context.target_num_replicas, {}
        return max(1.0, sum(reported.values()) / self._each), {}


# A step with the largest prompt takes half a minute on a slow machine.
STILL_SECONDS = 120.0


class Heartbeat:
    """Detects an engine that has work but makes no progress."""

    def __init__(self) -> None:
        self._steps, self._moved = -1, 0.0

    def beat(self, stats: EngineStats, now: float) -> None:
        """Record progress at `now` seconds. Raises EngineError if the engine is stuck."""
        if stats.steps_total != self._steps or not stats.running + stats.waiting:
            self._steps, self._moved = stats.steps_total, now
        elif now - self._moved > STILL_SECONDS:
            raise EngineError(f"the engine has completed no step for {now - self._moved:.0f} s")
