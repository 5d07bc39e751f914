"""How far two sequences are the same."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many tokens (or other things) two sequences begin with in common."""
    count = 0
    for ours, theirs in zip(a, b, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
