"""DRY ("don't repeat yourself") penalty: tokens that would extend a repetition are penalized by its length.

Rules: llama.cpp's `llama_sampler_dry_apply` (src/llama-sampling.cpp), after p-e-w's proposal
(github.com/oobabooga/text-generation-webui, pull request 5677). If the end of the text also occurs earlier, over at
least `dry_allowed_length` tokens, the token that followed there is penalized. Repetitions end at sequence breakers, and
a token that is a breaker itself is never penalized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from notso.smollm3.sampling.top_p import Indices
from notso.smollm3.values.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Tokens = Sequence[int] | NDArray[np.integer]

MAX_PENALTY = 1e30  # finite, so that some token remains eligible


@dataclass(frozen=True, slots=True)
class Breakers:
    """Tokens, and sequences by last token, that contain a breaker."""

    single: frozenset[int] = frozenset()
    sequences: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


NO_BREAKERS = Breakers()


class Repetitions:
    """Repetitions of a growing history's end."""

    def __init__(self, params: SamplingParams, breakers: Breakers) -> None:
        self._params = params
        self._breakers = breakers
        self._history: Tokens = ()
        self._clear()

    def penalties(self, history: Tokens) -> tuple[Indices, Floats]:
        """Return ascending token ids, and amounts to subtract."""
        # Match lengths are updated with one comparison per position and token; searching anew would reread the text.
        # A list passed before may only have grown since.
        if history is not self._history or len(history) < self._count:
            self._history = history
            self._clear()
        self._take(history)
        return self._penalties()

    def _clear(self) -> None:
        self._count = 0
        self._behind_break = 0  # tokens since the last breaker
        self._tokens = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)  # [i]: length of the match that ends at i

    def _take(self, history: Tokens) -> None:
        before, self._count = self._count, len(history)
        if self._count > len(self._tokens):
            room = 2 * self._count
            self._tokens, self._lengths = (np.resize(array, room) for array in (self._tokens, self._lengths))
        self._tokens[before : self._count] = history[before:]
        if before == 0:
            self._lengths[: self._count] = common_endings(history)
            self._behind_break = next(
                (back for back in range(self._count) if self._breaks(history, self._count - back)), self._count
            )
            return
        for end in range(before, self._count):
            token = self._tokens[end]
            self._behind_break = 0 if self._breaks(history, end + 1) else self._behind_break + 1
            lengths = self._lengths
            # Matches move one place on; the end itself starts at 0.
            lengths[1 : end + 1] = np.where(self._tokens[1 : end + 1] == token, lengths[:end] + 1, 0)
            lengths[0] = int(self._tokens[0] == token)
            lengths[end] = 0

    def _breaks(self, history: Tokens, end: int) -> bool:
        token = int(history[end - 1])
        if token in self._breakers.single:
            return True
        return any(
            end >= len(tokens) and list(history[end - len(tokens) : end]) == list(tokens)
            for tokens in self._breakers.sequences.get(token, ())
        )

    def _penalties(self) -> tuple[Indices, Floats]:
        params, allowed = self._params, self._params.dry_allowed_length
        window = self._count if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, self._count)
        longest = min(self._behind_break, window)
        if window <= allowed or longest < allowed:
            return np.empty(0, np.intp), np.empty(0, np.float32)
        start = self._count - window
        within = np.minimum(self._lengths[start : self._count - 1], np.arange(1, window))
        ends = np.flatnonzero(within >= allowed)
        tokens, places = np.unique(self._tokens[start + 1 + ends], return_inverse=True)
        lengths = np.zeros(len(tokens), np.int64)
        np.maximum.at(lengths, places, np.minimum(within[ends], longest))
        listed = np.array([int(token) not in self._breakers.single for token in tokens], bool)
        with np.errstate(over="ignore"):
            fall = params.dry_multiplier * np.float64(params.dry_base) ** (lengths[listed] - allowed)
        return tokens[listed].astype(np.intp), np.minimum(fall, MAX_PENALTY).astype(np.float32)


def common_endings(history: Tokens) -> NDArray[np.int64]:
    """Return each position's match length with the end."""
    # The Z algorithm from the end backwards, in linear time.
    tokens = list(history)[::-1]
    lengths = np.zeros(len(tokens), np.int64)
    found = [0] * len(tokens)
    left = right = 0  # [left, right) is known to repeat the beginning
    for at in range(1, len(tokens)):
        length = min(found[at - left], right - at) if at < right else 0
        while at + length < len(tokens) and tokens[length] == tokens[at + length]:
            length += 1
        found[at] = length
        if at + length > right:
            left, right = at, at + length
    lengths[:] = found[::-1]
    return lengths
