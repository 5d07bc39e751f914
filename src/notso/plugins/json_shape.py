"""What a JSON text is made of, counted on its bytes before anything is made of it.

As values empty objects take thirty times their bytes, and a fault of each takes a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_BYTES = 64 * 1024
"""So much is looked at in one go: what is over a limit early on costs no more, and other threads run in between."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """The most levels, objects, and values (all that stand in objects and lists)."""

    depth: int
    objects: int
    values: int


class JsonShapeError(Exception):
    """There is more of something than its limit; says of what."""


def check_shape(body: bytes, limits: JsonLimits) -> None:
    """Raises JsonShapeError as soon as a count is over its limit. Linear; says nothing of whether it is JSON."""
    at = depth = objects = values = strings = 0
    is_text = False
    while at < len(body):
        window = body[at : at + WINDOW_BYTES]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:
            window = body[at : at + WINDOW_BYTES + 1]  # an escape stays whole
        at += len(window)
        # Without escapes every quotation mark begins a string or ends one.
        parts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        scaffold = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        strings += len(parts) // 2
        objects += scaffold.count(b"{")
        values += scaffold.count(b",") + scaffold.count(b"{") + scaffold.count(b"[")
        if objects > limits.objects:
            raise JsonShapeError(f"more than {limits.objects:,} objects")
        if max(values, strings // 2) > limits.values:  # a string is a value or the key of one
            raise JsonShapeError(f"more than {limits.values:,} values")
        for bracket in scaffold.translate(None, _NO_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            if depth > limits.depth:
                raise JsonShapeError(f"nested deeper than {limits.depth} levels")
            if depth < 0:
                return  # what closes was never opened: the parser gets no further
