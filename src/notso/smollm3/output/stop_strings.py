"""Stop strings: where an answer ends because of its text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from notso.smollm3.output.lookahead import Lookahead, Span


class StopStrings:
    """Fed with an answer's text in pieces of any size; lets through what is certainly before the first stop string.

    The first is the one that is complete first, and of those complete at the same character the longest; so it makes
    no difference how the text was cut. Nothing of it, nor anything after it, comes out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = sorted(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=1)
        self._lookahead = Lookahead()
        self.matched: str | None = None  # the one that was found

    def push(self, text: str) -> tuple[Span, bool]:
        """The text to show now, and whether the answer ends here."""
        if self.matched is not None:
            return self._lookahead.give(0), True
        self._lookahead.add(text)
        pending = self._lookahead.text
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            end, start = min(found)
            shown, self.matched = self._lookahead.give(start), pending[start:end]
            self._lookahead.drop(len(self._lookahead.text))
            return shown, True
        return self._lookahead.give(len(pending) - self._pending_length(pending)), False

    def _pending_length(self, text: str) -> int:
        """Length of the longest end of `text`, which holds no stop string, with which one begins: what begins with it
        stands behind it in their order, so many of them cost little more than one."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            at = bisect_left(self._stops, end)
            if at < len(self._stops) and self._stops[at].startswith(end):
                return len(end)
        return 0

    def skip(self, text: str) -> Span:
        """`text`, which is shown whatever it holds; nothing is held back when it comes."""
        self._lookahead.add(text)
        return self._lookahead.give(len(self._lookahead.text))

    def finish(self) -> Span:
        """The text held back when the answer ends otherwise: it was no stop string after all."""
        return self._lookahead.give(len(self._lookahead.text))
