"""Texts in JSON schemas, as far as they can be generated."""

from __future__ import annotations

import re

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def has_unwritable(text: str) -> bool:
    """Return whether the text has control characters that JSON writes only as numbers; the grammar has no such escapes,
    and the
    library would omit them."""
    return _UNWRITABLE.search(text) is not None
