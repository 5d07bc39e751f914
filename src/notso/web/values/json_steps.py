"""Encode JSON in small steps.

The standard encoder does not release the GIL, so encoding several megabytes at once would block all other threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STEP_ITEMS = 32
"""Number of list members per step; other threads may run between steps."""

MAX_DESCENT = 4
"""Maximum depth at which values are split, enough to reach the log probabilities in a response's choices."""

Encode = Callable[[Any], str]

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_any_number = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def json_steps(value: Any, *, allow_nan: bool = False) -> Iterator[str]:
    """Yield compact JSON in small pieces.

    NaN and infinities raise ValueError unless `allow_nan`; unsupported types raise TypeError.
    """
    return _steps(value, _encode_any_number if allow_nan else _encode, MAX_DESCENT)


def json_bytes(content: Any, *, allow_nan: bool = False) -> bytes:
    return "".join(json_steps(content, allow_nan=allow_nan)).encode()


def _steps(value: Any, encode: Encode, descent: int) -> Iterator[str]:
    if descent and isinstance(value, Mapping) and not _is_flat(value):
        yield "{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else ''}{encode(str(name))}:"
            yield from _steps(each, encode, descent - 1)
        yield "}"
    elif isinstance(value, list | tuple) and (len(value) > STEP_ITEMS or (descent and not _is_flat(value))):
        yield "["
        yield from _members(value, encode, descent)
        yield "]"
    else:
        yield encode(value)


def _members(values: list[Any] | tuple[Any, ...], encode: Encode, descent: int) -> Iterator[str]:
    comma = ""
    for start in range(0, len(values), STEP_ITEMS):
        group = values[start : start + STEP_ITEMS]
        if descent <= 1 or all(map(_is_flat, group)):
            yield comma + encode(group)[1:-1]
            comma = ","
            continue
        for each in group:
            yield comma
            yield from _steps(each, encode, descent - 1)
            comma = ","


def _is_flat(value: Any) -> bool:
    # Flat values have at most STEP_ITEMS members, none of which is a list or object, so they are encoded in one step.
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return len(members) <= STEP_ITEMS and not any(isinstance(each, Mapping | list | tuple) for each in members)
