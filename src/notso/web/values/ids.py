"""Ids: UUIDv7 where chronological order helps, 128 random bits where they must not be guessed.

Request ids: one per HTTP request, in its response header and in every log record that it causes.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

import uuid_utils

HEADER = "x-request-id"
SCOPE_KEY = "notso.request_id"  # in the ASGI scope, for the connection's timers
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}")

request_id: ContextVar[str | None] = ContextVar("notso_request_id", default=None)
"""Id of the request being served; tasks and threads started for it inherit the value. None elsewhere."""


def request_id_of(given: bytes | None) -> str:
    """Return the client's id if it is short and plain, else a new one."""
    if given is not None and _GIVEN.fullmatch(given):
        return given.decode()
    return f"req_{secrets.token_hex(12)}"


_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_GENERATION = re.compile(r"[0-9a-f]{32}")


def new_id() -> str:
    """Return a lower-case UUIDv7."""
    return str(uuid_utils.uuid7())


def new_generation_id() -> str:
    return secrets.token_hex(16)


def new_tool_use_id() -> str:
    """Return an id for an imported tool call."""
    return f"call_{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether `text` is a lower-case UUID."""
    return _UUID.fullmatch(text) is not None


def is_generation_id(text: str) -> bool:
    return _GENERATION.fullmatch(text) is not None
