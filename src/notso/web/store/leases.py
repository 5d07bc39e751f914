"""Heartbeats that renew this process's leases and interrupt turns of processes that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from notso.web.store.protocol import HEARTBEAT_SECONDS, ChatStore, Orphan
from notso.web.values.errors import StorageError

logger = logging.getLogger("notso.web.store")
access_log = logging.getLogger("notso.access")


class RunningTurns(Protocol):
    """The turns that this process runs."""

    @property
    def generations(self) -> frozenset[str]: ...

    def stop(self, generation_id: str, *, interrupted: bool = False) -> bool: ...


class Leases:
    """Sends heartbeats. `at_orphan` is called in this process for each turn it interrupts."""

    def __init__(self, store: ChatStore, turns: RunningTurns) -> None:
        self.at_orphan: list[Callable[[Orphan], None]] = []
        self._store = store
        self._turns = turns
        self.failing = False  # whether the last heartbeat failed
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, if the store is shared."""
        if self._store.is_shared and self._beating is None:
            self._beating = asyncio.create_task(self._keep())

    def stop(self) -> None:
        """Stop, after all turns have ended."""
        if self._beating is not None:
            self._beating.cancel()

    async def _keep(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def beat(self) -> None:
        """Send one heartbeat."""
        try:
            found = await self._store.heartbeat(self._turns.generations)
        except (StorageError, RuntimeError) as error:  # RuntimeError: no thread could be started
            if not self.failing:
                logger.warning("leases could not be renewed: %s", error)
            self.failing = True
            return
        if self.failing:
            logger.warning("leases are renewed again")
        self.failing = False
        for generation_id in found.lost:
            # Another process declared the turn lost, and its chat may have continued.
            self._turns.stop(generation_id, interrupted=True)
        for orphan in found.orphans:
            access_log.info("turn interrupted: the server that generated it stopped renewing its lease")
            for tell in self.at_orphan:
                tell(orphan)
