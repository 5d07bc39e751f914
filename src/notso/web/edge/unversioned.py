"""The list of models for programs that omit /v1. The path /models is also that of a page."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from notso.web.edge.security import HttpMiddleware, header_values

PAGE, LIST = "/models", "/v1/models"


class UnversionedModels(HttpMiddleware):
    """Treats `GET /models` as `GET /v1/models` if a program sent it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == PAGE and scope["method"] in ("GET", "HEAD") and _is_program(scope):
            scope.update(path=LIST, raw_path=LIST.encode())
        await self._app(scope, receive, send)


def _is_program(scope: Scope) -> bool:
    # Browsers accept HTML, or send the header of htmx. A key alone does not identify a program, because proxies add
    # bearer tokens to the requests of browsers.
    accepted = ",".join(header_values(scope, b"accept")).lower()
    if "text/html" in accepted or header_values(scope, b"hx-request"):
        return False
    schemes = [value.partition(" ")[0].lower() for value in header_values(scope, b"authorization")]
    return "application/json" in accepted or "bearer" in schemes or bool(header_values(scope, b"x-api-key"))
