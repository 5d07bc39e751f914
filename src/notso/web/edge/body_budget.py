"""How many bytes of requests there are at once, over all connections: a body is gathered here, or gives way."""

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
"""Of all bodies that are being received or looked at: four imports of the largest size."""

SMALL_SHARE = 4
"""A holder of no more than this part of it finds that part beyond, where others have taken all: one import."""

COST = 12
"""Bytes of memory that a byte of a body may take until it is answered: it is gathered, copied, parsed and stored. An
import of 13 MiB takes nine times its bytes at its peak, and memory comes in pieces."""

LOOK_SECONDS = 0.1
"""So old what was read of the process's memory may be."""

FREE_BYTES = 64 * 1024
"""Of each body these do not count, so that an ordinary question finds room whatever else is sent. How many there are of
them is bounded by the connections."""

FAIR_SECONDS = 2.0
"""So long a body may take for arriving while others wait for its room; the largest import takes a tenth of it here."""


def available_bytes() -> int:
    """What the process may still allocate: the system, its control group and its own limits leave it that much."""
    return available_memory().available_bytes


class RequestTooSlowError(Exception):
    """The body did not arrive in time."""


class RequestTooLargeError(Exception):
    """The body grew past the limit while it was read."""


class BodyGaveWayError(Exception):
    """There is no room for the body among those of others, or not any more."""


class Arrival:
    """One request's body: gathered in one piece, whatever the pieces it comes in."""

    def __init__(self, budget: BodyBudget, holder: str, limit: int, deadline: float) -> None:
        self.holder = holder  # whose it is, or, of who is not known, where it comes from
        self.held = 0  # of what is gathered: what counts
        self.since = 0.0  # when it began to count
        self._budget = budget
        self._limit = limit
        self._deadline = deadline
        self._gathered = io.BytesIO()
        self._timeout = asyncio.timeout_at(deadline)
        self._gave_way = False

    async def gather(self, receive: Receive) -> Message:
        """The body in one message, or the news that the client has gone.

        Raises RequestTooLargeError, RequestTooSlowError or BodyGaveWayError; then nothing is kept.
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
        """It is not waited for any longer; its room is free at once."""
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
    """What all bodies may hold together. When it is used up, whoever needs more waits for a moment, until others are
    done with; then the bodies that have been arriving for longest give way, first those of who holds most. Who holds
    little finds some room beyond. None of it is more than the process has memory for. Called on the loop.
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
        """Room for `size` bytes in all. Raises BodyGaveWayError if it is this one that gives way."""
        if arrival not in self._arriving:
            self._arriving[arrival] = None
            arrival.since = asyncio.get_running_loop().time()
        if not self._has_room(arrival, size):
            async with self._line:  # one at a time looks for room, so that a crowd costs no square of itself
                while not self._has_room(arrival, size):
                    await self._make_room(arrival)
        self.free -= size - arrival.held
        self._memory -= size - arrival.held
        self._held[arrival.holder] += size - arrival.held
        arrival.held = size

    def most_of_one(self) -> int:
        """How large one body may be by the memory that there is, were there no others."""
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
        """It is whole, or is not waited for any longer: from here on it cannot give way."""
        self._arriving.pop(arrival, None)
        self._tell()

    def release(self, arrival: Arrival) -> None:
        """Nobody needs it any more."""
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
            leaves = max(late, key=lambda each: self._held[each.holder])  # of equals the first: the oldest
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
