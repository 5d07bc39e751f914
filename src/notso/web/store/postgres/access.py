"""API keys and usage in PostgreSQL, shared by all servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from notso.web.store.postgres.connection import AWAY, MOST_SECONDS, Connections
from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sql.database import Statements
from notso.web.values.errors import StorageError
from notso.web.values.worker_threads import WorkerThreads

T = TypeVar("T")

ACCESS_THREADS = 2  # so that no request's key lookup waits for a write of usage


class PostgresAccessStore(SQLAccessStore):
    """An AccessStore over shared `connections`."""

    NOW_MS = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"
    ALONE = "SELECT pg_advisory_xact_lock(hashtextextended(?, 36))"

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        # Threads of its own, so that key lookups do not queue behind conversations.
        self._threads = WorkerThreads(ACCESS_THREADS, thread_name_prefix="notso-access")
        self._is_open = False

    async def open(self) -> None:
        """Connect and migrate the schema. Idempotent."""
        if not self._is_open:
            await self._threads.run(self._connections.open)
            self._is_open = True

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._threads.run(self._connections.close)
        self._threads.shutdown()

    async def write(self, work: Callable[[Statements], T]) -> T:
        return await self._soon(lambda: self._connections.write(work))

    async def look(self, work: Callable[[Statements], T]) -> T:
        return await self._soon(lambda: self._connections.look(work))

    async def _soon(self, work: Callable[[], T]) -> T:
        try:
            # The last resort: heartbeats of the other store usually break hanging work off earlier.
            async with asyncio.timeout(MOST_SECONDS):
                return await self._threads.run(work)
        except TimeoutError:
            self._connections.cut_off()
            raise StorageError(AWAY) from None
