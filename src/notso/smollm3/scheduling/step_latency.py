"""Step latency by number of rows, which prices draft tokens.

A step reads every weight once, so the first additional rows are nearly free; how many depends on kernels and machine.
Planning figures apply until steps are measured, and dampen outliers afterwards.
"""

from __future__ import annotations

from itertools import pairwise

from notso.smollm3.scheduling.step_plan import MAX_SAMPLED

# Relative cost by rows; linear in between, and beyond 16 as from 8 to 16.
PLANNED = {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.8}

PLANNED_WEIGHT = 3.0  # weight of the planning figure, in timings
LONGEST_MEMORY = 30.0  # timings before older ones fade
OUTLIER = 2.0  # cap on a timing relative to the expected one


class StepLatency:
    """Learned seconds by rows. Not thread-safe."""

    def __init__(self) -> None:
        self._weight = [0.0] * (MAX_SAMPLED + 1)
        self._seconds = [0.0] * (MAX_SAMPLED + 1)
        self._unit = 0.0  # average seconds of a one-row step
        self._units = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Record a step without prefill."""
        if not 1 <= rows <= MAX_SAMPLED or seconds <= 0.0:
            return
        if self._units:
            seconds = min(seconds, OUTLIER * self.seconds(rows))
        weight, units = self._weight[rows], self._units
        self._seconds[rows] += (seconds - self._seconds[rows]) / (weight + 1)
        self._weight[rows] = min(weight + 1, LONGEST_MEMORY)
        self._unit += (seconds / planned(rows) - self._unit) / (units + 1)
        self._units = min(units + 1, LONGEST_MEMORY)

    def seconds(self, rows: int) -> float:
        """Expected seconds of up to 64 rows, or 0."""
        expected, weight = self._unit * planned(rows), self._weight[rows]
        return (PLANNED_WEIGHT * expected + weight * self._seconds[rows]) / (PLANNED_WEIGHT + weight)

    def ratio(self, rows: int, more: int) -> float:
        """Relative cost of `more` rows."""
        # Beyond 64 rows, cost is proportional.
        if rows + more > MAX_SAMPLED:
            return (rows + more) / rows
        if not self._units:
            return planned(rows + more) / planned(rows)
        return self.seconds(rows + more) / self.seconds(rows)


def planned(rows: int) -> float:
    """Return the planned relative cost of up to 64 rows."""
    return _PLANNED_ROWS[rows]


def _interpolated(rows: int) -> float:
    known = list(PLANNED.items())
    enclosing = (pair for pair in pairwise(known) if rows <= pair[1][0])
    (low, at_low), (high, at_high) = next(enclosing, (known[-2], known[-1]))
    return at_low + (at_high - at_low) * (rows - low) / (high - low)


_PLANNED_ROWS = [_interpolated(rows) for rows in range(MAX_SAMPLED + 1)]
