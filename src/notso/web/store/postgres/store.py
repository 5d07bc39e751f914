"""ChatStore in a PostgreSQL database that several processes share."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from notso.web.store.postgres.connection import AWAY, HANG_SECONDS, MOST_SECONDS, PostgresDatabase, PostgresPool
from notso.web.store.protocol import BACKUP_ELSEWHERE, Heartbeat
from notso.web.store.sql.access import SQLAccessStore
from notso.web.store.sql.database import Database, SQLConnection
from notso.web.store.sql.store import SQLStore
from notso.web.values.errors import DataDirectoryBusyError, StorageError
from notso.web.values.fair_queue import FairQueue, WorkerThreads

T = TypeVar("T")

WRITE_THREADS = 4
READ_THREADS = 4
LEASE_THREADS = 1  # heartbeats have their own thread, so that they do not wait for other work


class PostgresStore(SQLStore):
    is_shared = True

    def __init__(self, url: str) -> None:
        super().__init__()
        most = WRITE_THREADS + READ_THREADS + LEASE_THREADS + ACCESS_THREADS
        self._connections = PostgresPool(url, most, uuid.uuid4().hex)
        self._writes = FairQueue("notso-db-write", WRITE_THREADS)
        self._reads = FairQueue("notso-db-read", READ_THREADS)
        self._lease_thread = WorkerThreads(LEASE_THREADS, thread_name_prefix="notso-db-lease")
        self._is_open = False

    def access(self) -> PostgresAccessStore:
        return PostgresAccessStore(self._connections)

    async def open(self) -> None:
        if not self._is_open:
            await self._lease_thread.run(self._connections.open)
            self._is_open = True
            # Only this process's lease is renewed here. When the lease of a process that has exited expires, a
            # heartbeat handles the answers of that process.
            await self._lease_thread.run(lambda: self._connections.write(PostgresDatabase.renew))

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                async with _abort_if_hung(self._connections, HANG_SECONDS):
                    await self._lease_thread.run(lambda: self._connections.write(PostgresDatabase.release_lease))
            except StorageError:
                pass  # the database is not responding; the lease will expire
            finally:
                await self._lease_thread.run(self._connections.close)
        self._writes.close()
        self._reads.close()
        self._lease_thread.shutdown()

    async def heartbeat(
        self, running: frozenset[str], known: frozenset[str] | None = None, *, is_leaving: bool = False
    ) -> Heartbeat:
        self._connections.break_connections(MOST_SECONDS)
        async with _abort_if_hung(self._connections, HANG_SECONDS):
            result = await self._lease_thread.run(
                lambda: self._connections.write(lambda db: db.heartbeat(running, known, is_leaving=is_leaving))
            )
        return result

    async def require_exclusive_use(self) -> None:
        if await self._lease_thread.run(lambda: self._connections.run_read(PostgresDatabase.count_other_processes)):
            raise DataDirectoryBusyError("a server is using the database: stop it first")
        await self.heartbeat(frozenset())

    async def backup(self, target: Path) -> None:
        raise StorageError(BACKUP_ELSEWHERE)

    async def write(self, work: Callable[[Database], T], owner: str = "") -> T:
        return await self._writes.run(owner, lambda: self._connections.write(work))

    async def run_read(self, work: Callable[[Database], T], owner: str = "") -> T:
        return await self._reads.run(owner, lambda: self._connections.run_read(work))


ACCESS_THREADS = 2  # more than one, so that key lookups do not wait for usage writes


class PostgresAccessStore(SQLAccessStore):
    NOW_MS = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"
    LOCK_OWNER = "SELECT pg_advisory_xact_lock(hashtextextended(?, 36))"

    def __init__(self, connections: PostgresPool) -> None:
        self._connections = connections
        # Separate threads, so that key lookups do not wait for work on chats.
        self._threads = WorkerThreads(ACCESS_THREADS, thread_name_prefix="notso-access")
        self._is_open = False

    async def open(self) -> None:
        if not self._is_open:
            await self._threads.run(self._connections.open)
            self._is_open = True

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._threads.run(self._connections.close)
        self._threads.shutdown()

    async def write(self, work: Callable[[SQLConnection], T]) -> T:
        return await self._run(lambda: self._connections.write(work))

    async def run_read(self, work: Callable[[SQLConnection], T]) -> T:
        return await self._run(lambda: self._connections.run_read(work))

    async def _run(self, work: Callable[[], T]) -> T:
        # This is a last resort: the heartbeats of PostgresStore usually abort hanging work earlier.
        async with _abort_if_hung(self._connections, MOST_SECONDS):
            result = await self._threads.run(work)
        return result


@contextlib.asynccontextmanager
async def _abort_if_hung(pool: PostgresPool, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        pool.break_connections()
        raise StorageError(AWAY) from None
