"""Which tokens a growing text came from."""

from __future__ import annotations

from collections import deque

from notso.smollm3.output.lookahead import Span
from notso.smollm3.values.events import TokenLogprob

Share = tuple[int, TokenLogprob | None]
"""So many characters of a text, and the entry of the token that they came from, once."""


class LogprobAlignment:
    """The tokens of a text in order; a span of the text that is shown takes the entries of its tokens along.

    An entry goes with the first shown character of its token. A token that completes no character belongs to the
    character it has a part in. The entry of a token of which nothing is shown goes with the next span, or is left over.
    """

    def __init__(self) -> None:
        self._end = 0
        self._tokens: deque[tuple[int, int, TokenLogprob | None]] = deque()  # where it begins, characters, entry

    def add(self, length: int, entry: TokenLogprob | None) -> None:
        """The text has grown by `length` characters of one token."""
        self._tokens.append((self._end, length, entry))
        self._end += length

    def rest(self) -> list[TokenLogprob]:
        """The entries that no span took along."""
        return [entry for _, _, entry in self._tokens if entry is not None]

    def take(self, span: Span) -> list[Share]:
        """What a span came from, and before that the entries that lie between it and the span before. Spans are taken
        in order."""
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
