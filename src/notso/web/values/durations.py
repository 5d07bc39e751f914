"""Durations as people and Go spell them: `30s`, `5m`, `1h30m`, `-1`."""

from __future__ import annotations

import re

MAX_SECONDS = 10.0 * 365 * 24 * 3600
"""What is longer is for ever, and clocks of the system take no more."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern})+)", re.ASCII)
_BARE = re.compile(r"-?\d{1,12}(?:\.\d{1,9})?", re.ASCII)


def duration_s(text: str) -> float | None:
    """Seconds, negative where the text is, and -1 for more than ten years; None where it is no duration."""
    text = text.strip()
    if _BARE.fullmatch(text):
        seconds = float(text)
    else:
        whole = _WHOLE.fullmatch(text)
        if whole is None:
            return None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(whole[2]))
        seconds = -seconds if whole[1] else seconds
    return -1.0 if seconds > MAX_SECONDS else seconds
