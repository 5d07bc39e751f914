"""Which cases of llama.cpp's tests do not apply here, and which we fail, each with the reason: exclusions.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

NOT_APPLICABLE = "does not apply: "
"""What the skips of excluded cases begin with."""


def reasons_of(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Case -> reason, of those among `names` that are `not_applicable` or of which is said that one `fails`."""
    listed: dict[str, list[str]] = json.loads(Path(__file__).with_name("exclusions.json").read_text())[kind]
    return {
        name: reason
        for name in names
        for reason, patterns in listed.items()
        if any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)
    }
