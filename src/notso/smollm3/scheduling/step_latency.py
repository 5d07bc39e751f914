"""What a step of more rows costs beside one of fewer: the price of draft tokens.

A step reads every weight once whatever its rows, so the first few ride along; how many depends on kernels and machine.
The planning figures stand in until steps have been timed, and hold a single strange timing in check afterwards.
"""

from __future__ import annotations

from itertools import pairwise

from notso.smollm3.scheduling.step_plan import MAX_SAMPLED

PLANNED = {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.8}
"""Cost of a step of so many rows, in steps of one row; linear between, and beyond as from 8 to 16."""

PLANNED_WEIGHT = 3.0  # timings that the planning figure counts for
LONGEST_MEMORY = 30.0  # timings after which older ones fade
OUTLIER = 2.0  # a timing counts as at most this much more than was expected


class StepLatency:
    """Seconds by rows, learned from the steps of one engine. Not thread-safe: the engine's thread owns it."""

    def __init__(self) -> None:
        self._weight = [0.0] * (MAX_SAMPLED + 1)
        self._seconds = [0.0] * (MAX_SAMPLED + 1)
        self._unit = 0.0  # seconds of a step of one row, by all that was seen
        self._units = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long. Steps that read a prompt do not belong here."""
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
        """What a step of so many rows, up to 64, takes; 0 before any was timed."""
        expected, weight = self._unit * planned(rows), self._weight[rows]
        return (PLANNED_WEIGHT * expected + weight * self._seconds[rows]) / (PLANNED_WEIGHT + weight)

    def ratio(self, rows: int, more: int) -> float:
        """A step of `rows` + `more` rows, in steps of `rows`. Where every row costs its share (beyond 64), that."""
        if rows + more > MAX_SAMPLED:
            return (rows + more) / rows
        if not self._units:
            return planned(rows + more) / planned(rows)
        return self.seconds(rows + more) / self.seconds(rows)


def planned(rows: int) -> float:
    """Cost of a step of so many rows, up to 64, before anything was timed, in steps of one row."""
    return _PLANNED_ROWS[rows]


def _interpolated(rows: int) -> float:
    known = list(PLANNED.items())
    enclosing = (pair for pair in pairwise(known) if rows <= pair[1][0])
    (low, at_low), (high, at_high) = next(enclosing, (known[-2], known[-1]))
    return at_low + (at_high - at_low) * (rows - low) / (high - low)


_PLANNED_ROWS = [_interpolated(rows) for rows in range(MAX_SAMPLED + 1)]
