"""Session affinity: related requests go to the replica that caches their prefix.

As in deploy/haproxy.cfg: browsers by cookie, API clients by conversation id, else by key or address. Ray's consistent
hashing uses one header, `x-session-id`, which this middleware sets in Serve's proxies unless the client did.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.web.edge.errors import is_api_path

Header = tuple[bytes, bytes]

SESSION = b"x-session-id"
COOKIE = "notso_replica"
_COOKIE = re.compile(rb"(?:^|;\s*)notso_replica=([0-9a-f]{16})(?:;|$)")


def affinity_key(path: str, headers: Iterable[Header], address: str) -> str:
    """Return a hash that is equal for related requests and hides API keys.

    headers: ASGI headers.
    """
    found = dict(headers)
    if is_api_path(path):
        named = found.get(b"x-conversation-id") or found.get(b"authorization") or found.get(b"x-api-key")
        kind = "program"
    else:
        named, kind = browser(found.get(b"cookie", b"")), "browser"
    told = f"{kind}\0".encode() + (named or address.encode())
    return hashlib.sha256(told).hexdigest()[:32]


def browser(cookies: bytes) -> bytes | None:
    """Return the value of the affinity cookie."""
    match = _COOKIE.search(cookies)
    return match[1] if match is not None else None


def new_cookie() -> bytes:
    """Return a `Set-Cookie` value, which only routes requests."""
    return f"{COOKIE}={secrets.token_hex(8)}; Path=/; HttpOnly; SameSite=Lax".encode()


class Affinity:
    """ASGI middleware for Serve's HTTP proxies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(name == SESSION for name, _ in scope["headers"]):
            key = affinity_key(scope["path"], scope["headers"], (scope.get("client") or ("",))[0])
            scope = {**scope, "headers": [*scope["headers"], (SESSION, key.encode())]}
        await self._app(scope, receive, send)


def proxy_layers() -> list[Middleware]:
    """Return the middleware, for Serve's callback in plan.ENVIRONMENT."""
    return [Middleware(Affinity)]
