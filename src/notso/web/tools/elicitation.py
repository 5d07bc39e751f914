"""Handle elicitation: requests from MCP servers for user input during a call. The page shows each request as a form.

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
from notso.web.values.wording import localize_number, words

QUESTION_SECONDS = 300.0
"""Time within which the user must reply. During this time, the timeout of the tool call is suspended."""

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
    """Reply to a question, or `cancel` if there was none before the timeout or the call's end."""

    action: Literal["accept", "decline", "cancel"]
    values: Mapping[str, Value] = field(default_factory=dict, repr=False)


CANCELLED, DECLINED = Reply("cancel"), Reply("decline")
Ask: TypeAlias = Callable[[Elicitation], Awaitable[Reply]]


def parse_question(server: str, message: str, schema: Mapping[str, Any]) -> Elicitation:
    """Create a question from a message and a JSON schema. Raises ToolError if they are unsupported or too large."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        raise ToolError("requestedSchema must describe a flat object")
    if len(properties) > MAX_INPUTS or len(message) > MAX_MESSAGE_CHARACTERS:
        raise ToolError(
            f"a request may have at most {MAX_INPUTS} values and a message of {MAX_MESSAGE_CHARACTERS:,} characters"
        )
    fields = tuple(_field(name, each, name in required) for name, each in properties.items())
    if sum(len(each.choices) if each.kind == "choices" else 1 for each in fields) > MAX_INPUTS:
        raise ToolError(f"at most {MAX_INPUTS} inputs are allowed; each choice of a list counts as one")
    return Elicitation(server, sanitize_line(message, MAX_MESSAGE_CHARACTERS), fields)


def parse_form(question: Elicitation, form: Mapping[str, str]) -> dict[str, Value]:
    """Return the values of a submitted form by field name, without empty optional ones. Raises Problem (400).

    `value-N` is the value of field N or the index of its choice; a boolean is true if it is present. `value-N-M` is
    present if choice M is checked.
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
    type_name = schema.get("type")
    choices = _choices(schema)
    kind: Kind
    if type_name == "array" and isinstance(schema.get("items"), dict):
        kind, choices = "choices", _choices(schema["items"])
        bounds = ("minItems", "maxItems")
        if not choices:
            raise ToolError("a list requires choices")
    elif type_name == "string" and choices:
        kind, bounds = "choice", ("", "")
    elif type_name == "string":
        format = schema.get("format")
        kind = format if format in _FORMATS else "text"
        bounds = ("minLength", "maxLength")
    elif type_name == "number" or type_name == "integer" or type_name == "boolean":
        kind, bounds = type_name, ("minimum", "maximum")
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
    options = schema.get("oneOf", schema.get("anyOf"))
    if isinstance(options, list) and all(isinstance(each, dict) for each in options):
        values, names = [each.get("const") for each in options], [each.get("title") for each in options]
    else:
        values, names = schema.get("enum", []), schema.get("enumNames", [])
    if not isinstance(values, list) or not isinstance(names, list) or len(values) > MAX_CHOICES:
        raise ToolError(f"choices must be a list of at most {MAX_CHOICES} texts")
    if any(not isinstance(each, str) or len(each) > MAX_CHOICE_CHARACTERS for each in values):
        raise ToolError(f"choices must be texts of at most {MAX_CHOICE_CHARACTERS} characters")
    names = [*names, *[None] * len(values)][: len(values)]
    labels = [
        sanitize_line(_text(name) or value, MAX_CHOICE_CHARACTERS) for value, name in zip(values, names, strict=True)
    ]
    return tuple(zip(values, labels, strict=True))


def _default(kind: Kind, value: Any, choices: tuple[tuple[str, str], ...]) -> Any:
    known = {choice for choice, _ in choices}
    if kind == "choices":
        return tuple(each for each in value if each in known) if _is_string_list(value) else ()
    if kind == "choice":
        return value if isinstance(value, str) and value in known else None
    if kind == "boolean":
        return value is True
    if kind in ("number", "integer"):
        return _bound(value)
    return value if isinstance(value, str) and len(value) <= MAX_VALUE_CHARACTERS and value.isprintable() else None


def _value(form_field: Field, name: str, form: Mapping[str, str]) -> Value | None:
    if form_field.kind == "boolean":
        return name in form
    if form_field.kind == "choices":
        selected = [value for number, (value, _) in enumerate(form_field.choices) if f"{name}-{number}" in form]
        if not _is_within(len(selected), form_field) and (selected or form_field.is_required):
            raise _invalid_value(form_field, "question_choices")
        return selected if selected or form_field.is_required else None
    text = form.get(name, "").strip()
    if not text:
        return None
    if form_field.kind == "choice":
        number = int(text) if text.isdecimal() and len(text) < MAX_NUMBER_CHARACTERS else len(form_field.choices)
        if number >= len(form_field.choices):
            raise _invalid_value(form_field, "question_choice")
        return form_field.choices[number][0]
    if form_field.kind in ("number", "integer"):
        return _number(form_field, text)
    if len(text) > MAX_VALUE_CHARACTERS or not _is_within(len(text), form_field):
        raise _invalid_value(form_field, "question_length")
    if not _matches_format(form_field.kind, text):
        raise _invalid_value(form_field, f"question_{form_field.kind}")
    return text


def _number(form_field: Field, text: str) -> int | float:
    key = f"question_{form_field.kind}"
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise _invalid_value(form_field, key)
    if _INTEGER.fullmatch(text):
        value: int | float = int(text)
    else:
        try:
            value = float(text)
        except ValueError:
            raise _invalid_value(form_field, key) from None
        if form_field.kind == "integer" or not math.isfinite(value):
            raise _invalid_value(form_field, key)
    if not _is_within(value, form_field):
        raise _invalid_value(form_field, "question_range")
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


def _is_within(value: float, form_field: Field) -> bool:
    lowest, highest = form_field.lowest, form_field.highest
    return (lowest is None or value >= lowest) and (highest is None or value <= highest)


def _bound(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -LARGEST_BOUND < value < LARGEST_BOUND else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_CHOICES and all(isinstance(each, str) for each in value)


def _invalid_value(form_field: Field, key: str) -> Problem:
    lowest, highest = _format_bound(form_field.lowest), _format_bound(form_field.highest)
    return Problem(400, words[key].format(title=form_field.title, lowest=lowest, highest=highest))


def _format_bound(bound: float | None) -> str:
    return words["question_any"] if bound is None else localize_number(f"{bound:,}")
