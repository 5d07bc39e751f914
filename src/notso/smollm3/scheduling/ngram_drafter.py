"""Speculative decoding without a draft model: n-gram lookup in prompt and answer.

Drafts are computed together with the required token; every position is sampled as without drafts, and agreeing ones are
kept (sample-then-compare), so that drafts affect speed but never the text.

The draft length maximizes expected tokens per time, from the acceptance rate by match length, tracked per answer, and
the cost of additional rows. After three drafts that fail at once the drafter pauses, each time for longer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from notso.smollm3.scheduling.step_latency import StepLatency

SHORTEST_MATCH = 3
LONGEST_MATCH = 32  # longer matches are no more reliable
CANDIDATES = 6  # occurrences examined, latest first
MOST_DRAFTS = 15  # with the required token, one tile of 16 rows

# Match lengths that delimit the classes.
MATCH_CLASSES = (3, 4, 6, 9, 14, 22, 32)
# Prior acceptance rate per class, measured on the tasks of benchmarks/speculation.py.
EXPECTED_RIGHT = (0.30, 0.40, 0.55, 0.70, 0.82, 0.90, 0.95)
EXPECTED_WEIGHT = 4.0  # weight of the prior, in tokens
MEMORY = 0.94  # decay per judged token
# Drift back to the prior whenever no draft seemed worthwhile; without it drafting would never resume.
RECOVERY = 0.02

WORTH_IT = 1.04  # minimum gain that justifies rows
EMPTY_ROUNDS = 3
FIRST_SILENCE, LONGEST_SILENCE = 8, 128  # tokens

_BITS = 21  # bits per token id in the key of three


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
        mask = (1 << 2 * _BITS) - 1
        for token in tokens:
            place = len(ids)
            if place >= SHORTEST_MATCH:
                before.append(last.get(key, 0))
                last[key] = place
            else:
                before.append(0)
            ids.append(token)
            key = (key & mask) << _BITS | token
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
        if len(self._ids) < self._silent_until and match < LONGEST_MATCH:
            return []
        length = self._best_length(self._right[kind] / self._tried[kind], limit, rows)
        if not length:
            self._right[kind] += RECOVERY * (EXPECTED_RIGHT[kind] * self._tried[kind] - self._right[kind])
        return self._continuation(place, length)

    def accept(self, drafted: int, accepted: int) -> None:
        """Record how many drafts were right."""
        if drafted < 1:
            return
        tried = min(accepted + 1, drafted)
        kept = MEMORY**tried
        self._right[self._class] = kept * self._right[self._class] + accepted
        self._tried[self._class] = kept * self._tried[self._class] + tried
        if accepted:
            self._empty_rounds, self._silence = 0, FIRST_SILENCE
            return
        self._empty_rounds += 1
        if self._empty_rounds >= EMPTY_ROUNDS:
            self._empty_rounds = EMPTY_ROUNDS - 1  # one more failure after the pause starts the next
            self._silent_until = len(self._ids) + self._silence
            self._silence = min(2 * self._silence, LONGEST_SILENCE)

    def _longest_match(self) -> tuple[int, int]:
        # End and length of the suffix's longest earlier occurrence.
        ids, end = self._ids, len(self._ids)
        place, best, longest = self._last.get(self._key, 0) if end >= SHORTEST_MATCH else 0, 0, 0
        for _ in range(CANDIDATES):
            if not place:
                break
            most = min(place, LONGEST_MATCH)
            length = SHORTEST_MATCH
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
