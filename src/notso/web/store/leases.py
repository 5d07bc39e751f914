"""Heartbeats: this process's turns stay its own, and those of processes that have gone are interrupted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from notso.web.store.protocol import HEARTBEAT_SECONDS, ChatStore, Orphan
from notso.web.values.errors import StorageError

logger = logging.getLogger("notso.web.store")


class RunningTurns(Protocol):
    """What this process computes."""

    @property
    def generations(self) -> frozenset[str]: ...

    def stop(self, generation_id: str, *, interrupted: bool = False) -> bool: ...


class Leases:
    """Sends heartbeats while the server runs. `at_orphan` is called with each turn of another process that one of them
    has interrupted: in this process only."""

    def __init__(self, store: ChatStore, turns: RunningTurns) -> None:
        self.at_orphan: list[Callable[[Orphan], None]] = []
        self._store = store
        self._turns = turns
        self.failing = False  # whether the database did not answer the last heartbeat
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, where others use the store too."""
        if self._store.is_shared and self._beating is None:
            self._beating = asyncio.create_task(self._keep())

    def stop(self) -> None:
        """When all turns have ended."""
        if self._beating is not None:
            self._beating.cancel()

    async def _keep(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def beat(self) -> None:
        """One heartbeat. A turn of this process that others took for lost is stopped: its chat may have gone on."""
        try:
            found = await self._store.heartbeat(self._turns.generations)
        except StorageError as error:
            if not self.failing:
                logger.warning("no lease was renewed: %s", error)
            self.failing = True
            return
        if self.failing:
            logger.warning("leases are renewed again")
        self.failing = False
        for generation_id in found.lost:
            self._turns.stop(generation_id, interrupted=True)
        for orphan in found.orphans:
            for tell in self.at_orphan:
                tell(orphan)
