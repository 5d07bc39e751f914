"""Where connections come in: how many there may be, and who gives way when there is no more room."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

logger = logging.getLogger("notso.web.connections")

MAX_CONNECTIONS = 1024
"""Far more than people and programs of one machine's model need; what each can hold, some 100 KiB, is bearable."""
RESERVED_DESCRIPTORS = 128
"""For the database, its readers, model and cache files, downloads, tools' processes, and who is being let in."""
ONE_ADDRESS_SHARE = 3 / 4
"""Of all connections. Behind a proxy, and on loopback, everybody has the same address: so it is most of them."""
BACKLOG = 1024  # connections the system keeps for us until they are accepted
COMING_IN_AT_ONCE = 32  # so that who is in comes to a word between, and none gives way before it could say one
RETRY_SECONDS = 0.002
"""How long who was let in has to say a word before half of those that said none give way. The shorter, the sooner come
those outside: at 10 ms a visitor waited 500 ms behind 400 that say nothing. At 2 ms who sends 5 ms late is heard."""
EPISODE_SECONDS = 60.0  # trouble with accepting is told once in so long


class Caller(Protocol):
    """A connection, as the door sees it."""

    def drop(self) -> None:
        """End it now. It leaves."""


class Door:
    """Accepts connections and counts them, in all and by address. Everything here runs on the event loop.

    Where there is no room for one more, the one whose client has kept us waiting longest gives way: for its headers,
    its next request, its body, or for taking what was sent. One that waits for us is never cut off for another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_one = max(1, int(most * ONE_ADDRESS_SHARE))
        self._coming_at_once = min(COMING_IN_AT_ONCE, max(1, most // 4))
        self._inside: dict[Caller, str] = {}
        self._by_address: Counter[str] = Counter()
        self._waiting: dict[Caller, None] = {}  # who keeps us waiting, longest first
        self._listeners: Sequence[socket.socket] = ()
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._coming: set[asyncio.Task[object]] = set()
        self._last_trouble = -EPISODE_SECONDS

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, caller: Caller, host: str) -> bool:
        """One more connection, which keeps us waiting at first. False: there is no room, and nobody gives way."""
        address = network_of(host)
        crowded = self._by_address[address] >= self._most_of_one
        if (crowded or len(self._inside) >= self._most) and not self.make_room(address if crowded else None):
            return False
        self._inside[caller] = address
        self._by_address[address] += 1
        self._waiting[caller] = None
        return True

    def make_room(self, address: str | None = None) -> bool:
        """Whether one connection, of this address if one is named, has given way."""
        for caller in self._waiting:
            if address is None or self._inside[caller] == address:
                caller.drop()
                self.leave(caller)
                return True
        return False

    def leave(self, caller: Caller) -> None:
        """It has ended, or is about to. Who has left already may leave again."""
        self._waiting.pop(caller, None)
        address = self._inside.pop(caller, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def waits(self, caller: Caller) -> None:
        """Its client keeps us waiting, from now on or already."""
        if caller in self._inside:
            self._waiting.setdefault(caller)

    def serves(self, caller: Caller) -> None:
        """Its client waits for us."""
        self._waiting.pop(caller, None)

    def open(self, listeners: Sequence[socket.socket], make: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections; `make` makes the protocol of each."""
        self._listeners, self._make = listeners, make
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._watch(listener)

    def close(self) -> None:
        """Accept no more."""
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
            except OSError as error:  # no descriptor is left, or no memory
                self._tell_trouble(error)
                for _ in range(min(self._coming_at_once, 1 + len(self._waiting) // 2)):  # not who came just now
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
            logger.warning("no connection can be accepted: %s; trying again and again", error)


def room_for_connections() -> int:
    """How many connections there may be, by the descriptors this process may have; it takes as many as it is allowed
    to and needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    if 0 <= soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - RESERVED_DESCRIPTORS, soft // 4))


def network_of(host: str) -> str:
    """Whom an address stands for: one household has a whole IPv6 network of addresses, so of those it is the first
    half. "" where it is no address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return str(ipaddress.IPv6Network((address, 64), strict=False)) if address.version == 6 else host
