"""Limits and timeouts for connections. At a limit, idle connections are evicted to make room for new ones.
The connection of a running request is closed when the request's key is revoked."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import Context
from typing import Any, Protocol, cast

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from notso.system.processes import limit_unsent, raise_descriptor_limit
from notso.web.values.errors import StorageError
from notso.web.values.request_id import SCOPE_KEY, request_id

logger = logging.getLogger("notso.web.connections")

MAX_CONNECTIONS = 1024
"""Maximum number of connections, far more than one machine's model can serve. Each connection takes about 100 KiB of
memory."""
RESERVED_DESCRIPTORS = 128
"""File descriptors reserved for the database, model and cache files, downloads, tools, and connections being
accepted."""
ONE_ADDRESS_SHARE = 3 / 4
"""Maximum share of the connections that one client address may hold. It is large because all clients have the same
address if they connect through a proxy or from this machine."""
# Interval at which the keys of running requests are checked, because another process may revoke them.
KEY_CHECK_SECONDS = 1.0
BACKLOG = 1024  # length of the kernel's queue of connections to be accepted
# Maximum number of connections being accepted at a time. A higher maximum would let newer connections evict a client
# before it has sent anything.
MAX_ACCEPTING = 32
RETRY_SECONDS = 0.002
"""Pause after a failure to accept a connection. Each failure evicts some of the connections that wait for their
clients, and the remaining clients can send during the pause. A longer pause delays new clients: with 10 ms, a client
waited 500 ms behind 400 silent clients. With 2 ms, a client that sends its request 5 ms after connecting is still
served."""
WARNING_SECONDS = 60.0  # minimum interval between warnings about failures to accept


class Connection(Protocol):
    def drop(self) -> None: ...


class ConnectionLimiter:
    """Accepts connections, and limits them in total and per client address. Use on the event loop."""

    # At a limit, the limiter evicts the connection that has waited longest for its client to send or to read.
    # Connections that wait for the server are never evicted.

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_one = max(1, int(most * ONE_ADDRESS_SHARE))
        self._max_accepting = min(MAX_ACCEPTING, max(1, most // 4))
        self._admitted: dict[Connection, str] = {}
        self._by_address: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # connections that wait for their client, the longest-waiting first
        self._listeners: Sequence[socket.socket] = ()
        self._accepting: set[asyncio.Task[object]] = set()
        self._last_warning = -WARNING_SECONDS

    def __len__(self) -> int:
        return len(self._admitted)

    def enter(self, connection: Connection, host: str) -> bool:
        """Admit a connection, evicting another if necessary. Return False if none can be evicted."""
        address = network_of(host)
        crowded = self._by_address[address] >= self._most_of_one
        if (crowded or len(self._admitted) >= self._most) and not self.evict_idle(address if crowded else None):
            return False
        self._admitted[connection] = address
        self._by_address[address] += 1
        self._waiting[connection] = None
        return True

    def evict_idle(self, address: str | None = None) -> bool:
        """Evict a connection (from `address`, if given); return whether one was evicted."""
        for connection in self._waiting:
            if address is None or self._admitted[connection] == address:
                connection.drop()
                self.leave(connection)
                return True
        return False

    def leave(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        address = self._admitted.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def note(self, connection: Connection, *, waits: bool) -> None:
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._admitted:
            self._waiting.setdefault(connection)

    def open(self, listeners: Sequence[socket.socket], make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._watch(listener, make_protocol)

    def close(self) -> None:
        for listener in self._listeners:
            if listener.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(listener)
        self._listeners = ()

    def _watch(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, make_protocol)

    def _accept(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while len(self._accepting) < self._max_accepting:
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the process or the system is out of descriptors or memory
                self._log_accept_error(error)
                # Evict no more than about half of the waiting connections, so that newer ones can still send.
                for _ in range(min(self._max_accepting, 1 + len(self._waiting) // 2)):
                    self.evict_idle()
                loop.remove_reader(listener)
                loop.call_later(RETRY_SECONDS, self._watch, listener, make_protocol)
                return
            client.setblocking(False)
            accepting: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(make_protocol, client))
            self._accepting.add(accepting)
            accepting.add_done_callback(self._on_connected)

    def _on_connected(self, accepting: asyncio.Task[object]) -> None:
        self._accepting.discard(accepting)
        if not accepting.cancelled() and (error := accepting.exception()) is not None:
            self._log_accept_error(error)

    def _log_accept_error(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._last_warning >= WARNING_SECONDS:
            self._last_warning = now
            logger.warning("cannot accept connections: %s; retrying", error)


def connection_limit() -> int:
    """Return the connection limit, raising the descriptor limit if necessary."""
    most = raise_descriptor_limit(MAX_CONNECTIONS + RESERVED_DESCRIPTORS)
    return MAX_CONNECTIONS if most is None else min(MAX_CONNECTIONS, max(most - RESERVED_DESCRIPTORS, most // 4))


def network_of(host: str) -> str:
    """Return the network under which connections from `host` are counted ('' if invalid)."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    # All IPv4-mapped addresses are in one /64 network, so convert them to IPv4.
    address = getattr(address, "ipv4_mapped", None) or address
    # IPv6 addresses are counted by /64 network, because providers usually assign at least a whole /64 to one customer.
    return str(ipaddress.IPv6Network((address, 64), strict=False)) if address.version == 6 else str(address)


access_log = logging.getLogger("notso.access")

HEADER_SECONDS = 10.0
MAX_BYTES_AHEAD = 16 * 1024
"""Maximum size of pipelined requests, which a client sends before it has received the previous response. Browsers and
client libraries do not pipeline."""

PIPELINE_SECONDS = 1.0  # time after which the next pipelined request starts, even if the previous one is still running
MAX_UNSENT_BYTES = 64 * 1024
"""Maximum number of unsent response bytes in the kernel, high enough that clients that read fast never wait."""

READ_BYTES = 64 * 1024
"""Maximum number of bytes per read, a quarter of asyncio's default. It bounds how much of a request body is buffered
before the application reads it, and how long each read occupies the event loop."""

REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 43\r\n"
    b"Retry-After: 5\r\nConnection: close\r\n\r\nToo many connections; try again in a while\n"
)

_STATE_KEY = "notso_connection"
_NO_LINGERING = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; closing then discards unsent data and sends a reset


def connection_of(scope: Scope) -> ClientConnection | None:
    """Return a request's connection, or None if it no longer exists or is not a ClientConnection."""
    reference = scope.get("state", {}).get(_STATE_KEY)
    return cast("ClientConnection | None", reference()) if reference is not None else None


class RequestPipeline:
    """Starts pipelined requests one at a time, so that they do not delay ordinary requests."""

    def __init__(self) -> None:
        self._waiting: deque[ClientConnection] = deque()
        self._running: ClientConnection | None = None
        self._timer: asyncio.TimerHandle | None = None

    def join(self, connection: ClientConnection) -> None:
        """Queue a connection. Its `answer_next` is called when its turn comes."""
        self._waiting.append(connection)
        self._start_next()

    def leave(self, connection: ClientConnection) -> None:
        if self._timer is not None and connection is self._running:
            self._timer.cancel()
            self._running = self._timer = None
            self._start_next()

    def _start_next(self) -> None:
        while self._running is None and self._waiting:
            connection = self._waiting.popleft()
            if not connection.gone:
                self._running = connection
                self._timer = connection.loop.call_later(PIPELINE_SECONDS, self.leave, connection)
                connection.loop.call_soon(connection.answer_next)


class ClientConnection(H11Protocol):
    """uvicorn's protocol with two timeouts and a connection limit."""

    # The header timeout starts when the connection is made, or at the first byte of a later request, and ends when the
    # headers are complete. A client cannot extend it by sending single bytes. The send timeout runs while the client
    # leaves data unread, even if the response is complete or the connection is closing. When it expires, the connection
    # is reset and its buffers are freed.

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limiter: ConnectionLimiter,
        pipeline: RequestPipeline,
        send_seconds: float,
    ) -> None:
        super().__init__(config, server_state, app_state | {_STATE_KEY: weakref.ref(self)}, _loop)
        self._limiter = limiter
        self._pipeline = pipeline
        self._send_seconds = send_seconds
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._has_sent_ahead = False
        # Monotonic time at which the client stopped reading; None while it reads.
        self.unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        transport.set_write_buffer_limits(high=0)  # call pause_writing as soon as one byte cannot be sent
        # The kernel's timeout is twice the send timeout, so that the send timeout, which is logged, expires first.
        limit_unsent(self._socket, MAX_UNSENT_BYTES, int(2 * self._send_seconds))
        if not self._limiter.enter(self, self.client[0] if self.client else ""):
            transport.write(REFUSAL)
            transport.close()
            return
        self._start_header_timer()

    def _unsupported_upgrade_warning(self) -> None:
        # Java's HTTP client offers HTTP/2 with every request. For each request, uvicorn would log advice to install a
        # WebSocket library.
        pass

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.flow.read_paused and len(self.conn.trailing_data[0]) > MAX_BYTES_AHEAD:
            self.drop()
            return
        if self._waits_for_headers():
            self._start_header_timer()
        else:
            self._stop_header_timer()
            # After sending data, a client loses its place in the queue of waiting connections. If part of a body is
            # still missing, _note_turn appends the connection again.
            self._limiter.note(self, waits=False)
        self._note_turn()

    def on_response_complete(self) -> None:
        self._pipeline.leave(self)
        if self.gone or not self.conn.trailing_data[0]:
            super().on_response_complete()
        elif self.flow.write_paused:
            self._has_sent_ahead = True  # start the next request when the client has read this response
        else:
            self._pipeline.join(self)
        self._note_turn()

    def answer_next(self) -> None:
        if not self.gone:
            super().on_response_complete()
            self._note_turn()
        if self._waits_for_headers():  # the data contained only part of the next request, so nothing is running
            self._pipeline.leave(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since = time.monotonic()
        self._send_timer = self.loop.call_later(self._send_seconds, self._drop_unread)
        self._pipeline.leave(self)
        self._note_turn()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()
        if self._has_sent_ahead:
            self._has_sent_ahead = False
            self._pipeline.join(self)
        self._note_turn()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        self._unset_keepalive_if_required()  # uvicorn leaves this timer running if a connection is lost
        self._limiter.leave(self)
        self._pipeline.leave(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Reset the connection and discard unsent data, including data in the kernel."""
        self._limiter.leave(self)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.transport.abort()

    @property
    def gone(self) -> bool:
        return self.transport.is_closing()

    def is_answering(self, cycle: object) -> bool:
        # A later request on the same connection has another `cycle`.
        return not self.gone and self.cycle is cycle and not self.cycle.response_complete

    def close_during(self, cycle: object) -> None:
        """Close the connection if the response of `cycle` is not complete."""
        if self.is_answering(cycle):
            self.transport.close()

    @property
    def _socket(self) -> socket.socket:
        return cast(socket.socket, self.transport.get_extra_info("socket"))

    def _note_turn(self) -> None:
        # `ConnectionLimiter` evicts only connections that wait for their client.
        self._limiter.note(self, waits=self.flow.write_paused or self._waits_for_headers() or self.cycle.more_body)

    def _waits_for_headers(self) -> bool:
        # uvicorn creates a `cycle` object for each request and its response once the headers are complete.
        return self.cycle is None or self.cycle.response_complete

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close_without_headers)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_without_headers(self) -> None:
        if self._waits_for_headers():
            self.transport.close()

    def _stop_send_timer(self) -> None:
        self.unread_since = None
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _drop_unread(self) -> None:
        # A timer calls this outside the request's context, so set the request id for the log record.
        scope: dict[str, Any] = dict(self.cycle.scope) if self.cycle is not None else {}
        token = request_id.set(scope.get(SCOPE_KEY))
        access_log.info("the client read nothing for %g s; connection dropped", self._send_seconds)
        request_id.reset(token)
        self.drop()


class KeyWatch:
    """Closes the connections of requests whose keys are revoked. Use on the event loop."""

    def __init__(self, valid_ids: Callable[[Collection[str]], Awaitable[set[str]]]) -> None:
        self._valid_ids = valid_ids
        self._running: dict[object, tuple[ClientConnection, str]] = {}  # by uvicorn's response object
        self._task: asyncio.Task[None] | None = None

    def add(self, scope: Scope, key_id: str) -> None:
        """Watch the key of a request until its response is complete."""
        connection = connection_of(scope)
        if connection is None:
            return
        self._running[connection.cycle] = connection, key_id
        if self._task is None:
            # The context is empty, because the task outlives the request.
            self._task = asyncio.create_task(self._check_periodically(), context=Context())

    async def _check_periodically(self) -> None:
        try:
            while self._running:
                await asyncio.sleep(KEY_CHECK_SECONDS)
                self._running = {cycle: each for cycle, each in self._running.items() if each[0].is_answering(cycle)}
                if key_ids := {key_id for _, key_id in self._running.values()}:
                    await self._close_revoked(key_ids)
        finally:
            self._task = None  # the next request starts a new task, even after an unexpected error

    async def _close_revoked(self, key_ids: set[str]) -> None:
        # All keys are looked up with one query, so that an unresponsive database delays each check only once.
        try:
            revoked = key_ids - await self._valid_ids(key_ids)
        except (StorageError, RuntimeError):  # RuntimeError: no thread could be started. The next check tries again.
            return
        for cycle, (connection, key_id) in self._running.items():
            if key_id in revoked:
                connection.close_during(cycle)
