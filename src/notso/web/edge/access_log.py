"""Access log: a record for each HTTP request, except successful requests to routes that are requested often."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from notso.web.edge.security import HttpMiddleware
from notso.web.values.request_id import HEADER, SCOPE_KEY, request_id, resolve_request_id

log = logging.getLogger("notso.access")

# Only failures are logged for these routes, because pages and monitoring systems request them often.
_QUIET = ("/livez", "/health", "/v1/health", "/metrics", "/static/{path:path}", "/static")


class AccessLog(HttpMiddleware):
    """ASGI middleware that assigns the request id and logs the request when it ends.

    Records contain the route's template instead of the URL, which may contain chat ids and search terms.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = resolve_request_id(next((value for key, value in scope["headers"] if key == HEADER.encode()), None))
        token = request_id.set(name)
        scope[SCOPE_KEY] = name
        began = time.monotonic()
        status, sent, ended, disconnected = 0, 0, False, False

        async def receive_noted() -> Message:
            nonlocal disconnected
            message = await receive()
            if message["type"] == "http.disconnect" and not ended:
                disconnected = True
            return message

        async def send_noted(message: Message) -> None:
            nonlocal status, sent, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive_noted, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            if log.isEnabledFor(logging.INFO) and (route not in _QUIET or status >= 400):
                outcome = "" if ended else ", client disconnected" if disconnected else ", incomplete"
                took_ms = round((time.monotonic() - began) * 1000)
                log.info("%s %s %s, %d bytes in %d ms%s", scope["method"], route, status or "-", sent, took_ms, outcome)
            request_id.reset(token)
