"""When a token must not end an answer yet."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.values.sampling_params import SamplingParams


class AnswerEnd:
    """Keeps tokens that would end an answer from coming.

    Before `min_tokens` neither the model's own ends nor `stop_token_ids` come, as in vLLM (`MinTokensLogitsProcessor`).
    With `ignore_eos` the model's own never do, as in llama.cpp, where they are biased away; the text is the model's
    second choice, and has no gap where an end was.
    """

    def __init__(self, params: SamplingParams, own_ends: Collection[int]) -> None:
        self._min_tokens = params.min_tokens
        self._early = np.array(sorted({*own_ends, *params.stop_token_ids}), np.intp)
        self._late = np.array(sorted(own_ends) if params.ignore_eos else (), np.intp)

    def restrict(self, logits: Floats, written: int) -> Floats:
        """Logits (V,) behind `written` tokens, minus infinity where the answer must not end; a copy if any are."""
        masked = self._early if written < self._min_tokens else self._late
        if not len(masked):
            return logits
        restricted = logits.copy()
        restricted[masked] = -np.inf
        return restricted


def answer_end_for(params: SamplingParams, own_ends: Collection[int]) -> AnswerEnd | None:
    """What holds an answer's end back; None where nothing does."""
    return AnswerEnd(params, own_ends) if params.min_tokens or params.ignore_eos else None
