"""Draft tokens without a draft model, by looking up n-grams in the prompt and the answer (speculative decoding).

If the last tokens of the text occur earlier (a match), the tokens that followed them there are the draft: a guess at
the next tokens. Draft tokens are computed in the same step as the next token of the answer. Every position is sampled
as it would be without a draft, and draft tokens that equal the sampled ones are accepted, so drafts affect the speed
but never the text.

The drafter chooses the draft length with the highest expected number of tokens per second. For this, it estimates the
acceptance rate of each answer by match length, and the cost of additional rows (tokens in a step). If three successive
drafts after matches of at least three tokens are rejected at their first token, the drafter ignores matches of 3 to 31
tokens for a while. This pause becomes longer each time.

The cost of draft tokens is derived from the measured latencies of steps with different numbers of rows. A step reads
every weight once, whatever its number of rows, so a few additional rows are nearly free; how many depends on the
kernels and the machine. Until steps have been measured, planned costs are used; later, they reduce the effect of
outliers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from notso.smollm3.scheduling.sequence import MAX_SAMPLED

# Planned cost of a step by number of rows, relative to one row. Other values are interpolated linearly, or extrapolated
# beyond 16 rows.
PLANNED = {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.8}

PLANNED_WEIGHT = 3.0  # number of timings that have as much weight as the planned cost
LONGEST_MEMORY = 30.0  # number of timings after which the mean becomes an exponential moving average
OUTLIER = 2.0  # cap on a timing, as a multiple of the expected one


class StepLatency:
    """Measured step latency by number of rows. Not thread-safe."""

    def __init__(self) -> None:
        self._weight = [0.0] * (MAX_SAMPLED + 1)
        self._seconds = [0.0] * (MAX_SAMPLED + 1)
        self._unit = 0.0  # average ratio of a step's seconds to its planned cost
        self._units = 0.0  # number of timings in this average, capped

    def observe(self, rows: int, seconds: float) -> None:
        if not 1 <= rows <= MAX_SAMPLED or seconds <= 0.0:
            return
        if self._units:
            seconds = min(seconds, OUTLIER * self.seconds(rows))
        weight, units = self._weight[rows], self._units
        self._seconds[rows] += (seconds - self._seconds[rows]) / (weight + 1)
        self._weight[rows] = min(weight + 1, LONGEST_MEMORY)
        self._unit += (seconds / planned_cost(rows) - self._unit) / (units + 1)
        self._units = min(units + 1, LONGEST_MEMORY)

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a step with up to 64 rows, or 0 if unknown."""
        expected, weight = self._unit * planned_cost(rows), self._weight[rows]
        return (PLANNED_WEIGHT * expected + weight * self._seconds[rows]) / (PLANNED_WEIGHT + weight)

    def relative_cost(self, rows: int, more: int) -> float:
        # Above 64 rows, the cost is assumed to be proportional to the number of rows.
        if rows + more > MAX_SAMPLED:
            return (rows + more) / rows
        if not self._units:
            return planned_cost(rows + more) / planned_cost(rows)
        return self.seconds(rows + more) / self.seconds(rows)


def planned_cost(rows: int) -> float:
    """Return the planned relative cost of up to 64 rows."""
    return _PLANNED_ROWS[rows]


def _interpolate_cost(rows: int) -> float:
    points = list(PLANNED.items())
    enclosing = (pair for pair in pairwise(points) if rows <= pair[1][0])
    (low, at_low), (high, at_high) = next(enclosing, (points[-2], points[-1]))
    return at_low + (at_high - at_low) * (rows - low) / (high - low)


_PLANNED_ROWS = [_interpolate_cost(rows) for rows in range(MAX_SAMPLED + 1)]

COMPARED_MATCH = 3  # among matches of at least this length, the longest is used; among shorter ones, the latest
LONGEST_MATCH = 32  # longer matches are not more reliable
CANDIDATES = 6  # maximum number of occurrences examined, latest first
MOST_DRAFTS = 15  # with the answer's next token, they fill one tile of 16 rows

# Shortest match length of each class.
MATCH_CLASSES = (1, 2, 3, 4, 6, 9, 14, 22, 32)
# Prior acceptance rate per class, measured with benchmarks/speculation.py.
EXPECTED_RIGHT = (0.15, 0.30, 0.45, 0.40, 0.55, 0.70, 0.82, 0.90, 0.95)
EXPECTED_WEIGHT = 4.0  # number of draft tokens that have as much weight as the prior
MEMORY = 0.94  # factor by which earlier counts decay with each accepted or rejected draft token
# Whenever drafting is not worthwhile, the estimated acceptance rate moves toward the prior by this fraction. Otherwise,
# a low estimate would never change, because nothing is measured without drafts.
RECOVERY = 0.02

WORTH_IT = 1.04  # drafts must increase the expected number of tokens per second by more than this factor
EMPTY_ROUNDS = 3  # successive rejected drafts before a pause
FIRST_SILENCE, LONGEST_SILENCE = 8, 128  # length of the first pause and of the longest, in tokens

_BITS = 21  # bits per token id; a key consists of three ids
_TOKEN, _PAIR = (1 << _BITS) - 1, (1 << 2 * _BITS) - 1


class NgramDrafter:
    """Proposes drafts for one answer. Tokens in `never` end a draft."""

    def __init__(
        self,
        ids: Sequence[int],
        *,
        never: frozenset[int] = frozenset(),
        latency: StepLatency | None = None,
    ) -> None:
        self._never = never
        self._latency = latency or StepLatency()
        self._ids = array("i")
        # Position after the latest occurrence of each triple, pair and single token.
        self._last: dict[int, int] = {}
        self._last_pair: dict[int, int] = {}
        self._last_token: dict[int, int] = {}
        # For each position p: position after the previous occurrence of the three tokens before p, or 0.
        self._before = array("i")
        self._key = 0
        self._right = [EXPECTED_WEIGHT * p for p in EXPECTED_RIGHT]
        self._tried = [EXPECTED_WEIGHT] * len(EXPECTED_RIGHT)
        self._class = 0  # match-length class of the last proposal
        self._empty_rounds = 0
        self._silence = FIRST_SILENCE
        self._silent_until = 0
        self.extend(ids)

    def extend(self, tokens: Iterable[int]) -> None:
        ids, before, last, key = self._ids, self._before, self._last, self._key
        last_pair, last_token = self._last_pair, self._last_token
        for token in tokens:
            place = len(ids)
            if place >= COMPARED_MATCH:
                before.append(last.get(key, 0))
                last[key] = place
            else:
                before.append(0)
            if place >= 2:
                last_pair[key & _PAIR] = place
            if place:
                last_token[key & _TOKEN] = place
            ids.append(token)
            key = (key & _PAIR) << _BITS | token
        self._key = key

    def propose(self, limit: int = MOST_DRAFTS, rows: int = 1) -> list[int]:
        """Return up to `limit` draft tokens, or none if not worthwhile. `rows`: rows of the step without them."""
        # The caller must report the outcome with `record_acceptance`.
        limit = min(limit, MOST_DRAFTS)
        if limit < 1:
            return []
        place, match = self._longest_match()
        if not match:
            return []
        self._class = kind = bisect_right(MATCH_CLASSES, match) - 1
        if len(self._ids) < self._silent_until and COMPARED_MATCH <= match < LONGEST_MATCH:
            return []
        length = self._best_length(self._right[kind] / self._tried[kind], limit, rows)
        if not length:
            self._right[kind] += RECOVERY * (EXPECTED_RIGHT[kind] * self._tried[kind] - self._right[kind])
        return self._continuation(place, length)

    def record_acceptance(self, drafted: int, accepted: int) -> None:
        if drafted < 1:
            return
        tried = min(accepted + 1, drafted)
        decay = MEMORY**tried
        self._right[self._class] = decay * self._right[self._class] + accepted
        self._tried[self._class] = decay * self._tried[self._class] + tried
        if accepted:
            self._empty_rounds, self._silence = 0, FIRST_SILENCE
            return
        if MATCH_CLASSES[self._class] < COMPARED_MATCH:
            return  # drafts after short matches are mostly wrong; the acceptance rate accounts for this
        self._empty_rounds += 1
        if self._empty_rounds >= EMPTY_ROUNDS:
            self._empty_rounds = EMPTY_ROUNDS - 1  # after the pause, a single failure starts the next pause
            self._silent_until = len(self._ids) + self._silence
            self._silence = min(2 * self._silence, LONGEST_SILENCE)

    def _longest_match(self) -> tuple[int, int]:
        # Returns the end and the length of the longest earlier occurrence of the last tokens.
        ids, end = self._ids, len(self._ids)
        place, best, longest = self._last.get(self._key, 0) if end >= COMPARED_MATCH else 0, 0, 0
        if not place and end >= 2 and (pair := self._last_pair.get(self._key & _PAIR, 0)):
            return pair, 2
        if not place and end and (token := self._last_token.get(self._key & _TOKEN, 0)):
            return token, 1  # even these drafts are accepted often enough to be worth a row
        for _ in range(CANDIDATES):
            if not place:
                break
            most = min(place, LONGEST_MATCH)
            length = COMPARED_MATCH
            while length < most and ids[place - 1 - length] == ids[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if longest == LONGEST_MATCH:
                    break
            place = self._before[place]
        return best, longest

    def _best_length(self, right: float, limit: int, rows: int) -> int:
        best, gain, tokens, chance = 0, WORTH_IT, float(rows), 1.0
        for length in range(1, limit + 1):
            chance *= right
            tokens += chance
            rate = tokens / (rows * self._latency.relative_cost(rows, length))
            if rate > gain:
                best, gain = length, rate
        return best

    def _continuation(self, place: int, length: int) -> list[int]:
        drafts: list[int] = []
        end = len(self._ids)
        # A draft that reaches the end of the text continues with its own tokens, as if the text were periodic.
        for at in range(place, place + length):
            token = self._ids[at] if at < end else drafts[at - end]
            if token in self._never:
                break
            drafts.append(token)
        return drafts
