"""HTTP connection with header and send timeouts, which uvicorn lacks."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
import weakref
from collections import deque
from typing import Any, cast

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from notso.system.processes import limit_unsent
from notso.web.edge.door import Door
from notso.web.values.request_id import SCOPE_KEY, request_id

access_log = logging.getLogger("notso.access")

HEADER_SECONDS = 10.0
MAX_BYTES_AHEAD = 16 * 1024
"""Limit for pipelined requests. Browsers and client libraries do not pipeline."""

LANE_SECONDS = 1.0
MAX_UNSENT_BYTES = 64 * 1024
"""Limit of unsent bytes in the kernel, high enough that a fast reader never waits."""

READ_BYTES = 64 * 1024
"""Bytes per read, a quarter of asyncio's default. Bounds what is held of an unread body, and how long one of many
simultaneous senders occupies the loop."""

REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 43\r\n"
    b"Retry-After: 5\r\nConnection: close\r\n\r\nToo many connections; try again in a while\n"
)

_STATE_KEY = "notso_connection"
_NO_LINGERING = struct.pack("ii", 1, 0)


def connection_of(scope: Scope) -> ClientConnection | None:
    """Return a request's connection. None if it has exited or another server runs the application."""
    reference = scope.get("state", {}).get(_STATE_KEY)
    return cast("ClientConnection | None", reference()) if reference is not None else None


class Lane:
    """Queue of pipelined requests, started one at a time so that they do not delay ordinary ones."""

    def __init__(self) -> None:
        self._waiting: deque[ClientConnection] = deque()
        self._at_work: ClientConnection | None = None
        self._timer: asyncio.TimerHandle | None = None

    def join(self, connection: ClientConnection) -> None:
        """Queue a connection; its `answer_next` is called in turn."""
        self._waiting.append(connection)
        self._go_on()

    def leave(self, connection: ClientConnection) -> None:
        """End a connection's turn."""
        if self._timer is not None and connection is self._at_work:
            self._timer.cancel()
            self._at_work = self._timer = None
            self._go_on()

    def _go_on(self) -> None:
        while self._at_work is None and self._waiting:
            connection = self._waiting.popleft()
            if not connection.gone:
                self._at_work = connection
                # A request that takes longer lets the next one start.
                self._timer = connection.loop.call_later(LANE_SECONDS, self.leave, connection)
                connection.loop.call_soon(connection.answer_next)


class ClientConnection(H11Protocol):
    """uvicorn's protocol with two timeouts and a connection limit.

    The header timeout runs from the connection, or from the first byte of a later request, until the headers are
    complete; trickling bytes do not reset it. The send timeout runs while written data has not been read, also after
    the response and during closing; then the connection is cut and its buffers are freed.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        door: Door,
        lane: Lane,
        send_seconds: float,
    ) -> None:
        super().__init__(config, server_state, app_state | {_STATE_KEY: weakref.ref(self)}, _loop)
        self._door = door
        self._lane = lane
        self._send_seconds = send_seconds
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._has_sent_ahead = False
        # Monotonic time since which the client reads nothing; None while it reads.
        self.unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        transport.set_write_buffer_limits(high=0)  # so that any unread byte calls pause_writing
        self._bound_what_the_system_holds()
        if not self._door.enter(self, self.client[0] if self.client else ""):
            transport.write(REFUSAL)
            transport.close()
            return
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.flow.read_paused and len(self.conn.trailing_data[0]) > MAX_BYTES_AHEAD:
            self.drop()
            return
        if self._waits_for_headers():
            self._start_header_timer()
        else:
            self._stop_header_timer()
            self._door.serves(self)  # _note_turn reverts this if more of a body is to come
        self._note_turn()

    def on_response_complete(self) -> None:
        self._lane.leave(self)
        if self.gone or not self.conn.trailing_data[0]:
            super().on_response_complete()
        elif self.flow.write_paused:
            self._has_sent_ahead = True  # no new work for a client that has not read the last response
        else:
            self._lane.join(self)
        self._note_turn()

    def answer_next(self) -> None:
        """Start the next pipelined request."""
        if not self.gone:
            super().on_response_complete()
            self._note_turn()
        if self._waits_for_headers():  # only part of it has arrived
            self._lane.leave(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since = time.monotonic()
        self._send_timer = self.loop.call_later(self._send_seconds, self._drop_unread)
        self._lane.leave(self)
        self._note_turn()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()
        if self._has_sent_ahead:
            self._has_sent_ahead = False
            self._lane.join(self)
        self._note_turn()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        self._unset_keepalive_if_required()  # uvicorn leaves the timer running when the client is cut off
        self._door.leave(self)
        self._lane.leave(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Reset the connection; unread data is discarded, also by the kernel."""
        self._door.leave(self)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.transport.abort()

    def _bound_what_the_system_holds(self) -> None:
        # Later than the send timeout, which notifies the client.
        limit_unsent(self._socket, MAX_UNSENT_BYTES, int(2 * self._send_seconds))

    @property
    def gone(self) -> bool:
        return self.transport.is_closing()

    @property
    def _socket(self) -> socket.socket:
        return cast(socket.socket, self.transport.get_extra_info("socket"))

    def _note_turn(self) -> None:
        # The door evicts only connections that wait for the client.
        if self.flow.write_paused or self._waits_for_headers() or self.cycle.more_body:
            self._door.waits(self)
        else:
            self._door.serves(self)

    def _waits_for_headers(self) -> bool:
        # uvicorn creates a cycle once the headers are complete.
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
        # Runs in no request's context.
        scope: dict[str, Any] = dict(self.cycle.scope) if self.cycle is not None else {}
        token = request_id.set(scope.get(SCOPE_KEY))
        access_log.info("the client read nothing for %g s; connection dropped", self._send_seconds)
        request_id.reset(token)
        self.drop()
