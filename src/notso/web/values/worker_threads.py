"""Thread pool for times when the system refuses new threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkerThreads(ThreadPoolExecutor):
    """Runs work in the threads there are when no more can be started; raises RuntimeError if there is none.

    The standard pool raises in both cases, although the work is queued and runs later.
    """

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self, work)

    def _adjust_thread_count(self) -> None:
        # Called by `submit`, under its lock, after the work was queued.
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if self._threads:
                return
            self._work_queue.get_nowait()  # the work of this call: without threads, no earlier one is left
            raise
