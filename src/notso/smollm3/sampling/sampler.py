"""Chooses the next token.

Order: repetition, presence and frequency penalties, DRY and logit_bias, then temperature, top_k, typical_p, top_p,
min_p, XTC, then the draw. It is the order of Hugging Face's generation, for which SmolLM3's settings (temperature 0.6,
top_p 0.95) were published: temperature before the filters, each filter on what the one before left. typical_p and XTC
stand where llama.cpp has them; who asks for them goes a way of its own (rare_filters.py), which costs others nothing.

The draw depends on the seed and the position alone, not on how many draws came before or what else the engine does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.sampling.dry import NO_BREAKERS, Breakers, Repetitions
from notso.smollm3.sampling.rare_filters import left_by_all
from notso.smollm3.sampling.top_p import ranked, sample_among_many
from notso.smollm3.values.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]

# Below this, dividing by the temperature leaves nothing but the likeliest token, or overflows.
GREEDY_TEMPERATURE = 1e-5

# Shares of the likeliest token's probability above which to look for candidates, until there are enough of them: the
# nucleus of a usual distribution is a few dozen tokens out of 128,256, and sorting the rest would be wasted.
_CANDIDATE_FLOORS = (1e-2, 1e-4, 1e-7)
MANY = 8192
"""Candidates up to which they are listed and put in order. Which token is drawn does not depend on it."""

_LEAST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)

_SHORT_LIST_WEIGHT, _FAINT_WEIGHT = 5e-8, 1e-9
"""Tokens of less weight than the first are mostly only counted, for the nucleus ends elsewhere whatever they weigh."""
_SHORT_LIST = 2048
"""Tokens of more weight: up to so many are weighed first and alone, which costs a fraction of weighing all."""
_SLACK, _ROUNDING = 1.01, 1e-9  # weights, and sums of them, are far more exact than this
_UNSURE = -1
_MAXIMA_OF = 256

_WORD = 0xFFFF_FFFF_FFFF_FFFF


class Sampler:
    """Chooses tokens for one sequence. The same arguments give the same token: what DRY remembers of a history that
    grows only saves it reading all of it again.

    seed: any 64-bit integer. vocab_size: if given, a logit_bias beyond it raises InvalidRequestError here, else
    `sample` raises it. breakers: the tokens of `params.dry_sequence_breakers`.
    """

    def __init__(
        self, params: SamplingParams, seed: int, vocab_size: int | None = None, breakers: Breakers = NO_BREAKERS
    ) -> None:
        self.params = params
        self.seed = seed & _WORD
        self.greedy = params.temperature < GREEDY_TEMPERATURE
        biases = sorted(params.logit_bias.items())  # by id: the first of equals is the lowest
        self._bias_ids = np.array([token for token, _ in biases], np.intp)
        self._biases = np.array([bias for _, bias in biases], np.float32)
        self._filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._weakens = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self._repetitions = Repetitions(params, breakers) if params.repeats_are_dried else None
        self._penalises = self._weakens or self._repetitions is not None
        self._is_rare = params.typical_p < 1.0 or params.xtc_probability > 0.0
        if vocab_size is not None:
            self._check_bias(vocab_size)

    @property
    def is_plain_argmax(self) -> bool:
        """Whether `sample` is the argmax of the logits as they are."""
        return self.greedy and not self._penalises and not len(self._bias_ids)

    def sample(self, logits: Floats, history: Sequence[int] | NDArray[np.integer], position: int) -> int:
        """The token for `position`, given float32 logits (V,) and the tokens of prompt and answer so far.

        Equal candidates rank by id, the lowest first. A logit of minus infinity is a token that is masked; any other
        that is not finite, or nothing left to choose from, raises EngineError. `logits` is not written to.
        """
        if self.greedy and not self._penalises:
            return self._best_biased(logits)
        logits = self._adjusted(logits, history)
        best = _best(logits)
        if self.greedy:
            return best
        if self._is_rare:
            choosing, crossing, _, _ = self._words(position)
            ids, weights = left_by_all(self._weights(logits, logits[best]), self.params, _share(crossing))
            return int(ids[_falls_on(np.cumsum(weights, dtype=np.float64), _share(choosing))])
        sampled = self._sample_short_list(logits, logits[best], position) if self._filters else _UNSURE
        return sampled if sampled != _UNSURE else self._sample_index(self._weights(logits, logits[best]), position)

    def _sample_short_list(self, logits: Floats, best: np.float32, position: int) -> int:
        """The token that is drawn, by weighing only those that weigh something; _UNSURE if that does not tell.

        Each of the others weighs less than a bound, so the sum of all is known within limits. Mostly the nucleus ends
        at the same token by either limit.
        """
        lowest, bound = self._limit(best, _SHORT_LIST_WEIGHT)
        listed = logits >= lowest
        count = int(np.count_nonzero(listed))
        if count > _SHORT_LIST:
            return _UNSURE
        ids = np.flatnonzero(listed)
        faintest, faint = self._limit(best, _FAINT_WEIGHT)
        above = int(np.count_nonzero(logits >= faintest))
        rest = (above - count) * bound + (len(logits) - above) * faint
        index = self._sample_index(self._weights(logits[ids], best), position, bound, rest)
        return index if index == _UNSURE else int(ids[index])

    def _limit(self, best: np.float32, weight: float) -> tuple[np.float32, float]:
        """(the logit of such a weight, a bound for the weights of lesser logits: single precision may move it)"""
        limit = best + np.float32(self.params.temperature * math.log(weight))
        return limit, _SLACK * math.exp((float(limit) - float(best)) / self.params.temperature)

    def _sample_index(self, weights: Floats, position: int, bound: float = 0.0, rest: float = 0.0) -> int:
        """Index of the weight that is drawn. _UNSURE if it may depend on others, which weigh less than `bound` each,
        less than `rest` together, and stand anywhere between."""
        uniform = self._uniform(position)
        if not self._filters:
            return _falls_on(np.cumsum(weights, dtype=np.float64), uniform)
        total = float(weights.sum(dtype=np.float64))
        least = most = self.params.top_p * total
        if rest:
            least, most = least * (1 - _ROUNDING), self.params.top_p * (total + rest) * (1 + _ROUNDING)
        ids = self._candidates(weights, most, bound)
        if ids is None:
            return _UNSURE if bound else self._sample_among_many(weights, least, uniform)
        ids, sums = self._filtered(ids, weights, least, most)
        return int(ids[_falls_on(sums, uniform)]) if len(ids) else _UNSURE

    def _sample_among_many(self, weights: Floats, nucleus_sum: float, uniform: float) -> int:
        end = nucleus_sum if self.params.top_p < 1.0 else None
        if self.params.min_p <= 0.0:
            return sample_among_many(weights, end, uniform)
        ids = np.flatnonzero(weights >= np.float32(self.params.min_p))
        return int(ids[sample_among_many(weights[ids], end, uniform)])

    def _best_biased(self, logits: Floats) -> int:
        """The argmax of logits with their bias, mostly without a copy of them."""
        best = _best(logits)
        if not len(self._bias_ids):
            return best
        self._check_bias(len(logits))
        biased = logits[self._bias_ids] + self._biases
        first = int(np.argmax(biased))
        rival, value = int(self._bias_ids[first]), biased[first]
        if value > logits[best]:
            return rival
        if best in self.params.logit_bias:  # and has lost by its bias: who is second has to be looked for
            return _best(self._adjusted(logits, ()))
        return min(best, rival) if value == logits[best] else best

    def _adjusted(self, logits: Floats, history: Sequence[int] | NDArray[np.integer]) -> Floats:
        """Penalties and bias, on a copy if there are any."""
        params = self.params
        if not self._penalises and not len(self._bias_ids):
            return logits
        logits = logits.copy()
        if self._weakens:
            window = history[-params.penalty_window :] if params.penalty_window else history
            seen, counts = np.unique(np.asarray(window, dtype=np.intp), return_counts=True)
            values = logits[seen]
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            logits[seen] = values - (params.presence_penalty + params.frequency_penalty * counts)
        if self._repetitions is not None:
            repeated, penalties = self._repetitions.penalties(history)
            logits[repeated] -= penalties
        if len(self._bias_ids):
            self._check_bias(len(logits))
            logits[self._bias_ids] += self._biases
        return logits

    def _check_bias(self, vocab_size: int) -> None:
        if len(self._bias_ids) and self._bias_ids.max() >= vocab_size:
            raise InvalidRequestError(f"logit_bias: token ids must be below {vocab_size}", param="logit_bias")

    def _weights(self, logits: Floats, best: np.float32) -> Floats:
        """Probabilities of tokens relative to the likeliest's, whose logit is `best`, float32."""
        with np.errstate(over="ignore"):  # what overflows is minus infinity, of weight nought
            scaled: Floats = (logits - best) / np.float32(self.params.temperature)
        np.exp(scaled, out=scaled)
        return scaled

    def _candidates(self, weights: Floats, nucleus_sum: float, bound: float) -> Indices | None:
        """Rising indices that hold all that the filters leave; None where there are too many to list, or some that do
        not weigh more than `bound`."""
        top_k, top_p, min_p = self.params.top_k, self.params.top_p, self.params.min_p
        # Below min_p nothing is left, so there is no need to look; but top_p's share is one of all that top_k leaves.
        lowest = max(min_p, _LEAST_WEIGHT) if not top_k or top_p >= 1.0 else _LEAST_WEIGHT
        for floor in [*(floor for floor in _CANDIDATE_FLOORS if floor > lowest), lowest]:
            if floor <= bound:
                return None
            listed = weights >= np.float32(floor)
            if not top_k and np.count_nonzero(listed) > MANY:
                return None
            ids = np.flatnonzero(listed)
            if len(ids) >= top_k if top_k else weights[ids].sum(dtype=np.float64) >= nucleus_sum:
                break
        if top_k and len(ids) > top_k:
            held = weights[ids]
            ids = ids[held >= np.partition(held, len(ids) - top_k)[len(ids) - top_k]]
        return ids

    def _filtered(self, ids: Indices, weights: Floats, least: float, most: float) -> tuple[Indices, Doubles]:
        """Of candidates those that the filters leave, the likeliest first, and running sums of their weights. The
        nucleus ends between the sums `least` and `most`; none are left if that does not say where."""
        params = self.params
        ids = ranked(ids, weights[ids])
        if params.top_k:
            ids = ids[: params.top_k]
        held = weights[ids]
        sums = np.cumsum(held, dtype=np.float64)
        end = len(ids)
        if params.top_p < 1.0:
            if params.top_k:
                least = most = params.top_p * float(sums[-1])
            end = int(np.searchsorted(sums, least)) + 1
            if most > least and end != int(np.searchsorted(sums, most)) + 1:
                end = 0
        if params.min_p > 0.0:
            end = min(end, int(np.count_nonzero(held >= np.float32(params.min_p))))
        return ids[:end], sums[:end]

    def _uniform(self, position: int) -> float:
        """The number in [0, 1) that says which token is drawn."""
        return _share(self._words(position)[0])

    def _words(self, position: int) -> tuple[int, int, int, int]:
        """The four 64-bit words that belong to this seed and position, one for each thing that is left to chance:
        Philox4x64-10 with key `seed` and counter `position + 1` (Salmon et al., "Parallel random numbers: as easy as 1,
        2, 3", 2011)."""
        a, b, c, d, key, other_key = position + 1, 0, 0, 0, self.seed, 0
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = second >> 64 ^ b ^ key, second & _WORD, first >> 64 ^ d ^ other_key, first & _WORD
            key, other_key = key + 0x9E3779B97F4A7C15 & _WORD, other_key + 0xBB67AE8584CAA73B & _WORD
        return a, b, c, d


def _share(word: int) -> float:
    """A number in [0, 1), of the word's upper 53 bits."""
    return float(word >> 11) * 2.0**-53


def _best(logits: Floats) -> int:
    best = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[best]):
        raise EngineError("the model's logits are not finite")
    return best


def _falls_on(sums: Doubles, uniform: float) -> int:
    """Index of the weight that `uniform` in [0, 1) falls on, by the running sums of all."""
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    # The largest uniform is below 1, but the product may round up to the sum.
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))


def log_probabilities(logits: Floats) -> Floats:
    """Natural logarithms of the model's own probabilities, float32 of the logits' shape (..., V): no penalty, bias,
    temperature or filter. Raises EngineError if a row is not finite (minus infinity is)."""
    best = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(best).all():
        raise EngineError("the model's logits are not finite")
    shifted = logits - best
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: Floats = shifted - np.log(total).astype(np.float32)
    return result


def likeliest(values: Floats, count: int) -> list[int]:
    """Ids of the `count` greatest of log-probabilities (V,), the greatest first, then by id."""
    count = min(count, len(values))
    if count <= 0:
        return []
    # So many pieces have a maximum at or above the floor, so at least so many values have; mostly few more.
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), _MAXIMA_OF))
    floor = np.partition(maxima, len(maxima) - count)[len(maxima) - count] if count <= len(maxima) else -np.inf
    ids = np.flatnonzero(values >= floor)
    return [int(token) for token in ids[np.lexsort((ids, -values[ids]))][:count]]
