"""Log probabilities of generated and prompt tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from notso.smollm3.sampling.sampler import Floats, likeliest, log_probabilities
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.events import TokenLogprob


def token_logprob(tokenizer: Tokenizer, logits: Floats | None, token: int, alternatives: int) -> TokenLogprob:
    """Return a token's entry from logits (V,). Raises EngineError if not finite."""
    # Tokens written on the model's behalf are certain.
    if logits is None:
        return _entry(tokenizer, token, 0.0)
    values = log_probabilities(logits)
    entry = partial(_entry, tokenizer)
    top = tuple(entry(other, float(values[other])) for other in likeliest(values, alternatives))
    return entry(token, float(values[token]), top)


class PromptScores:
    """Log probabilities of a prompt, reported once."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._alternatives = alternatives
        self._reported = 0

    def take(self, start: int, logits: Floats) -> tuple[TokenLogprob, ...]:
        """Return new entries from logits (rows, V). Raises EngineError if not finite."""
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
