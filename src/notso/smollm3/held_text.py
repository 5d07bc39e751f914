"""How much of a growing text must be held back because it may be the beginning of something."""

from __future__ import annotations

from collections.abc import Iterable


def pending_length(text: str, patterns: Iterable[str]) -> int:
    """Length of the longest end of `text` with which one of `patterns` begins, but which is not all of it."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(text), len(pattern) - 1), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest
