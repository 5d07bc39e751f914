"""ASGI middleware that checks hosts and cross-site requests, and adds security headers.

The checks use the raw `Host` header and `scope["path"]`, never a URL built from both. If `Host` contains a slash or a
question mark, the path of such a URL differs from the routed path, so guarded routes could
be reached without a key.

Origin rules let pages of other sites use the API; cookies of such requests are ignored. The rules do not apply to the
chat pages. On the port that imitates Ollama, Ollama's default origins are also allowed.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.edge.errors import is_api
from notso.web.values.settings import OriginRules

GREETING = "Ollama is running"
"""Response to `GET /`, by which clients recognize Ollama."""

HOSTS = ("localhost", "127.0.0.1", "0.0.0.0")
DEFAULT_ORIGINS = (
    *(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in HOSTS),
    *(f"{scheme}://*" for scheme in ("app", "file", "tauri", "vscode-webview", "vscode-file")),
)
"""Ollama's own defaults: pages on this machine and desktop applications."""


def is_ollama_port(scope: Scope) -> bool:
    port = getattr(scope["app"].state, "ollama_port", None) if "app" in scope else None
    return port is not None and bool(scope.get("server")) and scope["server"][1] == port


class HttpMiddleware(ABC):
    """ASGI middleware for HTTP requests. Other events, such as the start of the server, bypass it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        handle = self.handle if scope["type"] == "http" else self._app
        return handle(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class OllamaGreeting(HttpMiddleware):
    """Answers `GET /` and `HEAD /` on Ollama's port with Ollama's greeting, without requiring a key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_root = scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        app = PlainTextResponse(GREETING) if is_root and is_ollama_port(scope) else self._app
        await app(scope, receive, send)


ALLOWED = "notso.allowed_origin"
"""ASGI scope key that marks requests from an allowed origin."""
PREFLIGHT_SECONDS = 600
_METHODS = "GET, POST, DELETE"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,2048}")


class CrossOriginAccess(HttpMiddleware):
    """Answers CORS preflight requests from allowed origins and adds CORS headers to responses.

    Credentials are never allowed, so browsers hide responses to requests with cookies.
    """

    def __init__(self, app: ASGIApp, rules: Iterable[str] = ()) -> None:
        super().__init__(app)
        self._rules = OriginRules(rules)
        self._ollama_rules = OriginRules(DEFAULT_ORIGINS)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = self._allowed(scope) if _is_readable(scope) else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        requested = {name: value for name, value in scope["headers"] if name.startswith(b"access-control-request-")}
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in requested:
            await _preflight(origin, requested)(scope, receive, send)
            return

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_cors_headers(origin) | {"access-control-expose-headers": "*"})
            await send(message)

        # Browsers may send a cookie even if they hide the response, but the request must not use the cookie's session.
        # The scope is not copied, because routing stores the route in it for the outer middleware.
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"cookie"]
        scope[ALLOWED] = True
        await self._app(scope, receive, send_readable)

    def _allowed(self, scope: Scope) -> str | None:
        origins = [value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"origin"]
        if len(origins) != 1:
            return None
        is_allowed = self._rules.allow(origins[0]) or (is_ollama_port(scope) and self._ollama_rules.allow(origins[0]))
        return origins[0] if is_allowed else None


def _is_readable(scope: Scope) -> bool:
    return is_api(scope) or (scope["path"] == "/" and is_ollama_port(scope))


def _preflight(origin: str, requested: dict[bytes, bytes]) -> Response:
    headers = _cors_headers(origin) | {
        "access-control-allow-methods": _METHODS,
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }
    names = requested.get(b"access-control-request-headers", b"").decode("latin-1")
    if _HEADER_NAMES.fullmatch(names):
        headers["access-control-allow-headers"] = names
    if requested.get(b"access-control-request-private-network") == b"true":
        headers["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=headers)


def _cors_headers(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
COSTLY_READS = re.compile(r"/(?:backup|export|search|chats/[^/]+/export/[^/]+)")
"""Paths at which GET requests are so expensive that pages of other sites must not trigger them."""
SEARCHABLE = frozenset({"/archive", "/documents"})
"""Paths at which GET requests are searches, and thus expensive, if the query contains `q`."""

_HOST = re.compile(r"(\[[0-9a-f]*:[0-9a-f:.]*\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)


class HostGuard(HttpMiddleware):
    """Rejects (421) requests with a `Host` that does not name this server, to prevent DNS rebinding."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        super().__init__(app)
        self._names = names

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_known_host(scope):
            await self._app(scope, receive, send)
        else:
            refusal = _refuse(421, "This host name is not allowed: see the server's option --allow-host.")
            await refusal(scope, receive, send)

    def _is_known_host(self, scope: Scope) -> bool:
        hosts = header_values(scope, b"host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        return match is not None and match[1].strip("[]").lower() in self._names


class CrossSiteGuard(HttpMiddleware):
    """Rejects (403) changes and costly reads requested by pages of other sites, except from allowed origins."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_free = scope["method"] in SAFE_METHODS and not is_costly_read(scope["path"], scope["query_string"])
        if is_free or scope.get(ALLOWED) or self._same_site(scope):
            await self._app(scope, receive, send)
        else:
            refusal = _refuse(403, "Requests from other sites are refused: see the server's option --allow-origin.")
            await refusal(scope, receive, send)

    def _same_site(self, scope: Scope) -> bool:
        fetch_site = header_values(scope, b"sec-fetch-site")
        if fetch_site:
            return all(value in ("same-origin", "none") for value in fetch_site)
        origins = header_values(scope, b"origin")
        if not origins:
            # Clients other than browsers send neither header. Browsers omit both for reads over HTTP (other than on
            # loopback), but such cross-site reads do not carry the session's cookie, which is SameSite=Strict.
            return True
        host = header_values(scope, b"host")[0].lower()
        return len(origins) == 1 and _origin_host(origins[0]) == host


def is_costly_read(path: str, query: bytes) -> bool:
    # Pages of other sites could also measure how long a search takes, and thus guess what it finds.
    is_search = path in SEARCHABLE and bool(parse_qs(query.decode("latin-1")).get("q"))
    return is_search or COSTLY_READS.fullmatch(path) is not None


class SecurityHeaders(HttpMiddleware):
    """Adds security headers, and stores the nonce for the page's inline scripts in the request's state."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        nonce = secrets.token_urlsafe(16)
        scope.setdefault("state", {})["nonce"] = nonce

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", content_security_policy(nonce))
                headers["X-Content-Type-Options"] = "nosniff"
                # With "no-referrer", browsers send `Origin: null` with forms. Over HTTP (other than on loopback), they
                # also omit Sec-Fetch-Site, so CrossSiteGuard would reject even this server's forms.
                headers["Referrer-Policy"] = "same-origin"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                if not headers.get("Cache-Control", "").startswith("public"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, send_with_policy)


def content_security_policy(nonce: str) -> str:
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; frame-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    )


def header_values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _origin_host(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return parts.netloc.lower()


def _refuse(status: int, text: str) -> PlainTextResponse:
    return PlainTextResponse(text + "\n", status)
