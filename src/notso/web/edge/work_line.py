"""Work that takes a core for a while, or much memory: one piece at a time, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from notso.smollm3 import give_back_freed
from notso.web.values.fair_queue import FairQueue, has_room
from notso.web.values.problems import Problem
from notso.web.values.wording import words

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""A body or a prompt beyond this waits in the line; what is smaller takes milliseconds, and waits for nothing."""

MOST_WAITING = 64
"""What waits is a body each, and bodies have a budget of their own: this bounds those that count little there."""

SMALL_THREADS = 4
"""Of each line, for small work: where a thread is held for long, no other line's work waits for it."""

RETRY_SECONDS = 5


class WorkLine:
    """Owners take turns; who finds too many waiting is refused. Called on the loop.

    The memory that such work takes is given back when it is done: the C library would keep it.
    """

    def __init__(self, name: str, most_waiting: int = MOST_WAITING, at_once: int = 1) -> None:
        self._queue = FairQueue(name, at_once)
        self._small = ThreadPoolExecutor(SMALL_THREADS, thread_name_prefix=f"{name}-small")
        self._most_waiting = most_waiting

    @property
    def waiting(self) -> int:
        """How much waits."""
        return sum(self._queue.waiting.values())

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Waits for this owner's turn. Raises Problem (429) where too many wait already."""
        if not has_room(self._queue.waiting, owner, self._most_waiting):
            raise Problem(429, words["error_line"], retry_after_seconds=RETRY_SECONDS)
        async with self._queue.turn(owner):
            yield

    async def work(self, work: Callable[[], T]) -> T:
        """Do it in the thread; within a turn."""
        return await self._queue.work(lambda: _then_give_back(work))

    async def run(self, work: Callable[[], T], size: int, owner: str) -> T:
        """Do it: in a turn of its own if it is of a large text, else at once in one of a few threads."""
        if size <= LARGE_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._small, copy_context().run, work)
        async with self.turn(owner):
            return await self.work(work)

    def close(self) -> None:
        """What has not begun is not done any more."""
        self._queue.close()
        self._small.shutdown(wait=False, cancel_futures=True)


def _then_give_back(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_back_freed()
