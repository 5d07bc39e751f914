"""Draft tokens without a second model: what followed the last time the text ran like this.

Proposals come from the prompt and from the answer so far. The engine computes them together with the token it needs
anyway, samples every position as it would have without them, and keeps what agrees (sample-then-compare), so a draft
token can change how long an answer takes and never what it says.

Whether to draft, and how far, is a matter of cost: of all lengths the one with the most tokens for its time is taken,
given how likely a draft token is right after a match of this length (counted for each answer) and what more rows of a
step cost. After three drafts that were wrong from the start it stays silent for a while, each time for longer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from notso.smollm3.scheduling.step_latency import StepLatency

SHORTEST_MATCH = 3
LONGEST_MATCH = 32  # beyond, longer says no more
CANDIDATES = 6  # places looked at, the latest first
MOST_DRAFTS = 15  # with the token that is computed anyway, one tile of 16 rows

MATCH_CLASSES = (3, 4, 6, 9, 14, 22, 32)
"""Matches are told apart by these lengths."""
EXPECTED_RIGHT = (0.30, 0.40, 0.55, 0.70, 0.82, 0.90, 0.95)
"""How often a draft token is right after a match of each class, before an answer has shown otherwise (measured on the
tasks of benchmarks/speculation.py)."""
EXPECTED_WEIGHT = 4.0  # tokens that expectation counts for
MEMORY = 0.94  # what each judged token leaves of those before
RECOVERY = (
    0.02  # towards what was expected, each time that no draft seemed worth it: else none would ever be tried again
)

WORTH_IT = 1.04  # least gain for which rows are spent
EMPTY_ROUNDS = 3
FIRST_SILENCE, LONGEST_SILENCE = 8, 128  # tokens

_BITS = 21  # of one token id in the key of three


class NgramDrafter:
    """The draft tokens for one answer, over `ids`, its prompt. A microsecond or two for each token.

    Of the tokens in `never` (control tokens) none is proposed, nor anything behind one.
    """

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
        self._last: dict[int, int] = {}  # three tokens -> the place of the token after their latest occurrence
        self._before = array("i")  # place -> the place after the occurrence before that; 0: there was none
        self._key = 0
        self._right = [EXPECTED_WEIGHT * p for p in EXPECTED_RIGHT]
        self._tried = [EXPECTED_WEIGHT] * len(EXPECTED_RIGHT)
        self._class = 0  # of the match behind the last proposal
        self._empty_rounds = 0
        self._silence = FIRST_SILENCE
        self._silent_until = 0
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, tokens: Iterable[int]) -> None:
        """What came next, drafted or not."""
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
        """Draft tokens for what follows, at most `limit`; none if none is worth its rows.

        rows: what the step has without them. Tell `accept` what came of it if it was not empty.
        """
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
        """Of the last proposal, `accepted` tokens of `drafted` were right (and the next one, if any, was wrong)."""
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
            self._empty_rounds = EMPTY_ROUNDS - 1  # one more after the silence, and it returns
            self._silent_until = len(self._ids) + self._silence
            self._silence = min(2 * self._silence, LONGEST_SILENCE)

    def _longest_match(self) -> tuple[int, int]:
        """(the place after it, its length) of the longest earlier occurrence of what the text ends in, or (0, 0)."""
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
        """How many draft tokens give the step the most tokens for its time, each right with this probability."""
        best, gain, tokens, chance = 0, WORTH_IT, float(rows), 1.0
        for length in range(1, limit + 1):
            chance *= right
            tokens += chance
            rate = tokens / (rows * self._latency.ratio(rows, length))
            if rate > gain:
                best, gain = length, rate
        return best

    def _continuation(self, place: int, length: int) -> list[int]:
        """What stood at `place` and after; behind the end it goes on with the draft itself, for what repeats."""
        drafts: list[int] = []
        end = len(self._ids)
        for at in range(place, place + length):
            token = self._ids[at] if at < end else drafts[at - end]
            if token in self._never:
                break
            drafts.append(token)
        return drafts
