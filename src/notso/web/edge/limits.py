"""How much a client may send and how long it may keep us waiting: pure ASGI layers."""

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
    **{f"/engine/v1/{name}": 16 * 1024 * 1024 for name in ("submit", "prepare", "call")},  # whole conversations
}
"""Exact paths."""
BODY_SECONDS = 60.0
MAX_HEADER_BYTES = 16 * 1024  # with the request line
PIECE_BYTES = 64 * 1024
"""Of a response, handed to the system at once: what a reader must take within the send time limit."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Of all responses that are on their way in pieces: room for any page, and for a few exports of everything."""
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
        if limit > MAX_BODY_BYTES or _claimed_bytes(scope) > FREE_BYTES:
            limit = min(limit, self._budget.most_of_one())
        deadline = asyncio.get_running_loop().time() + self._body_seconds
        arrival = Arrival(self._budget, (scope.get("client") or ("",))[0], limit, deadline)
        started = whole = False

        async def receive_whole() -> Message:
            nonlocal whole
            if whole:  # what comes now is only the news that the client has gone
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
            text = "Too much is being sent to this server at once. Please try again in a moment.\n"
            answer = PlainTextResponse(text, 503, {"Retry-After": str(RETRY_SECONDS)})
            if limit > MAX_BODY_BYTES:  # what is left of a smaller one is read, so that its sender can hear of this
                answer.headers["Connection"] = "close"
        finally:
            self._budget.release(arrival)
        if answer is not None and not started:
            await answer(scope, receive, send)


class InPieces:
    """Hands a large body on in pieces, each when the one before it was taken, and bounds what all of them hold.

    Past the bound those go whose readers have taken nothing for longest. A reader that takes what comes is never cut
    off, whatever there is; how long one may take nothing at all is the connection's business.
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
                    await asyncio.sleep(0)  # a fast reader's body does not keep the others waiting
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
    """Refuses what could be read in two ways, and closes the connection: nothing that follows on it is believed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            names = {name for name, _ in scope["headers"]}
            if scope["http_version"] not in ("1.0", "1.1"):
                await _closing("Only HTTP/1.0 and HTTP/1.1 are spoken here.\n", 505)(scope, receive, send)
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
        return PlainTextResponse("Send the body as it is, not packed.\n", 415)
    for length in header_values(scope, b"content-length"):
        if len(length) > 18 or not length.isdecimal() or int(length) > _body_limit(scope):
            return _too_large(_body_limit(scope))
    return None


def _closing(text: str, status: int) -> PlainTextResponse:
    return PlainTextResponse(text, status, {"Connection": "close"})


def _body_limit(scope: Scope) -> int:
    return LARGER_BODIES.get(scope["path"], MAX_BODY_BYTES)


def _claimed_bytes(scope: Scope) -> int:
    """The length a request claims; the largest there is for one that does not say."""
    lengths = header_values(scope, b"content-length")
    return int(lengths[0]) if lengths else (MAX_BODY_BYTES if header_values(scope, b"transfer-encoding") else 0)


def _too_large(limit: int) -> PlainTextResponse:
    return PlainTextResponse(f"This is too much at once: at most {limit:,} bytes can be sent.\n", 413)
