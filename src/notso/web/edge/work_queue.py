"""Queue for CPU- or memory-intensive work, which runs in a separate thread, by default one item at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from typing import TypeVar

from notso.smollm3 import release_freed_memory
from notso.web.values.errors import Problem
from notso.web.values.fair_queue import FairQueue, WorkerThreads, has_capacity
from notso.web.values.wording import words

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Work on inputs above this size is queued. Smaller inputs take only milliseconds, so they are not queued."""

MOST_WAITING = 64
"""Capacity of the queue. When it is full, an owner with less than an equal share of it may still add items
(`has_capacity`)."""

SMALL_THREADS = 4
"""Threads per queue for work on small inputs. Queues do not share threads, so that blocked threads do not delay other
queues."""

RETRY_SECONDS = 5


class WorkQueue:
    """Length-limited queue that serves owners in turn. Use on the event loop."""

    def __init__(self, name: str, most_waiting: int = MOST_WAITING, at_once: int = 1) -> None:
        self._queue = FairQueue(name, at_once)
        self._small = WorkerThreads(SMALL_THREADS, thread_name_prefix=f"{name}-small")
        self._most_waiting = most_waiting

    @property
    def waiting(self) -> int:
        return sum(self._queue.waiting.values())

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the owner's turn. Raises Problem (429) if the queue is full."""
        if not has_capacity(self._queue.waiting, owner, self._most_waiting):
            raise Problem(429, words["error_line"], retry_after_seconds=RETRY_SECONDS)
        async with self._queue.turn(owner):
            yield

    async def work(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the queue. Call only within `turn`."""

        def run() -> T:
            try:
                return work()
            finally:
                release_freed_memory()  # otherwise, the C library would keep the memory that the work freed

        return await self._queue.work(run)

    async def run(self, work: Callable[[], T], size: int, owner: str) -> T:
        """Run `work` on an input of `size` bytes: in the owner's `turn` if large, else in a thread for small work."""
        if size <= LARGE_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._small, copy_context().run, work)
        async with self.turn(owner):
            return await self.work(work)

    def close(self) -> None:
        self._queue.close()
        self._small.shutdown(wait=False, cancel_futures=True)
