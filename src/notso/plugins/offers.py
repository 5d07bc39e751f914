"""Validate a plugin's results and its offer, the description of what the plugin provides."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
"""Names of plugins, and of their tools, commands and logits processors."""
NAME_RULE = "must be a lowercase letter followed by up to 31 lowercase letters, digits, _ or -"
MAX_ENTRIES = 32  # maximum number of entries of each kind (tools, commands, pages, ...) per plugin
MAX_SCHEMA_CHARACTERS = 65_536
MAX_TEXT_CHARACTERS = 10_000
MAX_ANSWER_CHARACTERS = 1 << 20
_PAGE = re.compile(r"(?:[\w~-][\w.~-]*(?:/[\w~-][\w.~-]*)*)?", re.ASCII)

Offer = dict[str, Any]
"""Lists of entries by kind (`tools`, `logits_processors`, `slash_commands`, `pages`), and `signs_in`, a boolean."""


def validate_offer(value: Any) -> tuple[Offer, list[str]]:
    """Return an offer with only its valid entries, and a message about each entry left out. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("not an offer")
    offer: Offer = {"signs_in": value.get("signs_in") is True}
    left_out = []
    for kind, checks in _KINDS.items():
        rows = value.get(kind, [])
        if not isinstance(rows, list):
            raise ValueError("not an offer")
        offer[kind] = []
        singular = kind.removesuffix("s").replace("_", " ")
        for number, row in enumerate(rows, start=1):
            problem = (
                _find_problem(row, checks)
                if len(offer[kind]) < MAX_ENTRIES
                else f"more than {MAX_ENTRIES} of this kind"
            )
            if problem:
                # Skip only this entry, so that the plugin's other features can be used.
                left_out.append(f"{singular} {number} was left out: {problem}")
            else:
                offer[kind].append(row)
    return offer, left_out


def is_valid_result(kind: str, result: Any) -> bool:
    return _ANSWERS[kind](result)


def _find_problem(row: Any, checks: Mapping[str, Callable[[Any], str]]) -> str:
    if not isinstance(row, dict):
        return "it is not an object"
    return next((f"{name} {problem}" for name, check in checks.items() if (problem := check(row.get(name)))), "")


def _check_name(value: Any) -> str:
    return "" if isinstance(value, str) and NAME.fullmatch(value) else NAME_RULE


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        return "must be text"
    return "" if len(value) <= MAX_TEXT_CHARACTERS else f"has more than {MAX_TEXT_CHARACTERS:,} characters"


def _check_schema(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "must be an object (a JSON schema)"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        return "must be the schema of an object"
    if not isinstance(properties, dict) or not all(isinstance(each, dict | bool) for each in properties.values()):
        return "must have a schema for each of its properties"
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        return "must have a list of names in `required`"
    too_long = len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS
    return f"has more than {MAX_SCHEMA_CHARACTERS:,} characters" if too_long else ""


def _check_seconds(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # `math.isfinite` would raise OverflowError for an integer that is too large for a float.
    return "" if is_number and 0 < value <= sys.float_info.max else "must be a number above 0"


def _check_path(value: Any) -> str:
    fits = isinstance(value, str) and len(value) <= 200 and _PAGE.fullmatch(value)
    return "" if fits else "must be words of ASCII letters, digits and -._~, separated by /"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_ANSWER_CHARACTERS


def _is_page(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"body", "media_type", "status"}:
        return False
    return _is_text(value["body"]) and isinstance(value["media_type"], str) and type(value["status"]) is int


_KINDS: dict[str, dict[str, Callable[[Any], str]]] = {
    "tools": {"name": _check_name, "description": _check_text, "parameters": _check_schema, "seconds": _check_seconds},
    "logits_processors": {"name": _check_name, "does": _check_text},
    "slash_commands": {"name": _check_name, "usage": _check_text, "does": _check_text},
    "pages": {"path": _check_path, "title": _check_text},
}
_ANSWERS: dict[str, Callable[[Any], bool]] = {
    "tool": _is_text,
    "command": _is_text,
    "page": _is_page,
    "logits": lambda value: type(value) is int,
    "sign_in": lambda value: value is None or _is_text(value),
}
