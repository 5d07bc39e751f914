"""Check limits on the nesting and the number of values before JSON is parsed.

Parsing untrusted JSON first would not be safe: once parsed, an empty object takes thirty times as much memory as in
JSON, and a validation error about such an object takes a thousand times as much.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

# Number of bytes that are examined at a time. The check ends early if a limit is exceeded, and lets other threads run.
WINDOW_BYTES = 64 * 1024

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class JsonLimits:
    depth: int
    objects: int
    values: int
    backslashes: int = sys.maxsize  # each escape sequence takes longer to parse than a hundred other characters


class JsonShapeError(Exception):
    """A limit is exceeded. `name`: a field of JsonLimits."""

    def __init__(self, message: str, name: str, limit: int) -> None:
        super().__init__(message)
        self.name = name
        self.limit = limit


def check_shape(body: bytes, limits: JsonLimits) -> None:
    """Raise JsonShapeError if a limit is exceeded. The JSON is not validated."""
    at = depth = objects = values = strings = backslashes = 0
    is_text = False
    while at < len(body):
        window = body[at : at + WINDOW_BYTES]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:
            window = body[at : at + WINDOW_BYTES + 1]  # the window ended between a backslash and the escaped character
        at += len(window)
        # Once `\\` and `\"` are removed, every quotation mark begins or ends a string, so the parts are alternately
        # outside and inside strings.
        parts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        scaffold = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        strings += len(parts) // 2
        backslashes += window.count(b"\\")
        objects += scaffold.count(b"{")
        values += scaffold.count(b",") + scaffold.count(b"{") + scaffold.count(b"[")
        if objects > limits.objects:
            raise JsonShapeError(f"more than {limits.objects:,} objects", "objects", limits.objects)
        if max(values, strings // 2) > limits.values:  # at most half of the strings are keys, and the others are values
            raise JsonShapeError(f"more than {limits.values:,} values", "values", limits.values)
        if backslashes > limits.backslashes:
            raise JsonShapeError(f"more than {limits.backslashes:,} backslashes", "backslashes", limits.backslashes)
        for bracket in scaffold.translate(None, _NO_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            if depth > limits.depth:
                raise JsonShapeError(f"nested deeper than {limits.depth} levels", "depth", limits.depth)
            if depth < 0:
                return  # an unmatched closing bracket, at which the parser will fail
