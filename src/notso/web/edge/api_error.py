"""API errors: a status and the API's error object, without traceback or echoed input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notso.smollm3 import (
    ContextLengthError,
    InvalidRequestError,
    NotsoError,
    OutOfMemoryError,
    TemplateError,
)
from notso.web.values.errors import Problem, QuotaError, StorageError, StorageFullError, lacks_threads

OLLAMA_PREFIX = "/api/"

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
    "grammar": "response_format",
}


class ApiError(Exception):
    """Error response of an API request.

    `param` is the invalid field; `details` is for Anthropic's clients.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.details = details

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI error body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic error body."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = {"details": dict(self.details)} if self.details is not None else {}
        return {"type": "error", "error": self.body["error"] | {"type": kind} | details}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """Ollama error body."""
        return {"error": self.message}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the format of the API at `path`."""
        if path.startswith(OLLAMA_PREFIX):
            return self.ollama_body
        return self.anthropic_body if path.startswith("/v1/messages") else self.body

    def called(self, names: Mapping[str, str]) -> ApiError:
        """Rename the field in `param` and in the message."""
        if self.param is not None and self.param in names:
            self.message = _renamed(self.message, self.param, names[self.param])
            self.param = names[self.param]
        return self


def api_error_of(error: BaseException) -> ApiError:
    """Convert an exception to an ApiError."""
    # Bad input must not become a 5xx: clients retry those.
    match error:
        case ApiError():
            return error
        case Problem():
            code = "queue_full" if error.status == 429 else "unavailable"
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
            return ApiError(503, "storage_failed", str(error), retry_after_seconds=5)
        case RuntimeError() if lacks_threads(error):
            return ApiError(503, "overloaded", "no thread can be started at the moment", retry_after_seconds=5)
        case NotsoError():
            return ApiError(500, "engine_error", str(error))
        case _:
            return ApiError(500, "internal_error", "internal error; see the server's log")


def _renamed(message: str, name: str, other: str) -> str:
    return other + message.removeprefix(name) if message.startswith(f"{name} ") else message
