"""Connections of running requests, which are closed when the key of the request is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Scope

from notso.web.edge.connections import ClientConnection, connection_of
from notso.web.values.errors import StorageError

# Interval at which the keys of running requests are looked up. Another process may have revoked them.
CHECK_SECONDS = 1.0


class KeyWatch:
    """Use on the event loop. `is_valid` looks up a key by its id, and may raise StorageError."""

    def __init__(self, is_valid: Callable[[str], Awaitable[bool]]) -> None:
        self._is_valid = is_valid
        self._running: dict[object, tuple[ClientConnection, str]] = {}  # by uvicorn's object for the response
        self._task: asyncio.Task[None] | None = None

    def add(self, scope: Scope, key_id: str) -> None:
        """Watch the key of a request until its response is complete."""
        connection = connection_of(scope)
        if connection is None:
            return
        self._running[connection.cycle] = connection, key_id
        if self._task is None:
            self._task = asyncio.create_task(self._check_periodically())

    async def _check_periodically(self) -> None:
        while self._running:
            await asyncio.sleep(CHECK_SECONDS)
            self._running = {cycle: each for cycle, each in self._running.items() if each[0].is_answering(cycle)}
            for key_id in {key_id for _, key_id in self._running.values()}:
                if not await self._is_still_valid(key_id):
                    self._close(key_id)
        self._task = None

    async def _is_still_valid(self, key_id: str) -> bool:
        try:
            return await self._is_valid(key_id)
        except (StorageError, RuntimeError):  # RuntimeError: no thread could be started. The next check finds out.
            return True

    def _close(self, key_id: str) -> None:
        for cycle, (connection, used) in list(self._running.items()):
            if used == key_id and connection.is_answering(cycle):
                connection.transport.close()
