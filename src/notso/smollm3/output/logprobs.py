"""Log probabilities of generated and prompt tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial

from notso.smollm3.output.lookahead import Span
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


# Number of characters, and the entry of the token that produced them, reported once.
Share = tuple[int, TokenLogprob | None]


class LogprobAlignment:
    """Maps text spans to their tokens' entries."""

    # An entry goes with its token's first shown character. A token that completes no character belongs to the character
    # it is part of. Entries of hidden tokens go with the next span, or remain.
    def __init__(self) -> None:
        self._end = 0
        self._tokens: deque[tuple[int, int, TokenLogprob | None]] = deque()  # start, length, entry

    def add(self, length: int, entry: TokenLogprob | None) -> None:
        """Append one token's characters."""
        self._tokens.append((self._end, length, entry))
        self._end += length

    def rest(self) -> list[TokenLogprob]:
        """Return the remaining entries."""
        return [entry for _, _, entry in self._tokens if entry is not None]

    def take_rest(self) -> list[TokenLogprob]:
        """Return the remaining entries, once."""
        rest = self.rest()
        self._tokens = deque((start, length, None) for start, length, _ in self._tokens)
        return rest

    def take(self, span: Span) -> list[Share]:
        """Return the shares of a span and of the gap before it; spans must be in order."""
        shares: list[Share] = []
        end = span.start + len(span)
        while self._tokens and self._tokens[0][0] < end:
            at, length, entry = self._tokens.popleft()
            shared = max(0, min(at + length, end) - max(at, span.start))
            if shared or entry is not None:
                shares.append((shared, entry))
                entry = None
            if at + length > end:
                self._tokens.appendleft((end, at + length - end, entry))
        return shares
