"""Parse untrusted JSON, and compare JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

# Values that mean "off" or "not set". Unknown fields with one of these values are ignored.
OFF: tuple[Any, ...] = (None, False, [], {}, "")


def is_one_of(value: object, allowed: Iterable[object]) -> bool:
    """Return whether a JSON value is in `allowed`; 1 does not equal true."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)


def json_or_none(text: str | bytes, *, is_strict: bool = False) -> Any:
    """Parse `text`; return None if it is invalid JSON. is_strict: reject NaN and Infinity."""
    try:
        return json.loads(text, parse_constant=refuse_constant if is_strict else None)
    except (ValueError, RecursionError):
        return None


def is_json_object(text: object) -> bool:
    """Return whether `text` is a standard JSON object."""
    return isinstance(text, str) and isinstance(json_or_none(text, is_strict=True), dict)


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError. Passed to JSON decoders as `parse_constant`."""
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
