"""How likely the model itself found a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from notso.smollm3.sampling.sampler import Floats, likeliest, log_probabilities
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.events import TokenLogprob


def token_logprob(tokenizer: Tokenizer, logits: Floats | None, token: int, alternatives: int) -> TokenLogprob:
    """The entry of `token`, drawn from logits (V,) as the model gave them, with the likeliest tokens there. None: it
    was written for the model, so it is certain, and nothing stands beside it.

    Raises EngineError if the logits are not finite.
    """
    if logits is None:
        return _entry(tokenizer, token, 0.0)
    values = log_probabilities(logits)
    entry = partial(_entry, tokenizer)
    top = tuple(entry(other, float(values[other])) for other in likeliest(values, alternatives))
    return entry(token, float(values[token]), top)


class PromptScores:
    """Log probabilities of a prompt's tokens, reported once each and in order."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._alternatives = alternatives
        self._reported = 0

    def take(self, start: int, logits: Floats) -> tuple[TokenLogprob, ...]:
        """The entries that logits (rows, V) after the prompt's tokens from `start` on make known. Raises EngineError if
        the logits are not finite."""
        entries = []
        if self._reported == 0:
            entries.append(_entry(self._tokenizer, self._prompt[0], math.nan))
            self._reported = 1
        for at, row in enumerate(logits, start + 1):
            if self._reported <= at < len(self._prompt):
                entries.append(token_logprob(self._tokenizer, row, self._prompt[at], self._alternatives))
                self._reported = at + 1
        return tuple(entries)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(tokenizer.token_text(token), tuple(tokenizer.token_bytes(token)), logprob, top, token)
