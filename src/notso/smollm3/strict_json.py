"""Standard JSON, without NaN and Infinity."""

from __future__ import annotations

import json
from typing import NoReturn


def is_json_object(text: object) -> bool:
    """Return whether `text` is a standard JSON object."""
    try:
        return isinstance(text, str) and isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
