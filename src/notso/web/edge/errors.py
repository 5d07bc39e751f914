"""Request ids, and translation of plain-text errors to JSON.

The inner layers reject requests as plain text; this layer converts that to the error format of the API.
"""

from __future__ import annotations

import json

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.web.edge.api_error import OLLAMA_PREFIX, ApiError
from notso.web.values.request_id import request_id

PREFIXES = ("/v1/", OLLAMA_PREFIX)
PATHS = frozenset(
    {
        "/chat/completions",
        "/chat/completions/input_tokens",
        "/completion",
        "/completions",
        "/responses",
        "/reranking",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/apply-template",
        "/props",
        "/version",
        "/ping",
        "/load",
        "/slots",
        "/rerank",
        "/infill",
        "/embeddings",
        "/embedding",
        "/openapi.json",
    }
)
"""API paths outside of the prefixes, as in llama-server and vLLM."""

_CODES = {
    401: "invalid_api_key",
    403: "cross_site",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    421: "unknown_host",
    429: "rate_limited",
    431: "request_too_large",
    503: "overloaded",
}


class ApiEdge:
    """ASGI layer around those that reject requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_api(scope):
            await self._app(scope, receive, send)
            return
        started: Message | None = None  # held back until the body of a plain-text error arrives
        said = b""

        async def send_as_api(message: Message) -> None:
            nonlocal started, said
            if message["type"] == "http.response.start":
                if scope["path"].startswith("/v1/messages") and (name := request_id.get()) is not None:
                    MutableHeaders(scope=message)["request-id"] = name  # read by Anthropic's client
                if message["status"] >= 400 and _is_plain(message):
                    started = message
                    return
            elif started is not None:
                said += message.get("body", b"")
                if message.get("more_body"):
                    return
                message = {**message, "body": _translated(started, said, scope["path"])}
                await send(started)
                started = None
            await send(message)

        await self._app(scope, receive, send_as_api)


def is_api(scope: Scope) -> bool:
    return is_api_path(scope["path"])


def is_api_path(path: str) -> bool:
    """Whether a path belongs to an API."""
    return f"{path}/".startswith(PREFIXES) or path in PATHS


def _is_plain(message: Message) -> bool:
    return Headers(scope=message).get("content-type", "").startswith("text/plain")


def _translated(start: Message, said: bytes, path: str) -> bytes:
    status: int = start["status"]
    error = ApiError(status, _CODES.get(status, "internal_error"), said.decode("utf-8", "replace").strip())
    body = json.dumps(error.body_for(path), ensure_ascii=False).encode()
    headers = MutableHeaders(scope=start)
    headers["content-type"] = "application/json"
    headers["content-length"] = str(len(body))
    return body
