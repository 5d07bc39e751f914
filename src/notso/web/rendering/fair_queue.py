"""Rendering in turn: one thread, and each chat's next piece of work after one of every other chat that waits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class FairQueue:
    """Used on the event loop. However much one chat has to be rendered, another waits for one piece of it at most.

    One thread: Python runs one at a time anyway, and a second one only takes turns from the loop.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="notso-render")
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()
        self._working = False

    async def run(self, chat_id: str, work: Callable[[], T]) -> T:
        """What `work` returns, called in the thread when it is this chat's turn. Work nobody waits for is dropped."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(chat_id, deque()).append((partial(copy_context().run, work), result))
        if not self._working:
            self._next()
        return await result

    def close(self) -> None:
        """Nothing more is begun, and nobody waits any longer."""
        for queue in self._waiting.values():
            for _, result in queue:
                result.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        self._working = False
        while self._waiting and not self._working:
            chat_id, queue = self._waiting.popitem(last=False)
            work, result = queue.popleft()
            if queue:
                self._waiting[chat_id] = queue  # behind all others
            if not result.done():
                self._working = True
                running = asyncio.get_running_loop().run_in_executor(self._thread, work)
                running.add_done_callback(lambda done, result=result: self._done(done, result))  # type: ignore[misc]

    def _done(self, done: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:
        if done.cancelled():
            result.cancel()
        elif (error := done.exception()) is not None:
            if not result.done():
                result.set_exception(error)
        elif not result.done():
            result.set_result(done.result())
        self._next()
