"""Field types and checks shared by all request bodies, and the reader that turns a body into its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from notso.smollm3 import Grammar, ToolChoice, ToolName
from notso.web.edge.api_error import ApiError
from notso.web.values.strict_fields import StrictFields

MAX_PARTS = 256
MAX_SCHEMA_DEPTH = 32

Text = Annotated[str, Field(max_length=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Fields(StrictFields):
    """Fields of a request body, at any depth. A name that is no field is left out, and named to the caller by
    `hints_of`; but one in the context of the validation (a table of notes on documented fields that are not offered) is
    refused, unless it asks for nothing: null, false, an empty text or list."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict) or given.keys() <= (known := _spellings(cls)):
            return given
        noted = info.context or {}
        return {
            name: value
            for name, value in given.items()
            if name in known or (name in noted and not noted[name].is_taken and not _is_nothing(value))
        }


def spelling(name: str, field: FieldInfo) -> str:
    """What a body calls a field."""
    return field.alias or name


@lru_cache(maxsize=256)
def _spellings(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(spelling(name, field) for name, field in kind.model_fields.items())


def _is_nothing(value: object) -> bool:
    """No object: an empty one asks for what is done by default."""
    return value is None or value is False or value == "" or value == []


class TextPart(Fields):
    """A piece of a message's content. Pictures and sound have no type here: the model reads text."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Note:
    """What is to be said of a field: in the compatibility page, and to who sends what cannot be honoured.

    works: it does what the API's own documents say. inert: it is taken where it asks for nothing. hint: it is taken,
    ignored, and named in the answer's header. refused: it has no meaning here. later: it is not there yet. `instead`:
    what to do about a value that is refused, if not `text`. `ignored`: why it is a hint; then `text` names the values,
    if any, that are none.
    """

    state: Literal["works", "inert", "hint", "refused", "later"]
    text: str
    instead: str = ""
    ignored: str = ""

    @property
    def advice(self) -> str:
        """For who is refused."""
        return self.instead or ("" if self.is_taken else self.text)

    @property
    def described(self) -> str:
        """What is done with it, in a sentence."""
        return "; ".join(filter(None, (self.text, self.ignored and f"ignored: {self.ignored}")))

    @property
    def is_taken(self) -> bool:
        """Whether any value of it is."""
        return self.state in ("works", "inert", "hint")


Notes = dict[str, Note]


def works(text: str, instead: str = "") -> Note:
    """The field is honoured."""
    return Note("works", text, instead)


def inert(text: str, instead: str = "") -> Note:
    """The field is taken where it asks for nothing."""
    return Note("inert", text, instead)


def hint(text: str, done: str = "", instead: str = "") -> Note:
    """The field is taken and ignored, which `text` gives the reason for; but for values that `done` tells of."""
    return Note("hint", done, instead, text)


def refused(text: str) -> Note:
    """The field is not taken."""
    return Note("refused", text)


def later(text: str) -> Note:
    """The field is not taken yet."""
    return Note("later", text)


def joined(content: Content | None) -> str:
    """The text of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def depth(value: object) -> int:
    """How deeply objects and lists lie within each other."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


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


MAX_HINTS = 1024
"""Of one request; what is ignored beside them is not counted."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Marks a field (`Annotated[..., Hint()]`, outermost) whose value is ignored, but for `done`: values that ask for
    no more than is done. `tells`: it tells of the caller, and is taken where hints are refused too."""

    done: tuple[Any, ...] = ()
    tells: bool = False


TELLS = Hint(tells=True)


@dataclass(frozen=True, slots=True)
class GivenHint:
    """A hint of a request: `name` is without the places in lists, `path` where it stands first."""

    name: str
    path: str
    tells: bool


def hints_of(fields: BaseModel, body: Mapping[str, Any]) -> tuple[GivenHint, ...]:
    """The hints in `fields`, which were read of `body`, in their order, each name once. Takes time in proportion to the
    names in the body that are fields."""
    found: dict[str, GivenHint] = {}
    for path, tells in _hints(fields, body):
        name = ".".join(part for part in path if isinstance(part, str))
        if name not in found:
            found[name] = GivenHint(name, ".".join(map(str, path)), tells)
        if len(found) == MAX_HINTS:
            break
    return tuple(found.values())


def refuse_hints(hints: Iterable[GivenHint]) -> None:
    """Raises ApiError (400) that names the first that does not just tell of the caller."""
    for hint in hints:
        if not hint.tells:
            shown = printable(hint.path)
            raise unsupported(
                shown, f"{shown} would be ignored, and this server refuses what it would ignore: leave it out"
            )


def _hints(value: object, given: object) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    if isinstance(value, list) and value and isinstance(value[0], BaseModel) and isinstance(given, list):
        for index, (each, said) in enumerate(zip(value, given, strict=False)):
            for path, tells in _hints(each, said):
                yield (index, *path), tells
    if not isinstance(value, BaseModel) or not isinstance(given, Mapping):
        return
    marks = _marks(type(value))
    for name, said in given.items():
        if said is None:
            continue
        if name not in marks:
            yield (name,), False  # an unknown name
            continue
        attribute, hint = marks[name]
        read = getattr(value, attribute)
        if hint is None:
            for path, tells in _hints(read, said):
                yield (name, *path), tells
        elif read not in hint.done:
            yield (name,), hint.tells


@lru_cache(maxsize=256)
def _marks(kind: type[BaseModel]) -> dict[str, tuple[str, Hint | None]]:
    """Of every field, by its spelling: its attribute, and how it is marked."""
    return {
        spelling(name, field): (name, next((each for each in field.metadata if isinstance(each, Hint)), None))
        for name, field in kind.model_fields.items()
    }


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
