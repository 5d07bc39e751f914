"""Stop strings: where an answer ends because of its text."""

from __future__ import annotations

from collections.abc import Sequence

from notso.smollm3.held_text import pending_length


class StopStrings:
    """Fed with an answer's text in pieces of any size; lets through what is certainly before the first stop string.

    The first is the one that is complete first, and of those complete at the same character the longest; so it makes
    no difference how the text was cut. Nothing of it, nor anything after it, comes out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text to show now, and whether the answer ends here."""
        if self._stopped:
            return "", True
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            shown, self._held, self._stopped = self._held[:start], "", True
            return shown, True
        shown = self._held[: len(self._held) - pending_length(self._held, self._stops)]
        self._held = self._held[len(shown) :]
        return shown, False

    def finish(self) -> str:
        """The text held back when the answer ends otherwise: it was no stop string after all."""
        shown, self._held = self._held, ""
        return shown
