"""People and keys in the PostgreSQL database that holds the conversations: one of all servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from notso.web.store.postgres.connection import AWAY, MOST_SECONDS, Connections
from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sql.database import Statements
from notso.web.values.errors import StorageError

T = TypeVar("T")

ACCESS_THREADS = 2  # keys are looked up at each request: none waits for usage to be written


class PostgresAccessStore(SQLAccessStore):
    """An AccessStore over those `connections`, which others may use, too. Threads of its own use them, so that nobody's
    key waits behind conversations."""

    NOW_MS = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"
    ALONE = "SELECT pg_advisory_xact_lock(hashtextextended(?, 36))"

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._threads = ThreadPoolExecutor(ACCESS_THREADS, thread_name_prefix="notso-access")
        self._is_open = False

    async def open(self) -> None:
        """Reach the database, bring its schema up to date. Opening an open store does nothing."""
        if not self._is_open:
            await self._in_thread(self._connections.open)
            self._is_open = True

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._in_thread(self._connections.close)
        self._threads.shutdown()

    async def write(self, work: Callable[[Statements], T]) -> T:
        return await self._soon(lambda: self._connections.write(work))

    async def look(self, work: Callable[[Statements], T]) -> T:
        return await self._soon(lambda: self._connections.look(work))

    async def _soon(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises StorageError where the database hangs and no heartbeat has broken that off."""
        try:
            async with asyncio.timeout(MOST_SECONDS):
                return await self._in_thread(work)
        except TimeoutError:
            self._connections.cut_off()
            raise StorageError(AWAY) from None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
