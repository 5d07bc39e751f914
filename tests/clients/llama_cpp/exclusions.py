"""Read exclusions.json: the cases of llama.cpp's tests that do not apply here or that fail, each with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

NOT_APPLICABLE = "does not apply: "
"""Prefix of the skip reason of an excluded case."""


def reasons_of(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Return case -> reason for those of `names` that are listed under `kind`: "not_applicable" or "fails"."""
    listed: dict[str, list[str]] = json.loads(Path(__file__).with_name("exclusions.json").read_text())[kind]
    return {
        name: reason
        for name in names
        for reason, patterns in listed.items()
        if any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)
    }
