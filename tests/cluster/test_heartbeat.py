"""An engine that has work but completes no step is reported as unhealthy."""

from __future__ import annotations

import pytest

from notso.cluster.plan import STILL_SECONDS, Heartbeat
from notso.smollm3 import EngineError, EngineStats


def test_an_idle_engine_is_well_for_ever() -> None:
    heart = Heartbeat()
    for now in (0.0, 1e6, 2e6):
        heart.beat(EngineStats(steps_total=7), now)
    heart.beat(EngineStats(running=1, steps_total=7), 2e6 + STILL_SECONDS)  # the request has only just started


def test_one_that_takes_steps_is_well() -> None:
    heart = Heartbeat()
    for step in range(5):
        heart.beat(EngineStats(running=1, waiting=3, steps_total=step), step * STILL_SECONDS * 2)


@pytest.mark.parametrize("busy", [{"running": 1}, {"waiting": 1}])
def test_one_that_stands_still_is_not(busy: dict[str, int]) -> None:
    heart, stats = Heartbeat(), EngineStats(steps_total=3, **busy)
    heart.beat(stats, 10.0)
    heart.beat(stats, 10.0 + STILL_SECONDS)
    with pytest.raises(EngineError, match="not completed a step for 121 s"):
        heart.beat(stats, 11.0 + STILL_SECONDS)
