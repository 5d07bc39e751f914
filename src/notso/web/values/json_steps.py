"""Large JSON, written in small steps: the library's encoder keeps the interpreter until it is done, and with a body of
megabytes nothing else runs for seconds, the event loop included."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STEP_ITEMS = 32
"""How many members of a list are encoded at once; other threads may run between two steps."""

MAX_DESCENT = 4
"""How deep containers are taken apart: choices, a choice, its log probabilities, the list of them."""

Encode = Callable[[Any], str]

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_any_number = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def json_steps(value: Any, *, allow_nan: bool = False) -> Iterator[str]:
    """Yield the JSON of a value, without spaces, in pieces that take about a millisecond each.

    allow_nan: write NaN and infinities as Python does; else they raise ValueError. Raises TypeError for what JSON does
    not have.
    """
    return _steps(value, _encode_any_number if allow_nan else _encode, MAX_DESCENT)


def json_bytes(value: Any, *, allow_nan: bool = False) -> bytes:
    """Return all of `json_steps` in UTF-8. Takes time: not on the event loop."""
    return "".join(json_steps(value, allow_nan=allow_nan)).encode()


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
    """Whether it holds no containers, and few members."""
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return len(members) <= STEP_ITEMS and not any(isinstance(each, Mapping | list | tuple) for each in members)
