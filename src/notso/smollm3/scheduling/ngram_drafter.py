"""Speculative decoding without a draft model: n-gram lookup in prompt and answer.

Drafts are computed together with the required token; every position is sampled as without drafts, and agreeing ones are
kept (sample-then-compare), so that drafts affect speed but never the text.

The draft length maximizes expected tokens per time, from the acceptance rate by match length, tracked per answer, and
the cost of additional rows. Even the token after the last occurrence of a single one is right often enough to pay for
its row. After three drafts of longer matches that fail at once the drafter pauses, each time for longer.

The measured step latency by number of rows prices draft tokens. A step reads every weight once, so the first additional
rows are nearly free; how many depends on kernels and machine. Planning figures apply until steps are measured, and
dampen outliers afterwards.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from notso.smollm3.scheduling.sequence import MAX_SAMPLED

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

COMPARED_MATCH = 3  # from here on the longest of several matches counts; of shorter ones, the latest
LONGEST_MATCH = 32  # longer matches are no more reliable
CANDIDATES = 6  # occurrences examined, latest first
MOST_DRAFTS = 15  # with the required token, one tile of 16 rows

# Match lengths that delimit the classes.
MATCH_CLASSES = (1, 2, 3, 4, 6, 9, 14, 22, 32)
# Prior acceptance rate per class, measured on the tasks of benchmarks/speculation.py.
EXPECTED_RIGHT = (0.15, 0.30, 0.45, 0.40, 0.55, 0.70, 0.82, 0.90, 0.95)
EXPECTED_WEIGHT = 4.0  # weight of the prior, in tokens
MEMORY = 0.94  # decay per judged token
# Drift back to the prior whenever no draft seemed worthwhile; without it drafting would never resume.
RECOVERY = 0.02

WORTH_IT = 1.04  # minimum gain that justifies rows
EMPTY_ROUNDS = 3
FIRST_SILENCE, LONGEST_SILENCE = 8, 128  # tokens

_BITS = 21  # bits per token id in the key of three
_TOKEN, _PAIR = (1 << _BITS) - 1, (1 << 2 * _BITS) - 1


class NgramDrafter:
    """Drafts for one answer, at a microsecond or two per token; tokens in `never` end a draft."""

    def __init__(
        self,
        ids: Sequence[int],
        most: int = MOST_DRAFTS,
        *,
        never: frozenset[int] = frozenset(),
        latency: StepLatency | None = None,
    ) -> None:
        self._most = most
        self._never = never
        self._latency = latency or StepLatency()
        self._ids = array("i")
        self._last: dict[int, int] = {}  # three tokens -> position after their latest occurrence
        self._last_pair: dict[int, int] = {}  # the same for two tokens, and for one
        self._last_token: dict[int, int] = {}
        self._before = array("i")  # position -> position after the previous occurrence; 0: none
        self._key = 0
        self._right = [EXPECTED_WEIGHT * p for p in EXPECTED_RIGHT]
        self._tried = [EXPECTED_WEIGHT] * len(EXPECTED_RIGHT)
        self._class = 0  # of the last proposal's match
        self._empty_rounds = 0
        self._silence = FIRST_SILENCE
        self._silent_until = 0
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

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
        """Return up to `limit` drafts if worthwhile; report their outcome to `accept`. `rows`: the step's others."""
        limit = min(limit, self._most)
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

    def accept(self, drafted: int, accepted: int) -> None:
        if drafted < 1:
            return
        tried = min(accepted + 1, drafted)
        kept = MEMORY**tried
        self._right[self._class] = kept * self._right[self._class] + accepted
        self._tried[self._class] = kept * self._tried[self._class] + tried
        if accepted:
            self._empty_rounds, self._silence = 0, FIRST_SILENCE
            return
        if MATCH_CLASSES[self._class] < COMPARED_MATCH:
            return  # mostly wrong, and priced as such
        self._empty_rounds += 1
        if self._empty_rounds >= EMPTY_ROUNDS:
            self._empty_rounds = EMPTY_ROUNDS - 1  # one more failure after the pause starts the next
            self._silent_until = len(self._ids) + self._silence
            self._silence = min(2 * self._silence, LONGEST_SILENCE)

    def _longest_match(self) -> tuple[int, int]:
        # End and length of the suffix's longest earlier occurrence.
        ids, end = self._ids, len(self._ids)
        place, best, longest = self._last.get(self._key, 0) if end >= COMPARED_MATCH else 0, 0, 0
        if not place and end >= 2 and (pair := self._last_pair.get(self._key & _PAIR, 0)):
            return pair, 2
        if not place and end and (token := self._last_token.get(self._key & _TOKEN, 0)):
            return token, 1
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
            rate = tokens / (rows * self._latency.ratio(rows, length))
            if rate > gain:
                best, gain = length, rate
        return best

    def _continuation(self, place: int, length: int) -> list[int]:
        drafts: list[int] = []
        end = len(self._ids)
        # Beyond the end, the draft continues from itself, which handles periodic text.
        for at in range(place, place + length):
            token = self._ids[at] if at < end else drafts[at - end]
            if token in self._never:
                break
            drafts.append(token)
        return drafts
