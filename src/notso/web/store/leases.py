"""Renew this process's lease, and take over turns from processes that have ended.

A lease is a process's temporary claim to the turns (questions with unfinished answers) that it generates. After it
expires, another process continues these turns, or marks them as interrupted if they cannot be continued.
"""

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
    @property
    def generations(self) -> frozenset[str]: ...

    @property
    def known(self) -> frozenset[str]: ...

    def stop(self, generation_id: str, *, interrupted: bool = False) -> bool: ...


class LeaseKeeper:
    """Sends heartbeats. Calls `at_orphan` for each interrupted turn, and `at_taken` for each turn to continue."""

    def __init__(self, store: ChatStore, turns: RunningTurns) -> None:
        self.at_orphan: list[Callable[[Orphan], None]] = []
        self.at_taken: Callable[[Orphan], None] | None = None
        self._store = store
        self._turns = turns
        self.failing = False
        self.leaving = False  # whether this process is stopping and must not take over turns
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # If no other process uses the store, one heartbeat suffices: it finds the turns that a restart left unfinished.
        if not self._store.is_shared:
            await self.send_heartbeat()
        elif self._beating is None:
            self._beating = asyncio.create_task(self._beat_periodically())

    def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def _beat_periodically(self) -> None:
        while True:
            await self.send_heartbeat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def send_heartbeat(self) -> None:
        try:
            known = self._turns.known if self.at_taken is not None else None
            result = await self._store.heartbeat(self._turns.generations, known, is_leaving=self.leaving)
        except (StorageError, RuntimeError) as error:  # RuntimeError: no thread could be started
            if not self.failing:
                logger.warning("leases could not be renewed: %s", error)
            self.failing = True
            return
        for orphan in result.taken:
            access_log.warning("turn continued: the server that generated it has ended; id %s", orphan.generation_id)
            if self.at_taken is not None:
                self.at_taken(orphan)
        if self.failing:
            logger.warning("leases are renewed again")
        self.failing = False
        for generation_id in result.lost:
            # Another process has continued or interrupted this turn, so the answer generated here is obsolete.
            self._turns.stop(generation_id, interrupted=True)
        for orphan in result.orphans:
            access_log.warning(
                "turn interrupted: the server that generated it stopped renewing its lease; id %s", orphan.generation_id
            )
            for callback in self.at_orphan:
                callback(orphan)
