"""An engine that has work but completes no step is reported as unhealthy."""

from __future__ import annotations

import pytest

from notso.cluster.plan import STUCK_SECONDS, ProgressMonitor
from notso.smollm3 import EngineError, EngineStats


def test_idle_engine_stays_healthy() -> None:
    heart = ProgressMonitor()
    for now in (0.0, 1e6, 2e6):
        heart.record_progress(EngineStats(steps_total=7), now)
    heart.record_progress(
        EngineStats(running=1, steps_total=7), 2e6 + STUCK_SECONDS
    )  # the request has only just started


def test_engine_that_takes_steps_stays_healthy() -> None:
    heart = ProgressMonitor()
    for step in range(5):
        heart.record_progress(EngineStats(running=1, waiting=3, steps_total=step), step * STUCK_SECONDS * 2)


@pytest.mark.parametrize("busy", [{"running": 1}, {"waiting": 1}])
def test_busy_engine_without_steps_is_unhealthy(busy: dict[str, int]) -> None:
    heart, stats = ProgressMonitor(), EngineStats(steps_total=3, **busy)
    heart.record_progress(stats, 10.0)
    heart.record_progress(stats, 10.0 + STUCK_SECONDS)
    with pytest.raises(EngineError, match="not completed a step for 121 s"):
        heart.record_progress(stats, 11.0 + STUCK_SECONDS)
