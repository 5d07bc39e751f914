"""Standard JSON, without NaN and Infinity, and values that mean "off" in settings of other programs."""

from __future__ import annotations

import json
from typing import Any, NoReturn

# Values that mean "off" or "not set". An unknown field with one of these values is ignored.
OFF: tuple[Any, ...] = (None, False, [], {}, "")


def is_json_object(text: object) -> bool:
    """Return whether `text` is a standard JSON object."""
    try:
        return isinstance(text, str) and isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError; for the argument `parse_constant` of json.loads."""
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
