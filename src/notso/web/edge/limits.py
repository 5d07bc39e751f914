"""Limits on request size, response size and time, as ASGI layers."""

from __future__ import annotations

import asyncio

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.edge.body_budget import (
    FREE_BYTES,
    Arrival,
    BodyBudget,
    BodyGaveWayError,
    RequestTooLargeError,
    RequestTooSlowError,
)
from notso.web.edge.client_connection import ClientConnection, connection_of
from notso.web.edge.security import header_values

MAX_BODY_BYTES = 1024 * 1024
LARGER_BODIES = {
    "/import": 16 * 1024 * 1024,
    "/attachments": 16 * 1024 * 1024,
    "/documents": 16 * 1024 * 1024,
    "/v1/files": 16 * 1024 * 1024,
    **{f"/engine/v1/{name}": 16 * 1024 * 1024 for name in ("submit", "prepare", "call")},  # whole conversations
}
"""Limits by exact path."""
BODY_SECONDS = 60.0
MAX_HEADER_BYTES = 16 * 1024  # with the request line
PIECE_BYTES = 64 * 1024
"""Bytes of a response per write: what a reader must take within the send timeout."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Limit of all responses being sent in pieces: enough for any page and a few full exports."""
RETRY_SECONDS = 5  # Retry-After when out of room: the bodies waiting now are evicted by then


class RequestLimits:
    """Rejects oversized headers (431), oversized (413), compressed (415) or slow bodies (408), and those without room
    (503).

    Received bytes count, whatever Content-Length claims. A body counts until its response begins.
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
        if limit > MAX_BODY_BYTES or _claimed_bytes(scope) > FREE_BYTES:
            limit = min(limit, self._budget.most_of_one())
        deadline = asyncio.get_running_loop().time() + self._body_seconds
        arrival = Arrival(self._budget, (scope.get("client") or ("",))[0], limit, deadline)
        started = whole = False

        async def receive_whole() -> Message:
            nonlocal whole
            if whole:  # only the disconnect can follow
                return await receive()
            whole = True
            caller = scope.get("state", {}).get("caller")
            arrival.holder = f"owner {caller.owner}" if caller is not None else arrival.holder
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
            answer = _closing("The body did not arrive in time.\n", 408)
        except BodyGaveWayError:
            text = "The server is receiving too much data at once. Please try again in a moment.\n"
            answer = PlainTextResponse(text, 503, {"Retry-After": str(RETRY_SECONDS)})
            if limit > MAX_BODY_BYTES:  # the rest of a smaller body is read, so that its sender sees the response
                answer.headers["Connection"] = "close"
        finally:
            self._budget.release(arrival)
        if answer is not None and not started:
            await answer(scope, receive, send)


class InPieces:
    """Sends large bodies in pieces and bounds their total.

    Past the bound, connections that have not read for longest are dropped; one that keeps reading never is. The
    connection's send timeout bounds a single stall.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held: dict[ClientConnection, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            connection = connection_of(scope) if len(body) > PIECE_BYTES else None
            if connection is None:
                await send(message)
                return
            self._held[connection] = len(body)
            try:
                for start in range(0, len(body), PIECE_BYTES):
                    more = message.get("more_body", False) or start + PIECE_BYTES < len(body)
                    self._keep_within()
                    await send({**message, "body": body[start : start + PIECE_BYTES], "more_body": more})
                    await asyncio.sleep(0)  # a fast reader must not starve the others
            finally:
                self._held.pop(connection, None)

        await self._app(scope, receive, send_in_pieces if scope["type"] == "http" else send)

    def _keep_within(self) -> None:
        while sum(self._held.values()) > MAX_HELD_BYTES:
            unread = [(each.unread_since, each) for each in self._held if each.unread_since is not None]
            if not unread:
                return
            longest = min(unread, key=lambda pair: pair[0])[1]
            del self._held[longest]
            longest.drop()


class StrictHttp:
    """Rejects ambiguous requests and closes the connection, as its further bytes cannot be trusted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            names = {name for name, _ in scope["headers"]}
            if scope["http_version"] not in ("1.0", "1.1"):
                await _closing("Only HTTP/1.0 and HTTP/1.1 are supported.\n", 505)(scope, receive, send)
                return
            if b"transfer-encoding" in names and b"content-length" in names:
                text = "Send Content-Length or Transfer-Encoding, not both.\n"
                await _closing(text, 400)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(scope: Scope) -> PlainTextResponse | None:
    path = scope.get("raw_path") or scope["path"]
    request_line = len(scope["method"]) + len(path) + len(scope.get("query_string", b"")) + 13  # blanks, ?, version
    if request_line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        return PlainTextResponse("The headers are too large.\n", 431)
    if any(value.lower() != "identity" for value in header_values(scope, b"content-encoding")):
        return PlainTextResponse("Compressed request bodies are not supported.\n", 415)
    for length in header_values(scope, b"content-length"):
        if len(length) > 18 or not length.isdecimal() or int(length) > _body_limit(scope):
            return _too_large(_body_limit(scope))
    return None


def _closing(text: str, status: int) -> PlainTextResponse:
    return PlainTextResponse(text, status, {"Connection": "close"})


def _body_limit(scope: Scope) -> int:
    return LARGER_BODIES.get(scope["path"], MAX_BODY_BYTES)


def _claimed_bytes(scope: Scope) -> int:
    lengths = header_values(scope, b"content-length")
    # Chunked bodies count as the largest allowed.
    return int(lengths[0]) if lengths else (MAX_BODY_BYTES if header_values(scope, b"transfer-encoding") else 0)


def _too_large(limit: int) -> PlainTextResponse:
    return PlainTextResponse(f"The request is too large: at most {limit:,} bytes are allowed.\n", 413)
