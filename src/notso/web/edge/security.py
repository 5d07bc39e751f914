"""Host and cross-site checks and security headers, as ASGI layers.

They use the raw `Host` header and `scope["path"]`, never a URL built from both: a slash or question mark in `Host`
makes the two differ, which has opened guarded routes in other servers.
"""

from __future__ import annotations

import re
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.edge.origins import ALLOWED

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
COSTLY_READS = frozenset({"/backup", "/export", "/search"})
"""Safe methods with high cost; pages of other sites may not trigger them."""

_HOST = re.compile(r"(\[[0-9a-f]*:[0-9a-f:.]*\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)


class HostGuard:
    """421 unless `Host` names this server, against DNS rebinding."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._known(scope):
            await self._app(scope, receive, send)
        else:
            await _refuse(421, "This host name is not allowed.")(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        hosts = header_values(scope, b"host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        return match is not None and match[1].strip("[]").lower() in self._names


class CrossSiteGuard:
    """403 for changes by other sites' pages, unless the origin is allowed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_free = scope["method"] in SAFE_METHODS and scope["path"] not in COSTLY_READS
        if is_free or scope.get(ALLOWED) or self._same_site(scope):
            await self._app(scope, receive, send)
        else:
            await _refuse(403, "Requests from other sites are refused.")(scope, receive, send)

    def _same_site(self, scope: Scope) -> bool:
        fetch_site = header_values(scope, b"sec-fetch-site")
        if fetch_site:
            return all(value in ("same-origin", "none") for value in fetch_site)
        origins = header_values(scope, b"origin")
        if not origins:
            # A program sends neither header; its key decides.
            return True
        host = header_values(scope, b"host")[0].lower()
        return len(origins) == 1 and _origin_host(origins[0]) == host


class SecurityHeaders:
    """Adds security headers and the nonce for the page's scripts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        scope.setdefault("state", {})["nonce"] = nonce

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", content_security_policy(nonce))
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                if not headers.get("Cache-Control", "").startswith("public"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, send_with_policy)


def content_security_policy(nonce: str) -> str:
    """Return the policy of a page: own resources only."""
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; frame-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    )


def header_values(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a header (lower-case name), in order."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _origin_host(origin: str) -> str | None:
    # Result is spelled as in `Host`.
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return parts.netloc.lower()


def _refuse(status: int, text: str) -> PlainTextResponse:
    return PlainTextResponse(text + "\n", status)
