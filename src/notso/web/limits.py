"""How much a client may send and how long it may keep us waiting: pure ASGI layers."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.security import header_values

logger = logging.getLogger("notso.web.limits")

MAX_BODY_BYTES = 1024 * 1024
LARGER_BODIES = {"/import": 16 * 1024 * 1024}  # exact paths
BODY_SECONDS = 60.0
MAX_HEADER_BYTES = 16 * 1024


class RequestTooLargeError(Exception):
    """The body grew past the limit while it was read."""


class RequestTooSlowError(Exception):
    """The body did not arrive in time."""


class RequestLimits:
    """431 for headers, 413 for a body, 415 for a packed one, 408 for one that does not arrive.

    Bytes are counted as they come, whatever is claimed.
    """

    def __init__(self, app: ASGIApp, body_seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        limit = _body_limit(scope)
        deadline = asyncio.get_running_loop().time() + self._body_seconds
        received = 0
        started = whole = False

        async def receive_counted() -> Message:
            nonlocal received, whole
            if whole:  # what comes now is only the news that the client has gone
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                raise RequestTooSlowError from None
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > limit:
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
                await _too_large(limit)(scope, receive, send)
        except RequestTooSlowError:
            if not started:
                response = PlainTextResponse("The body did not arrive in time.\n", 408, {"Connection": "close"})
                await response(scope, receive, send)


class SendTimeout:
    """Drops a reader that takes nothing for so long. It may come back and resume."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._seconds):  # unlike wait_for, without a task for every piece
                await send(message)

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
        if len(length) > 18 or not length.isdecimal() or int(length) > _body_limit(scope):
            return _too_large(_body_limit(scope))
    return None


def _body_limit(scope: Scope) -> int:
    return LARGER_BODIES.get(scope["path"], MAX_BODY_BYTES)


def _too_large(limit: int) -> PlainTextResponse:
    return PlainTextResponse(f"This is too much at once: at most {limit:,} bytes can be sent.\n", 413)
