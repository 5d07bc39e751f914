"""Connection limiter: accepts connections, and evicts idle ones when full."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from notso.system.processes import descriptor_limit

logger = logging.getLogger("notso.web.connections")

MAX_CONNECTIONS = 1024
"""Far above the need of one machine's model; a connection holds some 100 KiB."""
RESERVED_DESCRIPTORS = 128
"""For the database, its readers, model and cache files, downloads, tool processes, and connections being accepted."""
ONE_ADDRESS_SHARE = 3 / 4
"""Maximum share of one address. It is large because behind a proxy, and on loopback, all clients share one."""
BACKLOG = 1024  # connections the kernel queues until they are accepted
COMING_IN_AT_ONCE = 32  # small, so that accepted connections are read in between and not evicted before they could send
RETRY_SECONDS = 0.002
"""Time for accepted connections to send before half of the silent ones are evicted. Shorter admits waiting clients
sooner: at 10 ms a client waited 500 ms behind 400 silent ones. At 2 ms, one that sends after 5 ms is still served."""
EPISODE_SECONDS = 60.0  # interval of warnings about failing accepts


class Caller(Protocol):
    """Connection as seen by the limiter."""

    def drop(self) -> None:
        """Close the connection at once."""


class Door:
    """Accepts and counts connections, in total and per address. Use on the event loop only.

    When full, it evicts the connection that has waited longest for its client: for headers, the next request, a body,
    or reading. A connection that waits for the server is never evicted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_one = max(1, int(most * ONE_ADDRESS_SHARE))
        self._coming_at_once = min(COMING_IN_AT_ONCE, max(1, most // 4))
        self._inside: dict[Caller, str] = {}
        self._by_address: Counter[str] = Counter()
        self._waiting: dict[Caller, None] = {}  # connections that wait for their client, longest first
        self._listeners: Sequence[socket.socket] = ()
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._coming: set[asyncio.Task[object]] = set()
        self._last_trouble = -EPISODE_SECONDS

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, caller: Caller, host: str) -> bool:
        """Admit a connection; False if none can be evicted for it."""
        address = network_of(host)
        crowded = self._by_address[address] >= self._most_of_one
        if (crowded or len(self._inside) >= self._most) and not self.make_room(address if crowded else None):
            return False
        self._inside[caller] = address
        self._by_address[address] += 1
        self._waiting[caller] = None
        return True

    def make_room(self, address: str | None = None) -> bool:
        """Evict one connection (of `address` if given); return whether one was found."""
        for caller in self._waiting:
            if address is None or self._inside[caller] == address:
                caller.drop()
                self.leave(caller)
                return True
        return False

    def leave(self, caller: Caller) -> None:
        """Remove a connection. Idempotent."""
        self._waiting.pop(caller, None)
        address = self._inside.pop(caller, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def waits(self, caller: Caller) -> None:
        """Note that a connection waits for its client."""
        if caller in self._inside:
            self._waiting.setdefault(caller)

    def serves(self, caller: Caller) -> None:
        """Note that a connection waits for the server."""
        self._waiting.pop(caller, None)

    def open(self, listeners: Sequence[socket.socket], make: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections with the protocol factory `make`."""
        self._listeners, self._make = listeners, make
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._watch(listener)

    def close(self) -> None:
        for listener in self._listeners:
            if listener.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(listener)
        self._listeners = ()

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners and self._make is not None:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, self._make)

    def _accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while len(self._coming) < self._coming_at_once:
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors or memory
                self._tell_trouble(error)
                # At most half of the waiting ones: connections accepted just now get time to send.
                for _ in range(min(self._coming_at_once, 1 + len(self._waiting) // 2)):
                    self.make_room()
                loop.remove_reader(listener)
                loop.call_later(RETRY_SECONDS, self._watch, listener)
                return
            client.setblocking(False)
            coming: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(make, client))
            self._coming.add(coming)
            coming.add_done_callback(self._came)

    def _came(self, coming: asyncio.Task[object]) -> None:
        self._coming.discard(coming)
        if not coming.cancelled() and (error := coming.exception()) is not None:
            self._tell_trouble(error)

    def _tell_trouble(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._last_trouble >= EPISODE_SECONDS:
            self._last_trouble = now
            logger.warning("no connection can be accepted: %s; retrying", error)


def room_for_connections() -> int:
    """Return the connection limit, raising the limit of descriptors as allowed."""
    most = descriptor_limit(MAX_CONNECTIONS + RESERVED_DESCRIPTORS)
    return MAX_CONNECTIONS if most is None else min(MAX_CONNECTIONS, max(most - RESERVED_DESCRIPTORS, most // 4))


def network_of(host: str) -> str:
    """Return the network that an address counts for ('' if invalid)."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    # A household has an IPv6 /64.
    return str(ipaddress.IPv6Network((address, 64), strict=False)) if address.version == 6 else host
