"""Prefill budget of steps that also decode, bounded by the time between two tokens.

Beyond 32 rows kernels work in tiles of 16, and one additional row costs nearly a whole tile. The budget is therefore
counted in tiles, decode rows included, and predicted from recent timings, which reflect the machine, the prompt's depth
and other load.
"""

from __future__ import annotations

TILE_ROWS = 16
LEAST_TOKENS = 9  # fewer would count as decoding (scheduler.FEW_ROWS)

# Steps after which a timing is stale.
REMEMBERED_STEPS = 64

OUTLIER = 2.0  # cap on a timing relative to the previous one


class PrefillBudget:
    """Prefill budget of one engine."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._seconds: dict[int, float] = {}  # by tiles: an exponential average with factor 1/2
        self._timed: dict[int, int] = {}  # step number of the last timing
        self._steps = 0

    def tokens(self, decoding: int, most: int, decode_s: float, token_s: float) -> int:
        """Choose the next step's prompt tokens, up to `most`."""
        # decode_s: duration of a decode-only step; token_s: time per token of pure prefill; 0 if not yet measured.
        tiles = -(-(decoding + LEAST_TOKENS) // TILE_ROWS)
        while tiles * TILE_ROWS - decoding < most and self._expected(tiles + 1, decode_s, token_s) <= self._step_s:
            tiles += 1
        return max(1, min(most, tiles * TILE_ROWS - decoding))

    def observe(self, rows: int, seconds: float) -> None:
        """Record a mixed step."""
        tiles = -(-rows // TILE_ROWS)
        self._steps += 1
        before = self._seconds.get(tiles)
        if before is not None:
            seconds = 0.5 * before + 0.5 * min(seconds, OUTLIER * before)
        self._seconds[tiles], self._timed[tiles] = seconds, self._steps
        for old in [old for old, at in self._timed.items() if self._steps - at > REMEMBERED_STEPS]:
            del self._seconds[old], self._timed[old]

    def _expected(self, tiles: int, decode_s: float, token_s: float) -> float:
        known = max((other for other in self._seconds if other <= tiles), default=0)
        if known:  # each additional tile is assumed to cost as much as the measured ones
            seconds = self._seconds[known]
            return seconds + (tiles - known) * max(0.0, seconds - decode_s) / known
        return decode_s + tiles * TILE_ROWS * token_s if decode_s and token_s else float("inf")
