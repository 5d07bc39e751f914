"""Memory budget for request bodies over all connections."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import Counter
from collections.abc import Callable

from starlette.types import Message, Receive

from notso.smollm3 import available_memory

MIB = 1 << 20
MOST_BYTES = 64 * MIB
"""Limit for all bodies being received or parsed: four imports of maximum size."""

SMALL_SHARE = 4
"""A holder below this fraction of the budget may exceed it by the same amount when it is used up: one import."""

COST = 12
"""Memory per body byte until the response starts: the body is gathered, copied, parsed and stored. Measured: a 13 MiB
import peaks at nine times its size; the rest is a margin for fragmentation."""

LOOK_SECONDS = 0.1
"""Maximum age of a reading of available memory."""

FREE_BYTES = 64 * 1024
"""Part of each body that is not counted, so that ordinary requests always fit; the connection limit bounds the sum."""

FAIR_SECONDS = 2.0
"""Time a body may take to arrive while others wait for its room; measured: the largest import takes a tenth of it."""


def available_bytes() -> int:
    """Return the bytes the process may still allocate, limits of control group and process included."""
    return available_memory().available_bytes


class RequestTooSlowError(Exception): ...


class RequestTooLargeError(Exception): ...


class BodyGaveWayError(Exception):
    """The body found no room, or was evicted."""


class Arrival:
    """One request's body, gathered into one piece."""

    def __init__(self, budget: BodyBudget, holder: str, limit: int, deadline: float) -> None:
        # owner, or address if unauthenticated
        self.holder = holder
        self.held = 0  # bytes counted against the budget
        self.since = 0.0  # when counting began
        self._budget = budget
        self._limit = limit
        self._deadline = deadline
        self._gathered = io.BytesIO()
        self._timeout = asyncio.timeout_at(deadline)
        self._gave_way = False

    async def gather(self, receive: Receive) -> Message:
        """Return the body as one message, or the disconnect message.

        Raises RequestTooLargeError, RequestTooSlowError or BodyGaveWayError, and frees the body.
        """
        try:
            async with self._timeout:
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return message
                    await self._add(message.get("body", b""))
                    if not message.get("more_body", False):
                        return {"type": "http.request", "body": self._gathered.getvalue(), "more_body": False}
        except TimeoutError:
            raise (BodyGaveWayError if self._gave_way else RequestTooSlowError) from None
        finally:
            self._gathered = io.BytesIO()
            self._budget.arrived(self)

    def give_way(self) -> None:
        """Evict this body."""
        self._gave_way = True
        self._gathered = io.BytesIO()
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
        self._budget.release(self)

    async def _add(self, piece: bytes) -> None:
        if self._gave_way:
            raise BodyGaveWayError
        size = self._gathered.tell() + len(piece)
        if size > self._limit:
            raise RequestTooLargeError
        if size > FREE_BYTES:
            await self._budget.hold(self, size - FREE_BYTES)
        self._gathered.write(piece)


class BodyBudget:
    """Budget for all bodies, bounded by available memory. Use on the event loop only.

    When it is used up, bodies that take longer than FAIR_SECONDS to arrive are evicted, largest holder first.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, available: Callable[[], int] = available_bytes) -> None:
        self.free = most_bytes
        self._available = available
        self._memory, self._looked = 0, float("-inf")
        self._beyond = most_bytes // SMALL_SHARE
        self._held = Counter[str]()
        self._arriving: dict[Arrival, None] = {}
        self._line = asyncio.Lock()
        self._changed = asyncio.Event()

    async def hold(self, arrival: Arrival, size: int) -> None:
        """Reserve `size` bytes in total. Raise BodyGaveWayError if evicted."""
        if arrival not in self._arriving:
            self._arriving[arrival] = None
            arrival.since = asyncio.get_running_loop().time()
        if not self._has_room(arrival, size):
            # One at a time: with every waiter scanning all bodies, the cost would be quadratic.
            async with self._line:
                while not self._has_room(arrival, size):
                    await self._make_room(arrival)
        self.free -= size - arrival.held
        self._memory -= size - arrival.held
        self._held[arrival.holder] += size - arrival.held
        arrival.held = size

    def most_of_one(self) -> int:
        """Return the largest body that memory would allow without others."""
        return FREE_BYTES + max(0, self._room_in_memory() + self._held.total())

    def _has_room(self, arrival: Arrival, size: int) -> bool:
        more = size - arrival.held
        beyond = self._beyond if self._held[arrival.holder] + more <= self._beyond else 0
        return more <= min(self.free + beyond, self._room_in_memory())

    def _room_in_memory(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._looked >= LOOK_SECONDS:
            self._memory, self._looked = self._available() // COST, now
        return self._memory

    def arrived(self, arrival: Arrival) -> None:
        """Mark a body as complete; it can no longer be evicted."""
        self._arriving.pop(arrival, None)
        self._tell()

    def release(self, arrival: Arrival) -> None:
        """Free a body's room."""
        self._arriving.pop(arrival, None)
        self.free += arrival.held
        self._held[arrival.holder] -= arrival.held
        if not self._held[arrival.holder]:
            del self._held[arrival.holder]
        arrival.held = 0
        self._tell()

    async def _make_room(self, arrival: Arrival) -> None:
        now = asyncio.get_running_loop().time()
        late = [each for each in self._arriving if each.since + FAIR_SECONDS <= now]
        if late:
            leaves = max(late, key=lambda each: self._held[each.holder])  # among equals the first, so the oldest
            leaves.give_way()
            if leaves is arrival:
                raise BodyGaveWayError
            return
        first = next(iter(self._arriving))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(first.since + FAIR_SECONDS):
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
