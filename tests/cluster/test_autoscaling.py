"""The number of replicas follows the load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from notso.cluster.plan import METRIC, ByQueue


@dataclass
class Context:
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)
    target_num_replicas: int = 3


@pytest.mark.parametrize(
    ("requests", "replicas"), [((0.0, 0.0), 1), ((16.0, 16.0), 2), ((16.0, 17.0), 3), ((40.0, 0.0, 1.0), 3)]
)
def test_replica_count_follows_request_count(requests: tuple[float, ...], replicas: int) -> None:
    context = Context({METRIC: {f"replica {number}": each for number, each in enumerate(requests)}})
    wanted, state = ByQueue(16)(context)
    assert math.ceil(wanted) == replicas and state == {}


def test_missing_metrics_keep_the_replica_count() -> None:
    assert ByQueue(16)(Context())[0] == ByQueue(16)(Context(None))[0] == 3
