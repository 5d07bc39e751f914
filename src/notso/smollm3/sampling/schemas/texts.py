"""Texts within JSON schemas, as far as an answer can write them."""

from __future__ import annotations

import re

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def has_unwritable(text: str) -> bool:
    """Whether it has control characters that JSON writes by number only: an answer has no such escapes, and the library
    would leave them out."""
    return _UNWRITABLE.search(text) is not None
