"""Buffer for the end of a text stream, which is held back until it can be classified."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Span(str):
    """Text with its start position in the stream."""

    __slots__ = ("start",)
    start: int

    def __new__(cls, text: str, start: int) -> Span:
        span = super().__new__(cls, text)
        span.start = start
        return span


class Lookahead:
    """The unclassified end of a text stream."""

    def __init__(self) -> None:
        self.text = ""
        self.start = 0

    def add(self, text: str) -> None:
        self.text += text

    def pop_text(self, length: int) -> Span:
        span = Span(self.text[:length], self.start)
        self.drop(length)
        return span

    def drop(self, length: int) -> None:
        self.text = self.text[length:]
        self.start += length

    def drop_newlines(self) -> None:
        self.drop(len(self.text) - len(self.text.lstrip("\n")))


def pending_length(text: str, patterns: Iterable[str]) -> int:
    """Return the length of the longest suffix of `text` that may be a pattern's beginning."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(text), len(pattern) - 1), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest


class StopStrings:
    """Filter that passes only the text before the first stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = sorted(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=1)
        self._lookahead = Lookahead()
        self.matched: str | None = None

    def push(self, text: str) -> tuple[Span, bool]:
        if self.matched is not None:
            return self._lookahead.pop_text(0), True
        self._lookahead.add(text)
        pending = self._lookahead.text
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            # The match that ends first is used, or the longest if several end there. The result therefore does not
            # depend on how the text is divided into chunks.
            end, start = min(found)
            shown, self.matched = self._lookahead.pop_text(start), pending[start:end]
            self._lookahead.drop(len(self._lookahead.text))
            return shown, True
        return self._lookahead.pop_text(len(pending) - self._pending_length(pending)), False

    def _pending_length(self, text: str) -> int:
        # In the sorted list, a stop string that begins with `end` is at the index where `bisect` would insert `end`.
        # The cost hardly depends on the number of stop strings.
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            at = bisect_left(self._stops, end)
            if at < len(self._stops) and self._stops[at].startswith(end):
                return len(end)
        return 0

    def pass_through(self, text: str) -> Span:
        self._lookahead.add(text)
        return self._lookahead.pop_text(len(self._lookahead.text))

    def finish(self) -> Span:
        return self._lookahead.pop_text(len(self._lookahead.text))
