"""Stop strings: where an answer ends because of its text."""

from __future__ import annotations

from collections.abc import Sequence

from notso.smollm3.output.lookahead import Lookahead, Span, pending_length


class StopStrings:
    """Fed with an answer's text in pieces of any size; lets through what is certainly before the first stop string.

    The first is the one that is complete first, and of those complete at the same character the longest; so it makes
    no difference how the text was cut. Nothing of it, nor anything after it, comes out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
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
        return self._lookahead.give(len(pending) - pending_length(pending, self._stops)), False

    def skip(self, text: str) -> Span:
        """`text`, which is shown whatever it holds; nothing is held back when it comes."""
        self._lookahead.add(text)
        return self._lookahead.give(len(self._lookahead.text))

    def finish(self) -> Span:
        """The text held back when the answer ends otherwise: it was no stop string after all."""
        return self._lookahead.give(len(self._lookahead.text))
