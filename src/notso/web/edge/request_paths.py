"""Convert request paths that differ from the paths of routes.

Routes are declared without the base path (such as /chat) under which a proxy publishes the server. `BasePath` removes
it from the paths of requests and adds it to paths in response headers; `BasePathExtension` adds it to the links in
templates. `UnversionedPaths` adds /v1 for programs that omit it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextvars import ContextVar
from urllib.parse import urlsplit

from jinja2.ext import Extension
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.edge.access import PEER, is_in_networks
from notso.web.edge.security import HttpMiddleware, header_values
from notso.web.values.settings import is_base_path

base_path: ContextVar[str] = ContextVar("notso_base_path", default="")
"""Base path of the request being served, without a trailing slash; '' if there is none."""

_PATH_HEADERS = ("location", "hx-redirect", "hx-push-url")
_COOKIE_PATH = re.compile(r"(?i)(?<=; path=)/")

_ATTRIBUTES = (
    "href|src|action|formaction|hx-get|hx-post|hx-sse:connect|data-copy|data-katex|data-copy-tex|data-katex-css"
)
_LINK = re.compile(rf'(?<=\s)((?:{_ATTRIBUTES})=")(?=/(?!/)|\{{\{{)')

# Paths of Anthropic's API, and of the list of models, which has the same path as a page.
MODELS_PAGE = "/models"
UNVERSIONED_PATHS = frozenset({MODELS_PAGE, "/messages", "/messages/count_tokens"})


class BasePathExtension(Extension):
    """Jinja extension that prefixes the links in template sources with the base path."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return _LINK.sub(r"\1{{ root() }}", source)


class BasePath(HttpMiddleware):
    """ASGI middleware for the configured base path, or the X-Forwarded-Prefix of a trusted proxy.

    Requests may omit the base path, because some proxies remove it.
    """

    def __init__(self, app: ASGIApp, configured: str, trusted_proxies: Sequence[str]) -> None:
        super().__init__(app)
        self._configured = configured.rstrip("/")
        self._trusted = [ipaddress.ip_network(proxy) for proxy in trusted_proxies]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        base = self._base_of(scope)
        raw: bytes = scope["raw_path"]
        if base:
            base_path.set(base)
            if raw == base.encode() or raw.startswith(base.encode() + b"/"):
                scope.update(path=scope["path"][len(base) :] or "/", raw_path=raw[len(base) :] or b"/")

        async def send_prefixed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if message["status"] == 307:
                    # The router redirects paths such as /chats/ to absolute URLs, which lack the base path and, behind
                    # most proxies, the scheme https.
                    headers["location"] = urlsplit(headers["location"])._replace(scheme="", netloc="").geturl()
                if base:
                    _prefix_headers(base, headers)
            await send(message)

        await self._app(scope, receive, send_prefixed)

    def _base_of(self, scope: Scope) -> str:
        if not self._trusted:
            return self._configured
        prefix = Headers(scope=scope).get("x-forwarded-prefix", "").rstrip("/")
        return prefix if is_base_path(prefix) and is_in_networks(scope[PEER], self._trusted) else self._configured


def _prefix_headers(base: str, headers: MutableHeaders) -> None:
    for name in _PATH_HEADERS:
        value = headers.get(name, "")
        if value.startswith("/") and not value.startswith("//"):
            headers[name] = base + value
    cookies = headers.getlist("set-cookie")
    if cookies:
        del headers["set-cookie"]
        for cookie in cookies:
            headers.append("set-cookie", _COOKIE_PATH.sub(lambda _: base + "/", cookie, count=1))


class UnversionedPaths(HttpMiddleware):
    """Adds /v1 to UNVERSIONED_PATHS, but to MODELS_PAGE only if the client is a program."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in UNVERSIONED_PATHS and (
            path != MODELS_PAGE or (scope["method"] in ("GET", "HEAD") and _is_program(scope))
        ):
            scope.update(path=f"/v1{path}", raw_path=f"/v1{path}".encode())
        await self._app(scope, receive, send)


def _is_program(scope: Scope) -> bool:
    # Browsers accept HTML, or send the header of htmx. A key alone does not identify a program, because proxies add
    # bearer tokens to the requests of browsers.
    accepted = ",".join(header_values(scope, b"accept")).lower()
    if "text/html" in accepted or header_values(scope, b"hx-request"):
        return False
    schemes = [value.partition(" ")[0].lower() for value in header_values(scope, b"authorization")]
    return "application/json" in accepted or "bearer" in schemes or bool(header_values(scope, b"x-api-key"))
