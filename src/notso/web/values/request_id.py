"""Assign an id to each HTTP request, for the response header and every log record of the request."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = "x-request-id"
SCOPE_KEY = "notso.request_id"  # ASGI scope key of the id, for log records of a connection's timers
_PLAIN = re.compile(rb"[A-Za-z0-9._-]{1,64}")

request_id: ContextVar[str | None] = ContextVar("notso_request_id", default=None)
"""Id of the request being served; tasks and threads started for it inherit the value."""


def resolve_request_id(sent: bytes | None) -> str:
    """Return the client's id if it is short and plain, otherwise a new one."""
    if sent is not None and _PLAIN.fullmatch(sent):
        return sent.decode()
    return f"req_{secrets.token_hex(12)}"
