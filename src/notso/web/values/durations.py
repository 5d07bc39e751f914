"""Parse durations such as `30s`, `5m`, `1h30m` and `-1`, and return the current time."""

from __future__ import annotations

import re
import time

MAX_SECONDS = 10.0 * 365 * 24 * 3600
"""Longer durations count as unlimited, because system timers do not accept them."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern})+)", re.ASCII)
_BARE = re.compile(r"-?\d{1,12}(?:\.\d{1,9})?", re.ASCII)


def parse_duration(text: str) -> float | None:
    """Return a duration in seconds, -1 if it is above MAX_SECONDS, or None if it is invalid."""
    text = text.strip()
    if _BARE.fullmatch(text):
        seconds = float(text)
    else:
        match = _WHOLE.fullmatch(text)
        if match is None:
            return None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(match[2]))
        seconds = -seconds if match[1] else seconds
    return -1.0 if seconds > MAX_SECONDS else seconds


def current_ms() -> int:
    """Return the Unix time in milliseconds."""
    return time.time_ns() // 1_000_000
