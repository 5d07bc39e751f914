"""Texts and patterns within JSON schemas, as far as an answer can write them."""

from __future__ import annotations

import re

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_UNWRITABLE_ESCAPE = re.compile(
    r"\\(?:x(?:0[0-7bef]|1[0-9a-f]|7f)|u00(?:0[0-7bef]|1[0-9a-f]|7f)|c[a-z]|[0av])", re.IGNORECASE
)
_PIECE = re.compile(
    r"\\u\{[^}]*+\}?|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\c[a-zA-Z]|\\[\s\S]|\[(?:\\[\s\S]|[^\]\\])*+\]?|[\s\S]"
)

ANY_BUT_LINE_ENDS = "[^\\n\\r\\u2028\\u2029]"


def has_unwritable(text: str) -> bool:
    """Whether it has control characters that JSON writes by number only: an answer has no such escapes, and the library
    would leave them out."""
    return _UNWRITABLE.search(text) is not None


def written_pattern(pattern: str) -> str | None:
    """The regular expression with `.` as ECMAScript reads it; None if it asks for what an answer cannot write."""
    pieces = []
    for piece in _PIECE.findall(pattern):
        is_class = piece.startswith("[")
        inner = piece[1:-1] if is_class else piece
        is_alone = not is_class or _UNWRITABLE_ESCAPE.fullmatch(inner) or len(inner) == 1
        if is_alone and (has_unwritable(inner) or _UNWRITABLE_ESCAPE.search(inner)):
            return None
        pieces.append(ANY_BUT_LINE_ENDS if piece == "." else piece)
    return "".join(pieces)
