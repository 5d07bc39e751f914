"""Alignment of log probabilities with the text they produced."""

from __future__ import annotations

from collections import deque

from notso.smollm3.output.lookahead import Span
from notso.smollm3.values.events import TokenLogprob

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
