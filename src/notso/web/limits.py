"""How much a client may send and how long it may keep us waiting: pure ASGI layers."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.security import header_values

logger = logging.getLogger("notso.web.limits")

MAX_BODY_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024


class RequestTooLargeError(Exception):
    """The body grew past the limit while it was read."""


class RequestLimits:
    """431 for headers, 413 for a body, 415 for a packed one. Bytes are counted as they come, whatever is claimed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        received = 0
        started = False

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise RequestTooLargeError
            return message

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive_counted, send_noted)
        except RequestTooLargeError:
            if not started:
                await _too_large()(scope, receive, send)


class SendTimeout:
    """Drops a reader that takes nothing for so long. It may come back and resume."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._seconds)

        try:
            await self._app(scope, receive, send_in_time if scope["type"] == "http" else send)
        except TimeoutError:
            logger.info("a reader took nothing for %g s and was dropped", self._seconds)


def _refusal(scope: Scope) -> PlainTextResponse | None:
    if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        return PlainTextResponse("The headers are too large.\n", 431)
    if any(value.lower() != "identity" for value in header_values(scope, b"content-encoding")):
        return PlainTextResponse("Send the body as it is, not packed.\n", 415)
    for length in header_values(scope, b"content-length"):
        if len(length) > 18 or not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _too_large()
    return None


def _too_large() -> PlainTextResponse:
    return PlainTextResponse(f"The body is larger than {MAX_BODY_BYTES} bytes.\n", 413)
