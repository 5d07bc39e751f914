"""A body becomes the fields of its kind, or one refusal that names the field at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from notso.web.api.request_fields.fields import MAX_SCHEMA_DEPTH, Notes, depth
from notso.web.edge.api_error import ApiError

F = TypeVar("F", bound=BaseModel)

_TELLING = {"extra_forbidden": 2, "too_short": 1}  # of faults at one place these say most
_SHOWN_CHARACTERS = 80  # of a field's name that nobody here chose


def read_fields(kind: type[F], body: Mapping[str, Any], notes: Notes) -> F:
    """The body as fields of that kind. Raises ApiError (400), whose `param` names the field; `notes` say what to do."""
    try:
        return kind.model_validate(body, context=notes)
    except ValidationError as error:
        raise _refusal(error, body, notes) from None


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The value of a field is out of its range."""
    return ApiError(400, code, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """The field, or this value of it, cannot be honoured."""
    return ApiError(400, "unsupported_parameter", message, param=param)


def check_depth(param: str, schema: object) -> None:
    """Raises ApiError (400) for a schema that is nested too deeply."""
    if depth(schema) > MAX_SCHEMA_DEPTH:
        raise invalid(param, f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def _refusal(error: ValidationError, body: Mapping[str, Any], notes: Notes) -> ApiError:
    """One of the faults, in our words: pydantic's may repeat what was sent."""
    faults = error.errors(include_url=False, include_context=True, include_input=False)
    # Where a value may be one of several kinds there is a fault for each: the deepest is of the kind that was meant.
    fault = max(faults, key=lambda each: (len(_path(each["loc"], body)), _TELLING.get(each["type"], 0)))
    path = _path(fault["loc"], body)
    param = ".".join(map(str, path))
    shown = printable(param or "the body")
    match fault["type"]:
        case "extra_forbidden":
            advice = notes[str(path[-1])].advice if path[-1] in notes else ""
            return unsupported(shown, f"{shown} is not supported" + (f": {advice}" if advice else ""))
        case "missing":
            missing = f"{shown}.{fault['loc'][-1]}" if param else str(fault["loc"][-1])
            return invalid(missing, f"{missing} is required")
        case "union_tag_invalid" | "union_tag_not_found":
            return _wrong_kind(shown, fault.get("ctx", {}), notes)
        case "literal_error" if (given := _at(body, path)) in notes and notes[given].advice:
            return unsupported(shown, f"{shown}: {given} is not supported: {notes[given].advice}")
        case "literal_error" | "none_required" | "too_long":
            advised = [end for end, part in enumerate(path, 1) if part in notes and notes[str(part)].advice]
            if advised:
                advice = notes[str(path[advised[-1] - 1])].advice
                shown = printable(".".join(map(str, path[: advised[-1]])))
                return unsupported(shown, f"this value of {shown} is not supported: {advice}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return invalid(shown, f"{shown} must be an object")
    if fault["type"] == "too_short" and shown in ("messages", "input", "prompt"):
        return invalid(shown, f"{shown} is empty: there is nothing to answer", "empty_prompt")
    said = re.sub(r"^(Input|List|String|Dictionary|Value) should", "it should", fault["msg"])
    return invalid(shown, f"{shown}: {said}")


def _wrong_kind(shown: str, context: Mapping[str, Any], notes: Notes) -> ApiError:
    """A value that may be one of several kinds names none of them, or one that we know to refuse."""
    tag, field = context.get("tag"), str(context.get("discriminator", "")).strip("'")
    if tag in notes:
        return unsupported(f"{shown}.{field}", f"{shown}.{field} {tag} is not supported: {notes[str(tag)].advice}")
    known = re.findall(r"'([^']*)'", str(context.get("expected_tags", "")))
    choices = f" must be {_listed(known)}" if known else " is required"
    return invalid(f"{shown}.{field}", f"{shown}.{field}{choices}")


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _path(location: Sequence[int | str], body: Any) -> list[int | str]:
    """Where in the body a fault lies; pydantic's own path also names the types it tried."""
    path: list[int | str] = []
    for part in location:
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, Mapping) and part in body):
            path.append(part)
            body = body[part]
    return path


def _at(body: Any, path: Sequence[str | int]) -> str:
    """The text at a place in the body, as `_path` found it; '' for anything else."""
    for part in path:
        body = body[part]
    return body if isinstance(body, str) else ""


def printable(text: str) -> str:
    """A name that nobody here chose, fit to be shown."""
    return "".join(c if c.isprintable() else "?" for c in text[:_SHOWN_CHARACTERS])
