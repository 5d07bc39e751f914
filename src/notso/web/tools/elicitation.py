"""Elicitation: requests of MCP servers for user input during a call, which the page shows as a form.

MCP servers are not trusted. Therefore, their requests are limited in size and shown as plain text, and regular
expressions in their schemas are not evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from notso.web.values.errors import Problem, ToolError
from notso.web.values.visible_text import sanitize_line
from notso.web.values.wording import words

QUESTION_SECONDS = 300.0
"""Time for the user to reply. The timeout of the tool call is suspended meanwhile."""

MAX_QUESTIONS = 4  # per call
MAX_INPUTS = 24  # per question; each checkbox counts
MAX_CHOICES = 64  # per single-choice field
MAX_MESSAGE_CHARACTERS = 1_000
MAX_LABEL_CHARACTERS = 200
MAX_CHOICE_CHARACTERS = 200
MAX_VALUE_CHARACTERS = 2_000
MAX_NUMBER_CHARACTERS = 40
LARGEST_BOUND = 1e15  # larger bounds of numbers and lengths in a schema are ignored

Kind = Literal["text", "email", "uri", "date", "date-time", "number", "integer", "boolean", "choice", "choices"]
Value: TypeAlias = str | int | float | bool | list[str]

_FORMATS: tuple[Kind, ...] = ("email", "uri", "date", "date-time")  # other formats are ignored
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    name: str
    kind: Kind
    title: str
    description: str = ""
    is_required: bool = False
    default: Any = None
    choices: tuple[tuple[str, str], ...] = ()  # (value, label) pairs
    lowest: float | None = None  # bounds of a number, of the length of text, or of the number of selected choices
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class Elicitation:
    server: str
    message: str
    fields: tuple[Field, ...]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a question. `cancel`: no reply before the timeout or the call's end."""

    action: Literal["accept", "decline", "cancel"]
    values: Mapping[str, Value] = field(default_factory=dict, repr=False)


CANCELLED, DECLINED = Reply("cancel"), Reply("decline")
Ask: TypeAlias = Callable[[Elicitation], Awaitable[Reply]]


def parse_question(server: str, message: str, schema: Mapping[str, Any]) -> Elicitation:
    """Create a question from a message and a JSON schema. Raises ToolError if no form can represent the schema."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        raise ToolError("requestedSchema must describe a flat object")
    if len(properties) > MAX_INPUTS or len(message) > MAX_MESSAGE_CHARACTERS:
        raise ToolError(f"at most {MAX_INPUTS} values and {MAX_MESSAGE_CHARACTERS:,} characters can be requested")
    fields = tuple(_field(name, each, name in required) for name, each in properties.items())
    if sum(len(each.choices) if each.kind == "choices" else 1 for each in fields) > MAX_INPUTS:
        raise ToolError(f"at most {MAX_INPUTS} values can be selected")
    return Elicitation(server, sanitize_line(message, MAX_MESSAGE_CHARACTERS), fields)


def parse_form(question: Elicitation, form: Mapping[str, str]) -> dict[str, Value]:
    """Return the non-empty values of a submitted form, by the server's field names. Raises Problem (400).

    `value-N` is the value of field N, or the index of its selected choice; `value-N-M` is present if choice M is
    checked.
    """
    values: dict[str, Value] = {}
    for at, each in enumerate(question.fields):
        value = _value(each, f"value-{at}", form)
        if value is not None:
            values[each.name] = value
        elif each.is_required:
            raise _invalid_value(each, "question_needed")
    return values


def _field(name: str, schema: Any, is_required: bool) -> Field:
    if not isinstance(schema, dict) or not 0 < len(name) <= MAX_LABEL_CHARACTERS:
        raise ToolError("each property must be an object with a name")
    given = schema.get("type")
    choices = _choices(schema)
    kind: Kind
    if given == "array" and isinstance(schema.get("items"), dict):
        kind, choices = "choices", _choices(schema["items"])
        bounds = ("minItems", "maxItems")
        if not choices:
            raise ToolError("a list requires choices")
    elif given == "string" and choices:
        kind, bounds = "choice", ("", "")
    elif given == "string":
        format = schema.get("format")
        kind = format if format in _FORMATS else "text"
        bounds = ("minLength", "maxLength")
    elif given == "number" or given == "integer" or given == "boolean":
        kind, bounds = given, ("minimum", "maximum")
    else:
        raise ToolError("a property must be a string, a number, an integer, a boolean, or a list of choices")
    return Field(
        name=name,
        kind=kind,
        title=sanitize_line(_text(schema.get("title")) or name, MAX_LABEL_CHARACTERS),
        description=sanitize_line(_text(schema.get("description")), MAX_LABEL_CHARACTERS),
        is_required=is_required,
        default=_default(kind, schema.get("default"), choices),
        choices=choices,
        lowest=_bound(schema.get(bounds[0])),
        highest=_bound(schema.get(bounds[1])),
    )


def _choices(schema: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    titled = schema.get("oneOf", schema.get("anyOf"))
    if isinstance(titled, list) and all(isinstance(each, dict) for each in titled):
        values, names = [each.get("const") for each in titled], [each.get("title") for each in titled]
    else:
        values, names = schema.get("enum", []), schema.get("enumNames", [])
    if not isinstance(values, list) or not isinstance(names, list) or len(values) > MAX_CHOICES:
        raise ToolError(f"choices must be a list of at most {MAX_CHOICES} texts")
    if any(not isinstance(each, str) or len(each) > MAX_CHOICE_CHARACTERS for each in values):
        raise ToolError(f"choices must be texts of at most {MAX_CHOICE_CHARACTERS} characters")
    names = [*names, *[None] * len(values)][: len(values)]
    shown = [
        sanitize_line(_text(name) or value, MAX_CHOICE_CHARACTERS) for value, name in zip(values, names, strict=True)
    ]
    return tuple(zip(values, shown, strict=True))


def _default(kind: Kind, given: Any, choices: tuple[tuple[str, str], ...]) -> Any:
    known = {value for value, _ in choices}
    if kind == "choices":
        return tuple(each for each in given if each in known) if _is_string_list(given) else ()
    if kind == "choice":
        return given if isinstance(given, str) and given in known else None
    if kind == "boolean":
        return given is True
    if kind in ("number", "integer"):
        return _bound(given)
    return given if isinstance(given, str) and len(given) <= MAX_VALUE_CHARACTERS and given.isprintable() else None


def _value(asked: Field, name: str, form: Mapping[str, str]) -> Value | None:
    # Raises Problem.
    if asked.kind == "boolean":
        return name in form
    if asked.kind == "choices":
        taken = [value for number, (value, _) in enumerate(asked.choices) if f"{name}-{number}" in form]
        if not _is_within(len(taken), asked) and (taken or asked.is_required):
            raise _invalid_value(asked, "question_choices")
        return taken if taken or asked.is_required else None
    text = form.get(name, "").strip()
    if not text:
        return None
    if asked.kind == "choice":
        number = int(text) if text.isdecimal() and len(text) < MAX_NUMBER_CHARACTERS else len(asked.choices)
        if number >= len(asked.choices):
            raise _invalid_value(asked, "question_choice")
        return asked.choices[number][0]
    if asked.kind in ("number", "integer"):
        return _number(asked, text)
    if len(text) > MAX_VALUE_CHARACTERS or not _is_within(len(text), asked):
        raise _invalid_value(asked, "question_length")
    if not _matches_format(asked.kind, text):
        raise _invalid_value(asked, f"question_{asked.kind}")
    return text


def _number(asked: Field, text: str) -> int | float:
    key = f"question_{asked.kind}"
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise _invalid_value(asked, key)
    if _INTEGER.fullmatch(text):
        value: int | float = int(text)
    else:
        try:
            value = float(text)
        except ValueError:
            raise _invalid_value(asked, key) from None
        if asked.kind == "integer" or not math.isfinite(value):
            raise _invalid_value(asked, key)
    if not _is_within(value, asked):
        raise _invalid_value(asked, "question_range")
    return value


def _matches_format(kind: Kind, text: str) -> bool:
    try:
        if kind == "email":
            name, at, host = text.rpartition("@")
            return bool(name and at and host) and not any(each.isspace() for each in text)
        if kind == "uri":
            return bool(urlsplit(text).scheme) and not any(each.isspace() for each in text)
        if kind == "date":
            return date.fromisoformat(text).isoformat() == text
        if kind == "date-time":
            return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
    return True


def _is_within(value: float, asked: Field) -> bool:
    return (asked.lowest is None or value >= asked.lowest) and (asked.highest is None or value <= asked.highest)


def _bound(given: Any) -> float | None:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return given if is_number and -LARGEST_BOUND < given < LARGEST_BOUND else None


def _text(given: Any) -> str:
    return given if isinstance(given, str) else ""


def _is_string_list(given: Any) -> bool:
    return isinstance(given, list) and len(given) <= MAX_CHOICES and all(isinstance(each, str) for each in given)


def _invalid_value(asked: Field, key: str) -> Problem:
    return Problem(
        400,
        words[key].format(title=asked.title, lowest=_format_bound(asked.lowest), highest=_format_bound(asked.highest)),
    )


def _format_bound(bound: float | None) -> str:
    return words["question_any"] if bound is None else f"{bound:,}"
