"""How likely the model itself found a token."""

from __future__ import annotations

from functools import partial

from notso.smollm3.sampling.sampler import Floats, likeliest, log_probabilities
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.events import TokenLogprob


def token_logprob(tokenizer: Tokenizer, logits: Floats, token: int, alternatives: int) -> TokenLogprob:
    """The entry of `token`, drawn from logits (V,) as the model gave them, with the likeliest tokens there.

    Raises EngineError if the logits are not finite.
    """
    values = log_probabilities(logits)
    entry = partial(_entry, tokenizer)
    top = tuple(entry(other, float(values[other])) for other in likeliest(values, alternatives))
    return entry(token, float(values[token]), top)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(tokenizer.token_text(token), tuple(tokenizer.token_bytes(token)), logprob, top)
