"""A few turns at a time, given to owners one after another: who has none running comes before another's second."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from notso.web.values.problems import Problem
from notso.web.values.wording import words

RETRY_SECONDS = 5


class FairTurns:
    """On the event loop. At most `at_once` turns are taken, one of them by each owner; `most_waiting` of an owner wait.

    However much one owner wants, another waits for what runs now, and for no more than one turn of each other owner.
    """

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._free = at_once
        self._most_waiting = most_waiting
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._taken: set[str] = set()

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn. Raises Problem (429) where too many of this owner wait already."""
        queue = self._waiting.setdefault(owner, deque())
        if len(queue) >= self._most_waiting:
            raise Problem(429, words["error_line"], retry_after_seconds=RETRY_SECONDS)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._give()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given at the same moment
                self._end(owner)
            elif place in queue:
                queue.remove(place)
            raise
        try:
            yield
        finally:
            self._end(owner)

    def _end(self, owner: str) -> None:
        self._free += 1
        self._taken.discard(owner)
        if owner in self._waiting:
            self._waiting.move_to_end(owner)
        self._give()

    def _give(self) -> None:
        for owner in list(self._waiting):
            queue = self._waiting[owner]
            while queue and queue[0].cancelled():  # nobody waits there any more
                queue.popleft()
            if not queue:
                del self._waiting[owner]
            elif self._free and owner not in self._taken:
                self._free -= 1
                self._taken.add(owner)
                queue.popleft().set_result(None)
