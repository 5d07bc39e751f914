"""How many replicas there should be, by what their engines have to do. Serve bounds it, and waits before it acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

METRIC = "requests"
"""What a replica reports: requests that its engine runs or that wait for it."""


class Context(Protocol):
    """What this needs of Serve's AutoscalingContext."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    target_num_replicas: int


class ByQueue:
    """As many replicas as have that many requests each. An open page is none: it costs the engine nothing."""

    def __init__(self, requests_per_replica: float) -> None:
        self._each = requests_per_replica

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get(METRIC) or {}
        if not reported:  # nobody has said anything yet
            return context.target_num_replicas, {}
        return max(1.0, sum(reported.values()) / self._each), {}
