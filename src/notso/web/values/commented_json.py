"""JSON as people write it in configuration files: with comments, trailing commas, and errors that name the line."""

from __future__ import annotations

import json
import re
from typing import Any

_COMMENTS = re.compile(
    r"""
    "(?:[^"\\]|\\.)*+(?:"|\\?\Z)        # a string, or the rest of the text after a quote that is never closed
    | //[^\n]*+
    | /\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|,(?=\s*+[}\]])', re.DOTALL)
_NOT_LINE_END = re.compile(r"[^\n]")


class _Object(dict[str, Any]):
    """An object, with the keys that it names more than once."""

    repeated: tuple[str, ...] = ()


def read_commented_json(text: str) -> Any:
    """Parse JSON with `//` and `/* */` comments and trailing commas.

    Takes time proportional to the length. Raises json.JSONDecodeError, whose line and column are those of `text`, and
    RecursionError for values nested too deep.
    """
    plain = _COMMENTS.sub(lambda found: found[0] if found[0][0] == '"' else _NOT_LINE_END.sub(" ", found[0]), text)
    plain = _COMMAS.sub(lambda found: found[0] if found[0][0] == '"' else " ", plain)
    return json.loads(plain, object_pairs_hook=_object)


def repeated_keys(value: object) -> tuple[str, ...]:
    """Return the keys that an object of `read_commented_json` names more than once; the last one counts."""
    return value.repeated if isinstance(value, _Object) else ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    members = _Object(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        members.repeated = tuple(dict.fromkeys(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return members
