"""Fair turns among owners: one with nothing running goes before another one's second, and finds a place."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

BEYOND = 4
"""So many times the places there are may be taken, by owners who hold less than their share."""


def has_room(held: Mapping[str, int], owner: str, most: int) -> bool:
    """Whether an owner may hold one more of `most` places: one alone may have all, and where all are taken, one who
    holds less than an equal share of them finds room beyond. `held`: what each holds, above 0."""
    total, share = sum(held.values()), max(1, most // len({*held, owner}))
    return total < most or (held.get(owner, 0) < share and total < BEYOND * most)


class FairQueue:
    """Work of owners, in turns. Used on the event loop.

    However much one asks for, another waits for one piece of it at
    most; of several threads one owner alone never has all, so what comes from another begins at once.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads
        self._most_of_one = max(1, threads - 1)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> dict[str, int]:
        """How much of each owner waits for its turn."""
        counts = {owner: sum(not each.done() for each in queue) for owner, queue in self._waiting.items()}
        return {owner: count for owner, count in counts.items() if count}

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in a thread when it is this owner's turn. Work nobody waits for is
        dropped."""
        await self._acquire(owner)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        except BaseException:  # no thread can be started, for want of memory: the next may find one
            self._release(owner)
            raise
        running.add_done_callback(lambda done: self._ended(owner, done))
        return await asyncio.shield(running)  # a thread is not free before it is done

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """While it lasts, it is this owner's turn: what is done within may be `work`."""
        await self._acquire(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def work(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in a thread; within a turn."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)

    async def join(self) -> None:
        """Return when nothing waits or runs."""
        await self._idle.wait()

    def close(self) -> None:
        """Nothing more is begun, and nobody waits any longer."""
        for queue in self._waiting.values():
            for each in queue:
                each.cancel()
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, owner: str, done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # nobody may be there any more to be told
        self._release(owner)

    async def _acquire(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._idle.clear()
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came, and nobody takes it
                self._release(owner)
            raise

    def _release(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if owner in self._waiting:
            self._waiting.move_to_end(owner)  # behind those who came while it had its turn
        self._next()

    def _next(self) -> None:
        while self._running.total() < self._most and (owner := self._next_owner()) is not None:
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all others
            if not turn.done():
                self._running[owner] += 1
                turn.set_result(None)
        if not self._waiting and not self._running:
            self._idle.set()

    def _next_owner(self) -> str | None:
        """The one with the least running; of equals the one that has waited for its turn for longest."""
        free = (owner for owner in self._waiting if self._running[owner] < self._most_of_one)
        return min(free, key=self._running.__getitem__, default=None)
