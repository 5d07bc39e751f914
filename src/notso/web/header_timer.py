"""A connection that does not finish its request's headers in time is closed: uvicorn waits for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
READ_BYTES = 64 * 1024
"""Taken from a connection in one go, a quarter of what asyncio takes: so much is held of a body that nobody reads yet,
and so long does one of a hundred that send at once keep the loop from the others."""


class HeaderTimer(H11Protocol):
    """uvicorn's protocol with a clock that runs from the connection, or from the first byte of a later request, until
    the headers are whole. Bytes that trickle in do not set it back.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waits_for_headers():
            self._start()
        else:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _start(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        if self._waits_for_headers():
            self.transport.close()

    def _waits_for_headers(self) -> bool:
        """Whether no request is being answered: uvicorn makes a cycle as soon as the headers are whole."""
        return self.cycle is None or self.cycle.response_complete
