"""Which requests belong together, so that they meet at the replica whose cache has what they begin with.

The same as deploy/haproxy.cfg: a browser by a cookie, a program by the conversation it names, else by its key or
address. Ray's consistent hashing goes by one header, `x-session-id`, which Serve's proxies read: there it is written,
unless whoever asks has done that.
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
    """Equal for requests that belong together; a hash, for the key of a program is none of Ray's business.

    headers: as ASGI has them, names in lower case. address: of whoever sent it.
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
    """What a browser was given to be known again."""
    match = _COOKIE.search(cookies)
    return match[1] if match is not None else None


def new_cookie() -> bytes:
    """A `Set-Cookie` for a browser that has none. It opens nothing: it says where its requests go."""
    return f"{COOKIE}={secrets.token_hex(8)}; Path=/; HttpOnly; SameSite=Lax".encode()


class Affinity:
    """A layer of Serve's HTTP proxies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(name == SESSION for name, _ in scope["headers"]):
            key = affinity_key(scope["path"], scope["headers"], (scope.get("client") or ("",))[0])
            scope = {**scope, "headers": [*scope["headers"], (SESSION, key.encode())]}
        await self._app(scope, receive, send)


def proxy_layers() -> list[Middleware]:
    """What Serve's proxies call, where the environment of their Ray says so (plan.ENVIRONMENT)."""
    return [Middleware(Affinity)]
