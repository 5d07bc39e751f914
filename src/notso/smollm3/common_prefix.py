"""Compute the length of the common prefix of two sequences."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the number of leading items that are equal."""
    count = 0
    for ours, theirs in zip(a, b, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
