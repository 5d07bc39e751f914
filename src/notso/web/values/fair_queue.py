"""Work in threads, in fair turns: an owner with nothing running goes before another owner's second piece of work."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class FairQueue:
    """Used on the event loop. However much one owner asks for, another waits for one piece of it at most.

    An owner is whatever takes turns: a person, a chat. Of several threads one owner alone never has all: what comes
    from another owner meanwhile begins at once.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads
        self._most_of_one = max(1, threads - 1)
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in a thread when it is this owner's turn. Work nobody waits for is
        dropped."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((partial(copy_context().run, work), result))
        self._idle.clear()
        self._next()
        return await result

    async def join(self) -> None:
        """Return when nothing waits or runs."""
        await self._idle.wait()

    def close(self) -> None:
        """Nothing more is begun, and nobody waits any longer."""
        for queue in self._waiting.values():
            for _, result in queue:
                result.cancel()
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._running.total() < self._most and (owner := self._next_owner()) is not None:
            queue = self._waiting.pop(owner)
            work, result = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all others
            if not result.done():
                self._running[owner] += 1
                running = asyncio.get_running_loop().run_in_executor(self._threads, work)
                running.add_done_callback(partial(self._done, owner, result))
        if not self._waiting and not self._running:
            self._idle.set()

    def _next_owner(self) -> str | None:
        """The one with the least running; of equals the one that has waited for its turn for longest."""
        free = (owner for owner in self._waiting if self._running[owner] < self._most_of_one)
        return min(free, key=self._running.__getitem__, default=None)

    def _done(self, owner: str, result: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if done.cancelled():
            result.cancel()
        elif (error := done.exception()) is not None:
            if not result.done():
                result.set_exception(error)
        elif not result.done():
            result.set_result(done.result())
        self._next()
