"""Suppression of tokens that would end an answer."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.values.sampling_params import SamplingParams


class AnswerEnd:
    """Masks end tokens before `min_tokens`, or the model's own always."""

    def __init__(self, params: SamplingParams, own_ends: Collection[int]) -> None:
        # As in llama.cpp, ignored ends are masked, so the next best token is sampled instead.
        # Before `min_tokens`, end tokens and `stop_token_ids` are masked, as in vLLM (MinTokensLogitsProcessor).
        self._min_tokens = params.min_tokens
        self._early = np.array(sorted({*own_ends, *params.stop_token_ids}), np.intp)
        self._late = np.array(sorted(own_ends) if params.ignore_eos else (), np.intp)

    def restrict(self, logits: Floats, written: int) -> Floats:
        """Return logits (V,) with masked ends, copied if changed."""
        masked = self._early if written < self._min_tokens else self._late
        if not len(masked):
            return logits
        restricted = logits.copy()
        restricted[masked] = -np.inf
        return restricted


def answer_end_for(params: SamplingParams, own_ends: Collection[int]) -> AnswerEnd | None:
    """Return a mask, or None if unneeded."""
    return AnswerEnd(params, own_ends) if params.min_tokens or params.ignore_eos else None
