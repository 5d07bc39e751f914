"""Chooses the next token.

Order: repetition, presence and frequency penalties and logit_bias, then temperature, top_k, top_p, min_p, then the
draw. It is the order of Hugging Face's generation, for which SmolLM3's settings (temperature 0.6, top_p 0.95) were
published: temperature before the filters, each filter on what the one before left.

The draw depends on the seed and the position alone, not on how many draws came before or what else the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.many_candidates import draw_among_many, ranked
from notso.smollm3.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

# Below this, dividing by the temperature leaves nothing but the likeliest token, or overflows.
GREEDY_TEMPERATURE = 1e-5

# Shares of the likeliest token's probability above which to look for candidates, until there are enough of them: the
# nucleus of a usual distribution is a few dozen tokens out of 128,256, and sorting the rest would be wasted.
_CANDIDATE_FLOORS = (1e-2, 1e-4, 1e-7)
MANY = 8192
"""Candidates from which on they are not all put in order. Which token is drawn does not depend on it."""

_LEAST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)


class Sampler:
    """Chooses tokens for one sequence. Holds no state that changes: the same arguments give the same token.

    seed: any 64-bit integer. vocab_size: if given, a logit_bias beyond it raises InvalidRequestError here, else
    `sample` raises it.
    """

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int | None = None) -> None:
        self.params = params
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.greedy = params.temperature < GREEDY_TEMPERATURE
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._biases = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._penalises = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        if vocab_size is not None:
            self._check_bias(vocab_size)

    @property
    def is_plain_argmax(self) -> bool:
        """Whether `sample` is the argmax of the logits as they are."""
        return self.greedy and not self._penalises and not len(self._bias_ids)

    def sample(self, logits: Floats, history: Sequence[int] | NDArray[np.integer], position: int) -> int:
        """The token for `position`, given float32 logits (V,) and the tokens of prompt and answer so far.

        Equal candidates rank by id, the lowest first. A logit of minus infinity is a token that is ruled out; any other
        that is not finite, or nothing left to choose from, raises EngineError. `logits` is not written to.
        """
        logits = self._adjusted(logits, history)
        best = int(np.argmax(logits))  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise EngineError("the model's logits are not finite")
        if self.greedy:
            return best
        weights = self._weights(logits, logits[best])
        ids, nucleus_sum = self._candidates(weights)
        if ids is not None and len(ids) > MANY and not self.params.top_k:
            return draw_among_many(ids, weights[ids], nucleus_sum, self._uniform(position))
        if ids is not None:
            ids = self._filtered(ids, weights, nucleus_sum)
        cumulative = np.cumsum(weights if ids is None else weights[ids], dtype=np.float64)
        # The largest uniform is below 1, but the product may round up to the sum.
        drawn = np.searchsorted(cumulative, self._uniform(position) * cumulative[-1], side="right")
        index = min(int(drawn), int(np.searchsorted(cumulative, cumulative[-1])))
        return index if ids is None else int(ids[index])

    def _adjusted(self, logits: Floats, history: Sequence[int] | NDArray[np.integer]) -> Floats:
        """Penalties and bias, on a copy if there are any."""
        params = self.params
        if not self._penalises and not len(self._bias_ids):
            return logits
        logits = logits.copy()
        if self._penalises:
            window = history[-params.penalty_window :] if params.penalty_window else history
            counts = np.bincount(np.asarray(window, dtype=np.intp), minlength=1)
            seen = np.flatnonzero(counts)
            values = logits[seen]
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            logits[seen] = values - (params.presence_penalty + params.frequency_penalty * counts[seen])
        if len(self._bias_ids):
            self._check_bias(len(logits))
            logits[self._bias_ids] += self._biases
        return logits

    def _check_bias(self, vocab_size: int) -> None:
        if len(self._bias_ids) and self._bias_ids.max() >= vocab_size:
            raise InvalidRequestError(f"logit_bias: token ids must be below {vocab_size}", param="logit_bias")

    def _weights(self, logits: Floats, best: np.float32) -> Floats:
        """Probabilities relative to the likeliest token's, float32 (V,)."""
        with np.errstate(over="ignore"):  # what overflows is minus infinity, of weight nought
            scaled: Floats = (logits - best) / np.float32(self.params.temperature)
        np.exp(scaled, out=scaled)
        return scaled

    def _candidates(self, weights: Floats) -> tuple[Indices | None, float | None]:
        """(rising ids that hold all that the filters leave, or None for all tokens; the sum at which the nucleus ends,
        or None where top_p is of no account or comes after top_k)."""
        top_k, top_p, min_p = self.params.top_k, self.params.top_p, self.params.min_p
        if not top_k and top_p >= 1.0 and min_p <= 0.0:
            return None, None
        # Below min_p nothing is left, so there is no need to look; but top_p's share is one of all that top_k leaves.
        lowest = max(min_p, _LEAST_WEIGHT) if not top_k or top_p >= 1.0 else _LEAST_WEIGHT
        nucleus_sum = top_p * float(weights.sum(dtype=np.float64))
        for floor in [*(floor for floor in _CANDIDATE_FLOORS if floor > lowest), lowest]:
            ids = np.flatnonzero(weights >= np.float32(floor))
            if len(ids) >= top_k if top_k else weights[ids].sum(dtype=np.float64) >= nucleus_sum:
                break
        if top_k and len(ids) > top_k:
            held = weights[ids]
            ids = ids[held >= np.partition(held, len(ids) - top_k)[len(ids) - top_k]]
        return ids, nucleus_sum if top_p < 1.0 and not top_k else None

    def _filtered(self, ids: Indices, weights: Floats, nucleus_sum: float | None) -> Indices:
        """Of candidates those that the filters leave, the likeliest first."""
        top_k, top_p = self.params.top_k, self.params.top_p
        ids = ranked(ids, weights[ids])
        if top_k:
            ids = ids[:top_k]
        if top_p < 1.0:
            cumulative = np.cumsum(weights[ids], dtype=np.float64)
            end = top_p * float(cumulative[-1]) if nucleus_sum is None else nucleus_sum
            ids = ids[: int(np.searchsorted(cumulative, end)) + 1]
        return ids[weights[ids] >= np.float32(self.params.min_p)]

    def _uniform(self, position: int) -> float:
        """The number in [0, 1) that belongs to this seed and position: the upper 53 bits of the first word of
        Philox4x64-10 with key `seed` and counter `position + 1` (Salmon et al., "Parallel random numbers: as easy as 1,
        2, 3", 2011; numpy counts up before it draws)."""
        bits = np.random.Philox(key=self.seed, counter=position).random_raw()
        return float(bits >> 11) * 2.0**-53


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
    floor = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= floor)
    return [int(token) for token in ids[np.lexsort((ids, -values[ids]))][:count]]
