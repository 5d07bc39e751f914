"""How many event streams each owner holds open, so that one cannot take them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

from fastapi.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from notso.web.values.problems import Problem
from notso.web.values.wording import words


class OpenStreams:
    """Counts streams by owner. Everything here runs on the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def full(self, owner: str) -> bool:
        """Whether the owner has as many as allowed."""
        return self._open[owner] >= self._most

    def opened(self, owner: str) -> None:
        """One more. Raises Problem (429) where that would be one too many."""
        if self.full(owner):
            raise Problem(429, words["error_streams"], retry_after_seconds=5)
        self._open[owner] += 1

    def closed(self, owner: str) -> None:
        """One fewer."""
        self._open[owner] -= 1
        if self._open[owner] <= 0:
            del self._open[owner]


class CountedStream(EventSourceResponse):
    """A stream of events that counts from when it is made, before its first byte, until its reader is gone.

    Raises Problem (429).
    """

    def __init__(self, streams: OpenStreams, owner: str, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"X-Accel-Buffering": "no"})
        self._streams, self._owner = streams, owner
        streams.opened(owner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.closed(self._owner)
