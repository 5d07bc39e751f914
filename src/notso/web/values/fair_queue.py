"""Schedule work fairly by owner (user or API key), in a pool that keeps working if threads are scarce."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

MAX_OVERLOAD = 4
"""When the capacity is used up, an owner that has less than an equal share of it may still add work, until the total
reaches this multiple of the capacity."""


def has_capacity(taken: Mapping[str, int], owner: str, most: int) -> bool:
    """Return whether an owner may take another slot. `most` is the capacity."""
    total, share = sum(taken.values()), max(1, most // len({*taken, owner}))
    return total < most or (taken.get(owner, 0) < share and total < MAX_OVERLOAD * most)


class FairQueue:
    """Run work of several owners in turn. Use only on the event loop.

    With several threads, no owner occupies all of them.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._threads = WorkerThreads(threads, thread_name_prefix=name)
        self._most = threads
        self._most_of_one = max(1, threads - 1)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> dict[str, int]:
        counts = {owner: sum(not each.done() for each in queue) for owner, queue in self._waiting.items()}
        return {owner: count for owner, count in counts.items() if count}

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread when it is the owner's turn. Canceled work that has not started is dropped."""
        await self._acquire(owner)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        except BaseException:  # no thread could be started, so free the slot
            self._release(owner)
            raise
        running.add_done_callback(lambda done: self._on_done(owner, done))
        return await asyncio.shield(running)  # shielded, because a thread cannot be canceled and keeps its slot

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the owner's turn and hold it during the `async with` block, which can call `work`."""
        await self._acquire(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def work(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, within a turn."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)

    async def join(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        """Cancel waiting calls and start no more work."""
        for queue in self._waiting.values():
            for each in queue:
                each.cancel()
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, owner: str, done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # mark the exception as retrieved, because the caller may have been canceled
        self._release(owner)

    async def _acquire(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._idle.clear()
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn was granted, but is not used
                self._release(owner)
            raise

    def _release(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if owner in self._waiting:
            self._waiting.move_to_end(owner)  # behind owners that have arrived in the meantime
        self._start_next()

    def _start_next(self) -> None:
        while self._running.total() < self._most and (owner := self._next_owner()) is not None:
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all other owners
            if not turn.done():
                self._running[owner] += 1
                turn.set_result(None)
        if not self._waiting and not self._running:
            self._idle.set()

    def _next_owner(self) -> str | None:
        # Returns the owner with the least running work or, of several such owners, the one that has waited longest.
        free = (owner for owner in self._waiting if self._running[owner] < self._most_of_one)
        return min(free, key=self._running.__getitem__, default=None)


class WorkerThreads(ThreadPoolExecutor):
    """Thread pool that keeps working when no more threads can be started.

    If a thread cannot be started, this pool raises RuntimeError only if it has no threads at all.
    """

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self, work)

    def _adjust_thread_count(self) -> None:
        # Called by `submit`, under its lock, after the work has been queued.
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if self._threads:
                return
            self._work_queue.get_nowait()  # the work of this call: without threads, the queue has no other items
            raise
