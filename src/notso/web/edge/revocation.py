"""Connections of running requests, which are closed when the key of the request is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextvars import Context

from starlette.types import Scope

from notso.web.edge.connections import ClientConnection, connection_of
from notso.web.values.errors import StorageError

# Interval at which the keys of running requests are looked up. Another process may have revoked them.
CHECK_SECONDS = 1.0


class KeyWatch:
    """Use on the event loop. `valid_ids` returns the ids of the valid keys, and may raise StorageError."""

    # All keys are looked up with one query: many keys cost little, and a database that does not respond is waited for
    # once per check.
    def __init__(self, valid_ids: Callable[[Collection[str]], Awaitable[set[str]]]) -> None:
        self._valid_ids = valid_ids
        self._running: dict[object, tuple[ClientConnection, str]] = {}  # by uvicorn's object for the response
        self._task: asyncio.Task[None] | None = None

    def add(self, scope: Scope, key_id: str) -> None:
        """Watch the key of a request until its response is complete."""
        connection = connection_of(scope)
        if connection is None:
            return
        self._running[connection.cycle] = connection, key_id
        if self._task is None:
            # An empty context, because the task outlives the request.
            self._task = asyncio.create_task(self._check_periodically(), context=Context())

    async def _check_periodically(self) -> None:
        try:
            while self._running:
                await asyncio.sleep(CHECK_SECONDS)
                self._running = {cycle: each for cycle, each in self._running.items() if each[0].is_answering(cycle)}
                if key_ids := {key_id for _, key_id in self._running.values()}:
                    await self._close_revoked(key_ids)
        finally:
            self._task = None  # the next request starts it again, even after an unexpected error

    async def _close_revoked(self, key_ids: set[str]) -> None:
        try:
            revoked = key_ids - await self._valid_ids(key_ids)
        except (StorageError, RuntimeError):  # RuntimeError: no thread could be started. The next check finds out.
            return
        for cycle, (connection, key_id) in self._running.items():
            if key_id in revoked and connection.is_answering(cycle):
                connection.transport.close()
