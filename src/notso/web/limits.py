"""How much a client may send and how long it may keep us waiting: pure ASGI layers."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.body_budget import (
    Arrival,
    BodyBudget,
    BodyGaveWayError,
    RequestTooLargeError,
    RequestTooSlowError,
)
from notso.web.security import header_values

logger = logging.getLogger("notso.web.limits")

MAX_BODY_BYTES = 1024 * 1024
LARGER_BODIES = {"/import": 16 * 1024 * 1024}  # exact paths
BODY_SECONDS = 60.0
MAX_HEADER_BYTES = 16 * 1024
RETRY_SECONDS = 5  # told to who finds no room: by then the bodies that wait now have given way


class RequestLimits:
    """431 for headers, 413 for a body, 415 for a packed one, 408 for one that does not arrive, 503 for one that finds
    no room among those of others.

    Bytes are counted as they come, whatever is claimed, and the application gets them in one piece. A body counts until
    its answer begins.
    """

    def __init__(self, app: ASGIApp, body_seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._body_seconds = body_seconds
        self._budget = BodyBudget()

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
        arrival = Arrival(self._budget, (scope.get("client") or ("",))[0], limit, deadline)
        started = whole = False

        async def receive_whole() -> Message:
            nonlocal whole
            if whole:  # what comes now is only the news that the client has gone
                return await receive()
            whole = True
            return await arrival.gather(receive)

        async def send_noted(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._budget.release(arrival)
            await send(message)

        answer: PlainTextResponse | None = None
        try:
            await self._app(scope, receive_whole, send_noted)
        except RequestTooLargeError:
            answer = _too_large(limit)
        except RequestTooSlowError:
            answer = PlainTextResponse("The body did not arrive in time.\n", 408, {"Connection": "close"})
        except BodyGaveWayError:
            text = "Too much is being sent to this server at once. Please try again in a moment.\n"
            answer = PlainTextResponse(text, 503, {"Retry-After": str(RETRY_SECONDS)})
            if limit > MAX_BODY_BYTES:  # what is left of a smaller one is read, so that its sender can hear of this
                answer.headers["Connection"] = "close"
        finally:
            self._budget.release(arrival)
        if answer is not None and not started:
            await answer(scope, receive, send)


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
