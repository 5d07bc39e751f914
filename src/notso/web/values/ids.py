"""Create ids: UUIDv7 where chronological order helps, and random ids where they must not be guessable."""

from __future__ import annotations

import re
import secrets

import uuid_utils

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_GENERATION = re.compile(r"[0-9a-f]{32}")


def new_id() -> str:
    """Return a lower-case UUIDv7."""
    return str(uuid_utils.uuid7())


def new_generation_id() -> str:
    return secrets.token_hex(16)


def new_tool_use_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Return whether `text` is a lower-case UUID."""
    return _UUID.fullmatch(text) is not None


def is_generation_id(text: str) -> bool:
    return _GENERATION.fullmatch(text) is not None
