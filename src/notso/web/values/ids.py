"""Names of things: UUIDv7 where order in time helps, 128 random bits where a name must not be guessed."""

from __future__ import annotations

import re
import secrets

import uuid_utils

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_GENERATION = re.compile(r"[0-9a-f]{32}")


def new_id() -> str:
    """A fresh UUIDv7 in lower case."""
    return str(uuid_utils.uuid7())


def new_generation_id() -> str:
    """A fresh unguessable name of a generation."""
    return secrets.token_hex(16)


def new_tool_use_id() -> str:
    """A fresh name of a tool call that came from a file."""
    return f"call_{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether `text` is spelled as a UUID in lower case."""
    return _UUID.fullmatch(text) is not None


def is_generation_id(text: str) -> bool:
    """Whether `text` is spelled as a generation's name."""
    return _GENERATION.fullmatch(text) is not None
