"""How much of a prompt the next step reads while others are being answered: as much as fits between two tokens.

Beyond 32 rows the kernels compute by sixteens, and one row more costs nearly as much as sixteen. So what is chosen is
how many sixteens a step has, the answers' own rows among them, by what such steps took lately: that goes by the
machine, by how deep the prompt is and by what else runs, and nobody has to know any of them.
"""

from __future__ import annotations

TILE_ROWS = 16
LEAST_TOKENS = 9
"""Fewer would count as an answer's (scheduler.FEW_ROWS)."""

REMEMBERED_STEPS = 64
"""After so many others a timing says no more: the prompt is deeper by now, or another one."""

OUTLIER = 2.0  # a timing counts as at most this much more than the last


class PrefillBudget:
    """Chooses for one engine. Not thread-safe: the engine's thread owns it. `step_s`: what a step should take at the
    most."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._seconds: dict[int, float] = {}  # by sixteens of rows: half the last timing, half what was here before
        self._timed: dict[int, int] = {}  # the number of the step
        self._steps = 0

    def tokens(self, decoding: int, most: int, decode_s: float, token_s: float) -> int:
        """Tokens of prompts, up to `most`, for the next step, beside `decoding` rows of answers.

        answer_s: what a step of the answers alone takes, token_s: what reading a token takes where nobody is answered;
        0 before any was timed.
        """
        tiles = -(-(decoding + LEAST_TOKENS) // TILE_ROWS)
        while tiles * TILE_ROWS - decoding < most and self._expected(tiles + 1, decode_s, token_s) <= self._step_s:
            tiles += 1
        return max(1, min(most, tiles * TILE_ROWS - decoding))

    def observe(self, rows: int, seconds: float) -> None:
        """A step of answers and of prompts, `rows` together, took so long."""
        tiles = -(-rows // TILE_ROWS)
        self._steps += 1
        before = self._seconds.get(tiles)
        if before is not None:
            seconds = 0.5 * before + 0.5 * min(seconds, OUTLIER * before)
        self._seconds[tiles], self._timed[tiles] = seconds, self._steps
        for old in [old for old, at in self._timed.items() if self._steps - at > REMEMBERED_STEPS]:
            del self._seconds[old], self._timed[old]

    def _expected(self, tiles: int, decode_s: float, token_s: float) -> float:
        """Seconds of a step of so many sixteens of rows; infinite where nothing is known."""
        known = max((other for other in self._seconds if other <= tiles), default=0)
        if known:  # every further one as much as those that were timed
            seconds = self._seconds[known]
            return seconds + (tiles - known) * max(0.0, seconds - decode_s) / known
        return decode_s + tiles * TILE_ROWS * token_s if decode_s and token_s else float("inf")
