"""Paths for programs that omit /v1: the list of models, whose path is also that of a page, and Anthropic's API."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from notso.web.edge.security import HttpMiddleware, header_values

PAGE = "/models"
PATHS = frozenset({PAGE, "/messages", "/messages/count_tokens"})


class UnversionedPaths(HttpMiddleware):
    """Adds /v1 to the paths in PATHS; to that of the page only if a program sent the request."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in PATHS and (path != PAGE or (scope["method"] in ("GET", "HEAD") and _is_program(scope))):
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
