"""Errors on their way to a program: a status and the OpenAI API's error object, one line, no traceback, no echo."""

from __future__ import annotations

from typing import Any

from notso.smollm3 import (
    ContextLengthError,
    InvalidRequestError,
    NotsoError,
    OutOfMemoryError,
    TemplateError,
)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PARAMS = {"repetition_penalty": "repeat_penalty", "context_tokens": "messages"}  # ours -> as the API spells it


class ApiError(Exception):
    """Ends an API request. `param` names the field that is at fault, `code` the kind of fault."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error_of(error: BaseException) -> ApiError:
    """What an error of the floors below is to a program: bad input is never a 5xx, for clients try those again."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, "context_length_exceeded", str(error), param="messages")
        case InvalidRequestError():
            param = _PARAMS.get(error.param or "", error.param)
            return ApiError(400, "invalid_value", str(error), param=param)
        case TemplateError():
            return ApiError(400, "invalid_value", str(error), param="messages")
        case OutOfMemoryError():
            return ApiError(507, "out_of_memory", str(error))
        case NotsoError():
            return ApiError(500, "engine_error", str(error))
        case _:
            return ApiError(500, "internal_error", "something went wrong inside; the server's log says more")
