"""API errors: an HTTP status and the error object of the requested API.

Middleware and exception handlers also return plain-text errors, which ApiEdge converts to the error object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.smollm3 import (
    ContextLengthError,
    EngineLostError,
    InvalidRequestError,
    NotsoError,
    OutOfMemoryError,
    TemplateError,
)
from notso.web.values.errors import (
    EngineUnavailableError,
    Problem,
    QuotaError,
    StorageDamagedError,
    StorageError,
    StorageFullError,
    is_thread_shortage,
)
from notso.web.values.request_id import request_id

OLLAMA_PREFIX = "/api/"
SHARED_PREFIXES = ("/v1/files/", "/v1/models/")
"""Prefixes of paths that use Anthropic's format for requests with the header `anthropic-version`, else OpenAI's."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_PARAMS = {  # engine parameter -> field of the API
    "context_tokens": "messages",
    "continue_last": "messages",
    "grammar": "response_format",
}


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """Error response of an API request."""

    status: int
    code: str
    message: str
    _: KW_ONLY
    param: str | None = None  # the invalid field, if any
    retry_after_seconds: int | None = None
    details: Mapping[str, Any] | None = None  # sent only in Anthropic's format

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = {"details": dict(self.details)} if self.details is not None else {}
        return {"type": "error", "error": self.body["error"] | {"type": kind} | details}

    @property
    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.message}

    def body_for(self, scope: Scope) -> dict[str, Any]:
        """Return the body in the format of the request's API."""
        if scope["path"].startswith(OLLAMA_PREFIX):
            return self.ollama_body
        return self.anthropic_body if _is_anthropic(scope) else self.body

    def called(self, names: Mapping[str, str]) -> ApiError:
        if self.param is not None and self.param in names:
            other = names[self.param]
            if self.message.startswith(f"{self.param} "):
                self.message = other + self.message.removeprefix(self.param)
            self.param = other
        return self


def _is_anthropic(scope: Scope) -> bool:
    path = scope["path"]
    if f"{path}/".startswith(SHARED_PREFIXES):
        return "anthropic-version" in Headers(scope=scope)
    return bool(path.startswith("/v1/messages"))


def api_error_of(error: BaseException) -> ApiError:
    # Invalid input must not result in a 5xx status, because clients would repeat the request.
    match error:
        case ApiError():
            return error
        case Problem():
            code = (CODES | {403: "forbidden", 429: "queue_full"}).get(error.status, "internal_error")
            return ApiError(error.status, code, error.sentence, retry_after_seconds=error.retry_after_seconds)
        case ContextLengthError():
            return ApiError(400, "context_length_exceeded", str(error), param="messages")
        case InvalidRequestError():
            return ApiError(400, "invalid_value", str(error), param=error.param).called(_PARAMS)
        case TemplateError():
            return ApiError(400, "template_error", str(error), param="messages")
        case OutOfMemoryError():
            return ApiError(507, "out_of_memory", str(error))
        case QuotaError():
            return ApiError(429, "rate_limited", str(error), retry_after_seconds=error.retry_after_seconds)
        case StorageFullError():
            return ApiError(507, "disk_full", str(error))
        case StorageError():
            seconds = None if isinstance(error, StorageDamagedError) else 5
            return ApiError(503, "storage_failed", str(error), retry_after_seconds=seconds)
        case RuntimeError() if is_thread_shortage(error):
            return ApiError(503, "overloaded", "no thread can be started at the moment", retry_after_seconds=5)
        case EngineLostError():  # a GPU failed or a remote engine was lost; the next engine can serve the request
            return ApiError(503, "engine_lost", str(error), retry_after_seconds=5)
        case EngineUnavailableError():
            return ApiError(503, "engine_unavailable", str(error), retry_after_seconds=5)
        case NotsoError():
            return ApiError(500, "engine_error", str(error))
        case _:
            return ApiError(500, "internal_error", "internal error; see the server's log")


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
"""API paths that begin with none of PREFIXES."""

CODES = {
    400: "invalid_value",
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
    507: "disk_full",
}


_UNKNOWN_ENDPOINT = "there is no such endpoint; /docs lists the available endpoints"


class ApiEdge:
    """ASGI middleware that converts plain-text errors of the inner application to the API's format."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_api(scope):
            await self._app(scope, receive, send)
            return
        started: Message | None = None  # start of a plain-text error, held back because its headers will change
        text = b""

        async def send_as_api(message: Message) -> None:
            nonlocal started, text
            if message["type"] == "http.response.start":
                if _is_anthropic(scope) and (name := request_id.get()) is not None:
                    MutableHeaders(scope=message)["request-id"] = name  # read by Anthropic's client
                if message["status"] >= 400 and _is_plain(message):
                    started = message
                    return
            elif started is not None:
                text += message.get("body", b"")
                if message.get("more_body"):
                    return
                message = {**message, "body": _convert_error(started, text, scope)}
                await send(started)
                started = None
            await send(message)

        await self._app(scope, receive, send_as_api)


class UnexpectedErrors:
    """ASGI middleware that handles an exception of type `kind` with `handler`, unless the response has begun."""

    # Starlette calls its handler for Exception outside all middleware, and uvicorn then closes the connection, on which
    # the client may have sent the next request. Requests that the server sends to itself also pass through this
    # middleware.

    def __init__(
        self, app: ASGIApp, kind: type[BaseException], handler: Callable[[Request, Any], Awaitable[Response]]
    ) -> None:
        self._app = app
        self._kind = kind
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = scope["type"] != "http"

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except self._kind as error:
            if not has_begun:
                await (await self._handler(Request(scope), error))(scope, receive, send)
            if has_begun or not isinstance(error, Exception):  # a canceled task must end as canceled
                raise


async def show_stopping(request: Request, error: asyncio.CancelledError) -> Response:
    """Return the response to a request canceled by shutdown, instead of uvicorn's status 500."""
    return PlainTextResponse("The server is stopping.", 503, {"Retry-After": "5"})


def is_api(scope: Scope) -> bool:
    return is_api_path(scope["path"])


def is_api_path(path: str) -> bool:
    return f"{path}/".startswith(PREFIXES) or path in PATHS


def _is_plain(message: Message) -> bool:
    return Headers(scope=message).get("content-type", "").startswith("text/plain")


def _convert_error(start: Message, text: bytes, scope: Scope) -> bytes:
    status: int = start["status"]
    message = _UNKNOWN_ENDPOINT if status == 404 else text.decode("utf-8", "replace").strip()
    error = ApiError(status, CODES.get(status, "internal_error"), message)
    body = json.dumps(error.body_for(scope), ensure_ascii=False).encode()
    headers = MutableHeaders(scope=start)
    headers["content-type"] = "application/json"
    headers["content-length"] = str(len(body))
    return body
