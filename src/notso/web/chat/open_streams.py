"""How many event streams each owner holds open, so that one cannot take them all."""

from __future__ import annotations

from collections import Counter


class OpenStreams:
    """Counts streams by owner. Everything here runs on the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def full(self, owner: str) -> bool:
        """Whether the owner has as many as allowed."""
        return self._open[owner] >= self._most

    def opened(self, owner: str) -> None:
        """One more."""
        self._open[owner] += 1

    def closed(self, owner: str) -> None:
        """One fewer."""
        self._open[owner] -= 1
        if self._open[owner] <= 0:
            del self._open[owner]
