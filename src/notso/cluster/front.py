"""ASGI layers: one between Ray Serve and the application in a replica, and one in Serve's proxy.

In a replica, `ReplicaMiddleware` delays startup until the model is loaded, and sets a cookie that directs a browser's
later requests to one replica, not necessarily this one. It also limits the duration of the page's event stream, because
a stopping replica waits until its running requests have ended.

In the proxy, `AffinityMiddleware` adds a session id, which makes Serve send all requests of a client to the same
replica. That replica has the client's conversations in its cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.cluster.plan import ENVIRONMENT
from notso.web.edge.errors import is_api_path

logger = logging.getLogger("notso.cluster")

FEED_PATH = "/feed"  # path of the event stream that pages keep open
# When the stream ends, the page reconnects and continues after the last event. If the replica is stopping, the page
# then reaches another replica.
FEED_SECONDS = 20.0


class ReplicaMiddleware:
    """ASGI layer of a replica. Startup waits for `ready`; shutdown waits for `drain`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ready: Callable[[], Awaitable[None]],
        drain: Callable[[], Awaitable[None]],
        feed_seconds: float = FEED_SECONDS,
    ) -> None:
        self._app = app
        self._ready, self._drain = ready, drain
        self._feed_seconds = feed_seconds
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(scope, receive, send)
            return
        if not self._warned and all(name != SESSION for name, _ in scope["headers"]):
            self._warned = True
            logger.warning("requests have no session id; start Ray with the variables %s", ", ".join(ENVIRONMENT))
        if scope["path"] == FEED_PATH:
            await self._serve_with_timeout(scope, receive, send)
        elif not is_api_path(scope["path"]):
            await self._app(scope, receive, _set_affinity_cookie(scope, send))
        else:
            await self._app(scope, receive, send)

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_last() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._drain()
            return message

        async def send_when_ready(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._ready()
            await send(message)

        await self._app(scope, receive_last, send_when_ready)

    async def _serve_with_timeout(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = ended = False

        async def send_and_track(message: Message) -> None:
            nonlocal started, ended
            started = True
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        limit = asyncio.timeout(self._feed_seconds)
        try:
            async with limit:
                await self._app(scope, receive, send_and_track)
        except TimeoutError:
            if not (limit.expired() and started):  # the application raised the error, or nothing was sent
                raise
            if not ended:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


def _set_affinity_cookie(scope: Scope, send: Send) -> Send:
    headers = dict(scope["headers"])
    if browser_id(headers.get(b"cookie", b"")) is not None or b"text/html" not in headers.get(b"accept", b""):
        return send

    async def send_with_cookie(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"set-cookie", new_cookie())]}
        await send(message)

    return send_with_cookie


Header = tuple[bytes, bytes]

SESSION = b"x-session-id"
COOKIE = "notso_replica"
_COOKIE = re.compile(rb"(?:^|;\s*)notso_replica=([0-9a-f]{16})(?:;|$)")


def affinity_key(path: str, headers: Iterable[Header], address: str) -> str:
    """Return a hash of what identifies the client: a header, the cookie or the address. `headers`: as in ASGI."""
    found = dict(headers)
    if is_api_path(path):
        client = found.get(b"x-conversation-id") or found.get(b"authorization") or found.get(b"x-api-key")
        kind = "program"
    else:
        client, kind = browser_id(found.get(b"cookie", b"")), "browser"
    identity = f"{kind}\0".encode() + (client or address.encode())
    return hashlib.sha256(identity).hexdigest()[:32]


def browser_id(cookies: bytes) -> bytes | None:
    match = _COOKIE.search(cookies)
    return match[1] if match is not None else None


def new_cookie() -> bytes:
    return f"{COOKIE}={secrets.token_hex(8)}; Path=/; HttpOnly; SameSite=Lax".encode()


class AffinityMiddleware:
    # ASGI layer in Serve's proxy. It adds a session id to requests without one.

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(name == SESSION for name, _ in scope["headers"]):
            key = affinity_key(scope["path"], scope["headers"], (scope.get("client") or ("",))[0])
            scope = {**scope, "headers": [*scope["headers"], (SESSION, key.encode())]}
        await self._app(scope, receive, send)


def proxy_layers() -> list[Middleware]:
    return [Middleware(AffinityMiddleware)]
