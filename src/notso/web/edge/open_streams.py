"""Limit of open event streams per owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

from fastapi.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from notso.web.values.errors import Problem
from notso.web.values.wording import words


class OpenStreams:
    """Counts streams by owner. Use on the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def full(self, owner: str) -> bool:
        return self._open[owner] >= self._most

    def opened(self, owner: str) -> None:
        """Count a stream. Raise Problem (429) at the limit."""
        if self.full(owner):
            raise Problem(429, words["error_streams"], retry_after_seconds=5)
        self._open[owner] += 1

    def closed(self, owner: str) -> None:
        self._open[owner] -= 1
        if self._open[owner] <= 0:
            del self._open[owner]


class CountedStream(EventSourceResponse):
    """Event stream counted from construction until the reader disconnects.

    Raises Problem (429) at the limit.
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
