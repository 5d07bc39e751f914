"""What several APIs ask of a request beyond its fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from notso.smollm3 import Grammar, ToolChoice, ToolName
from notso.web.api.request_fields.field_reader import check_depth, invalid

EFFORT_BUDGETS = {"minimal": 64, "low": 256, "medium": 1024, "high": 4096, "xhigh": 16_384}
"""Tokens of thinking that each `reasoning_effort` grants; `max` grants what there is."""

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = (
    "`minimal`, `low`, `medium`, `high`, `xhigh` think for at most 64, 256, 1,024, 4,096, 16,384 tokens, `max` as long "
    "as there is room"
)
EFFORT_ADVICE = "use none, minimal, low, medium, high, xhigh or max"


def schema_grammar(param: str, schema: Mapping[str, Any]) -> Grammar:
    """JSON of this schema. Raises ApiError (400) for one that is nested too deeply."""
    check_depth(param, schema)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def strict_names(tools: Iterable[tuple[str, bool | None]]) -> tuple[str, ...]:
    """The names of the tools that are strict."""
    return tuple(name for name, strict in tools if strict)


def checked_choice(param: str, name: str | None, names: list[str]) -> ToolChoice:
    """A call of `name`, or of any tool. Raises ApiError (400) where there is no such tool."""
    if not names:
        raise invalid(param, f"{param} asks for a call, but there are no tools")
    if name is None:
        return "required"
    if name not in names:
        raise invalid(param, f"{param} names a function that is not among the tools")
    return ToolName(name)
