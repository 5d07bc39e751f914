"""Parse and strictly validate untrusted JSON bodies, and define the field types and checks of all APIs.

A hint is a field that is ignored, except for certain values. A note documents a field for clients.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.smollm3 import Grammar, Tool, ToolChoice, ToolName
from notso.text_file import NotTextError, decode_text
from notso.web.edge.errors import ApiError
from notso.web.values.strict_fields import StrictFields

MAX_DEPTH = 64
LIMITS = JsonLimits(MAX_DEPTH, objects=1 << 16, values=1 << 19, backslashes=1 << 22)
"""Enough for schemas with thousands of properties, for the 300,000 token ids that OpenAI allows in a request for
embeddings, and for 24 MiB of characters outside ASCII, each escaped as \\uXXXX."""

# Number of bytes or characters searched at a time. It is limited, because a search does not release the GIL.
_PIECE = 1 << 16

_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LARGEST_INTEGER = 2**64 - 1  # seeds may be unsigned 64-bit integers
_MAX_INTEGER_DIGITS = 20
_SUSPECT_ESCAPE = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")
_UNFIT = re.compile("[\x00\ud800-\udfff]")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object in linear time.

    Raises ApiError (400) for anything else, including NaN, infinities, integers beyond 64 bits, duplicate keys, text
    with NUL or lone surrogates, and bodies that exceed LIMITS.
    """
    value = _parse(body)
    if _is_suspect(body) and _repair(value) != value:
        raise invalid_text()
    return value


def parse_repaired(body: bytes) -> tuple[dict[str, Any], bool]:
    """Parse like `parse_object`, but replace NUL and lone surrogates in values; return whether there were any."""
    # Agents repeat binary output and truncated texts in every later request, so a refusal would end the session.
    value = _parse(body)
    repaired = _repair(value) if _is_suspect(body) else value
    return repaired, repaired != value


def _parse(body: bytes) -> dict[str, Any]:
    if body.startswith(_BYTE_ORDER_MARKS) or b"\0" in body[:4] or body.endswith(b"\0"):
        body = _to_utf8(body)
    try:
        check_shape(body, LIMITS)
        value = _DECODER.decode(body.decode("utf-8"))
    except JsonShapeError as error:
        raise _invalid_json(f"the body is {error}" if "nested" in str(error) else f"the body has {error}") from None
    except UnicodeDecodeError:
        raise _invalid_json("the body is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _invalid_json(f"the body is nested more than {MAX_DEPTH} levels deep") from None
    if not isinstance(value, dict):
        raise _invalid_json("the body must be a JSON object")
    return value


def _is_suspect(body: bytes) -> bool:
    starts = range(0, len(body), _PIECE)  # a suspect escape has six bytes, and may extend into the next piece
    return b"\x00" in body or any(_SUSPECT_ESCAPE.search(body, start, start + _PIECE + 5) for start in starts)


def _to_utf8(body: bytes) -> bytes:
    # Converts UTF-16 or UTF-32 to UTF-8, and removes a byte order mark and final NULs.
    try:
        return decode_text(body).encode()
    except NotTextError as error:
        raise _invalid_json(f"the body {error}") from None


def _repair(value: Any) -> Any:
    if isinstance(value, str):
        pieces = (value[start : start + _PIECE] for start in range(0, len(value), _PIECE))
        return "".join(_UNFIT.sub("\N{REPLACEMENT CHARACTER}", piece) for piece in pieces)
    if isinstance(value, dict):
        if any(map(_UNFIT.search, value)):
            raise invalid_text()
        return {key: _repair(item) for key, item in value.items()}
    return [_repair(item) for item in value] if isinstance(value, list) else value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _invalid_json("an object has a duplicate key")
    return members


def _integer(text: str) -> int:
    if len(text) > _MAX_INTEGER_DIGITS or not -(2**63) <= (value := int(text)) <= _LARGEST_INTEGER:
        raise _invalid_json("an integer is outside 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid_json("a number is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise _invalid_json(f"{name} is not valid JSON")


_invalid_json = partial(ApiError, 400, "invalid_json")
invalid_text = partial(ApiError, 400, "invalid_text", "a string in the body contains a NUL or a lone surrogate")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_reject_duplicates, parse_int=_integer, parse_float=_number, parse_constant=_constant
)

MAX_MESSAGES = 2048
MAX_PARTS = 256
MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 32

T = TypeVar("T")
Parts = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
SomeParts = Annotated[list[T], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
Tools = Annotated[list[T], Field(max_length=MAX_TOOLS, fail_fast=True)]
SomeTools = Annotated[list[T], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]
SomeMessages = Annotated[list[T], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Text = Annotated[str, Field(max_length=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=256)]  # like Name, but may be empty, because some clients send empty strings
Description = Annotated[str, Field(max_length=65_536)]
Id = Text  # id of a past call or item: some servers send empty ids, others ids of over 1,000 characters


class Fields(StrictFields):
    """Base class of request bodies and nested objects.

    Drops unknown fields, which `find_hints` reports. Rejects fields that are unsupported according to the notes (the
    validation context), unless their value is null, false, '' or [].
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or body.keys() <= (known_names := _wire_names(cls)):
            return body
        top, top_notes, nested_notes = info.context or (None, {}, {})
        notes: Notes = top_notes if cls is top else nested_notes
        return {
            name: value
            for name, value in body.items()
            if name in known_names or (name in notes and not notes[name].is_accepted and not _is_neutral(value))
        }


B = TypeVar("B", bound=BaseModel)


def with_fields(body: type[B], fields: Mapping[str, Any]) -> type[B]:
    """Return `body` with further optional fields; `fields` maps their names to types."""
    own = {"__base__": body, "__module__": body.__module__, "__doc__": body.__doc__}
    more = {name: (kind, None) for name, kind in fields.items()}
    return create_model(body.__name__, **own, **more)  # type: ignore[call-overload, no-any-return]


def accepting(names: str, kind: Any = Any) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds fields of one type; spaces separate `names`."""
    return lambda body: with_fields(body, dict.fromkeys(names.split(), kind))


def wire_name(name: str, field: FieldInfo) -> str:
    return field.alias or name


@lru_cache(maxsize=256)
def _wire_names(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(wire_name(name, field) for name, field in kind.model_fields.items())


def _is_neutral(value: object) -> bool:
    # An empty object is not neutral, because it may request a feature with default options.
    return value is None or value is False or value == "" or value == []


class AnyTextPart(Protocol):
    @property
    def text(self) -> str: ...


class TextPart(Fields):
    """A text part of a message. Images and audio are not supported."""

    type: Literal["text"]
    text: Text


class RefusalPart(Fields):
    """A refusal in an earlier answer, which stays in the prompt as text."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Arguments = Text | dict[str, Any] | Annotated[list[Any], Field(max_length=0)]
"""Arguments of a past call: JSON text, possibly cut off, or an object, which PHP and Lua write as [] if it is empty."""


def to_arguments_text(arguments: Arguments | None) -> str:
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments if isinstance(arguments, str) else ""


Content = Text | SomeParts[TextPart]


@dataclass(frozen=True, slots=True)
class Note:
    """Documentation of a field, for the compatibility page and error messages."""

    # In the outermost `Annotated` of a field, a note with state `hint` also makes the server ignore the field.

    # works: implemented. inert: accepted only with values that have no effect. hint: ignored, and named in the response
    # header for ignored fields. refused: not supported.
    state: Literal["works", "inert", "hint", "refused"]
    text: str
    instead: str = ""  # advice in errors; if empty, `text` is the advice for fields that are not accepted
    ignored: str = ""  # why a hint is ignored; `text` then describes the values in `done`
    done: tuple[Any, ...] = ()  # values of a hint that are not ignored, because the server behaves as they request
    describes_caller: bool = False  # whether a hint only describes the caller, so that --strict-fields accepts it
    is_checked: bool = False  # whether values of a hint that do not match the field's type are refused

    @property
    def advice(self) -> str:
        return self.instead or ("" if self.is_accepted else self.text)

    @property
    def described(self) -> str:
        return "; ".join(filter(None, (self.text, self.ignored and f"ignored: {self.ignored}")))

    @property
    def is_accepted(self) -> bool:
        return self.state != "refused"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        is_lenient = self.state == "hint" and not self.is_checked
        return _OF_ANY_TYPE.__get_pydantic_core_schema__(source, handler) if is_lenient else handler(source)


def _validate_or_ignore(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    # A field without effect is never a reason to refuse a request. The value None makes `find_hints` report the field.
    try:
        return validate(value)
    except ValidationError:
        return None


_OF_ANY_TYPE = WrapValidator(_validate_or_ignore)


Notes = dict[str, Note]
NO_NOTES: Notes = {}


works, inert, refused = partial(Note, "works"), partial(Note, "inert"), partial(Note, "refused")


def hint(reason: str, done_text: str = "", instead: str = "", **more: Any) -> Note:
    """Describe an ignored field; `done_text` describes the values in `done`."""
    return Note("hint", done_text, instead, reason, **more)


DESCRIBES_CALLER = hint("describes the caller", describes_caller=True)


def notes_in(body: type[BaseModel]) -> Notes:
    """Return the notes in the annotations of a body's fields."""
    return {
        wire_name(name, field): note
        for name, field in body.model_fields.items()
        for note in field.metadata
        if isinstance(note, Note)
    }


def join_text(content: str | Sequence[AnyTextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def nesting_depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(nesting_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(nesting_depth, value), default=0)
    return 0


F = TypeVar("F", bound=BaseModel)

# Of the errors with the longest path, the one with the highest priority is reported.
_PRIORITIES = {"extra_forbidden": 2, "too_short": 1, "greater_than_equal": 1, "less_than_equal": 1}
_SHOWN_CHARACTERS = 80  # maximum length of a client's field name in errors


def read_fields(kind: type[F], body: Mapping[str, Any], notes: Notes, nested: Notes = NO_NOTES) -> F:
    """Validate a body. Raises ApiError (400) naming the field, with advice from its notes."""
    notes = notes | nested
    try:
        return kind.model_validate(body, context=(kind, notes, nested))
    except ValidationError as error:
        raise _to_api_error(error, body, notes) from None


def invalid_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


unsupported_field = partial(invalid_field, code="unsupported_parameter")


def check_depth(param: str, schema: object) -> None:
    if nesting_depth(schema) > MAX_SCHEMA_DEPTH:
        raise invalid_field(param, f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _to_api_error(error: ValidationError, body: Mapping[str, Any], notes: Notes) -> ApiError:
    # Some of pydantic's messages are replaced, because they would repeat the client's input.
    faults = error.errors(include_url=False, include_context=True, include_input=False)

    # A union reports an error per alternative; the deepest error probably concerns the intended alternative. Of equally
    # deep errors, one with advice is preferred, because the advice names all alternatives.
    def rank(fault: Any) -> tuple[int, int]:
        path, kind = _path(fault["loc"], body), fault["type"]
        is_advised = kind == "literal_error" and path[-1:] and path[-1] in notes and notes[str(path[-1])].advice
        return len(path), 1 if is_advised else _PRIORITIES.get(kind, 0)

    fault = max(faults, key=rank)
    path = _parent_path(fault["loc"], body) if fault["type"] == "missing" else _path(fault["loc"], body)
    param = ".".join(map(str, path))
    shown = to_printable(param or "the body")
    match fault["type"]:
        case "extra_forbidden":
            advice = notes[str(path[-1])].advice if path[-1] in notes else ""
            return unsupported_field(shown, f"{shown} is not supported" + (f": {advice}" if advice else ""))
        case "missing":
            missing = f"{shown}.{fault['loc'][-1]}" if param else str(fault["loc"][-1])
            return invalid_field(missing, f"{missing} is required")
        case "union_tag_invalid" | "union_tag_not_found":
            return _invalid_type_error(shown, fault.get("ctx", {}), notes)
        case "literal_error" if (value := _string_at(body, path)) in notes and notes[value].advice:
            return unsupported_field(shown, f"{shown}: {value} is not supported: {notes[value].advice}")
        case "literal_error" | "none_required" | "too_long":
            advised = [end for end, part in enumerate(path, 1) if part in notes and notes[str(part)].advice]
            if advised:
                advice = notes[str(path[advised[-1] - 1])].advice
                shown = to_printable(".".join(map(str, path[: advised[-1]])))
                return unsupported_field(shown, f"this value of {shown} is not supported: {advice}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return invalid_field(shown, f"{shown} must be an object")
    if fault["type"] == "too_short" and shown in ("messages", "input", "prompt"):
        return invalid_field(shown, f"{shown} is empty", "empty_prompt")
    message = re.sub(r"^(Input|List|String|Dictionary|Value|Value error, it) should", "it should", fault["msg"])
    return invalid_field(shown, f"{shown}: {message}".replace(" after validation", ""))


def _invalid_type_error(shown: str, context: Mapping[str, Any], notes: Notes) -> ApiError:
    tag, field = context.get("tag"), str(context.get("discriminator", "")).strip("'")
    if tag in notes and notes[str(tag)].advice:
        return unsupported_field(
            f"{shown}.{field}", f"{shown}.{field} {tag} is not supported: {notes[str(tag)].advice}"
        )
    tags = re.findall(r"'([^']*)'", str(context.get("expected_tags", "")))
    choices = f" must be {_join_with_or(tags)}" if tags else " is required"
    return invalid_field(f"{shown}.{field}", f"{shown}.{field}{choices}")


def _join_with_or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _path(location: Sequence[int | str], body: Any) -> list[int | str]:
    # pydantic's path also contains the names of the types that it tried; only parts found in the body are kept.
    path: list[int | str] = []
    for part in location:
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, Mapping) and part in body):
            path.append(part)
            body = body[part]
    return path


def _parent_path(location: Sequence[int | str], body: Any) -> list[int | str]:
    # Returns the path of the object that lacks the location's last part. The location may contain the name of a type
    # that is also the name of a field in the body. `_path` then descends too far, and the loop climbs back up.
    path = _path(location[:-1], body)
    while path and isinstance(value := _value_at(body, path), Mapping) and location[-1] in value:
        path.pop()
    return path


def _value_at(body: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        body = body[part]
    return body


def _string_at(body: Any, path: Sequence[str | int]) -> str:
    value = _value_at(body, path)
    return value if isinstance(value, str) else ""


def to_printable(text: str) -> str:
    """Make a client's field name safe to display."""
    return "".join(c if c.isprintable() else "?" for c in text[:_SHOWN_CHARACTERS])


MAX_HINTS = 1024
"""Maximum number of hints reported per request."""
REPAIRED = "invalid characters"
"""Name under which `parse_repaired`'s replacements are reported."""


@dataclass(frozen=True, slots=True)
class RequestHint:
    name: str  # path of the field without list indexes, as in the response header
    path: str  # path of the first occurrence, with list indexes, as in errors
    describes_caller: bool


def find_hints(fields: BaseModel, body: Mapping[str, Any]) -> tuple[RequestHint, ...]:
    """List the ignored fields in order of occurrence, each name once."""
    found: dict[str, RequestHint] = {}
    for path, describes_caller in _hints(fields, body):
        name = ".".join(part for part in path if isinstance(part, str))
        if name not in found:
            found[name] = RequestHint(name, ".".join(map(str, path)), describes_caller)
        if len(found) == MAX_HINTS:
            break
    return tuple(found.values())


def hints_of_types(items: Iterable[tuple[str, str]]) -> Iterable[RequestHint]:
    """List the types of items that are left out of the prompt. `items`: their paths and types."""
    first: dict[str, RequestHint] = {}
    for path, kind in items:
        first.setdefault(kind, RequestHint(kind, path, False))
    return first.values()


def reject_hints(hints: Iterable[RequestHint]) -> None:
    """Raise ApiError (400) for the first hint that does not describe the caller."""
    for hint in hints:
        if not hint.describes_caller:
            shown = to_printable(hint.path)
            raise unsupported_field(
                shown, f"{shown} has no effect and is refused because of --strict-fields: remove it"
            )


def _hints(value: object, raw: object) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    if isinstance(value, list) and isinstance(raw, list):
        for index, (each, raw_value) in enumerate(zip(value, raw, strict=False)):
            if isinstance(raw_value, dict):  # skips other items, such as hundreds of thousands of token ids
                for path, describes_caller in _hints(each, raw_value):
                    yield (index, *path), describes_caller
    if not isinstance(value, BaseModel) or not isinstance(raw, Mapping):
        return
    hints = _hints_by_name(type(value))
    for name, raw_value in raw.items():
        if raw_value is None:
            continue
        if name not in hints:
            yield (name,), False
            continue
        attribute, hint = hints[name]
        parsed = getattr(value, attribute)
        if hint is None or parsed in hint.done:
            for path, describes_caller in _hints(parsed, raw_value):
                yield (name, *path), describes_caller
        else:
            yield (name,), hint.describes_caller


@lru_cache(maxsize=256)
def _hints_by_name(kind: type[BaseModel]) -> dict[str, tuple[str, Note | None]]:
    return {
        wire_name(name, field): (
            name,
            next((each for each in field.metadata if isinstance(each, Note) and each.state == "hint"), None),
        )
        for name, field in kind.model_fields.items()
    }


EFFORT_BUDGETS = {"minimal": 64, "low": 256, "medium": 1024, "high": 4096, "xhigh": 16_384}
"""Maximum number of reasoning tokens for each `reasoning_effort`; `max` is unlimited."""

Effort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = (
    "`minimal`, `low`, `medium`, `high`, `xhigh` limit the reasoning to 64, 256, 1,024, 4,096, 16,384 tokens; "
    "`max`: no limit"
)
ONE_TIER = hint("there is only one tier", "`auto`, `default`", done=("auto", "default", ""))
CACHED_AS_LONG_AS_POSSIBLE = hint("prompts are cached as long as there is space", done=("", {}))
Verbosity = Literal["low", "medium", "high"]


def verbosity_hint(place: str) -> Note:
    reason = f"ask for a shorter or longer answer in the {place}"
    return hint(reason, "`medium`", "use low, medium or high", done=("medium",), is_checked=True)


STRICT_TOOL = works(
    "true: enforce the schema of the tool's arguments; if a call is required, the schemas of all tools are enforced"
)
EFFORT_ADVICE = "use none, minimal, low, medium, high, xhigh or max"


def schema_grammar(param: str, schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema. Raises ApiError (400) if it is nested too deeply."""
    check_depth(param, schema)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def check_functions(functions: Iterable[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Raise ApiError (400) for a duplicate name or a deeply nested schema."""
    # Each function is given by its path in the request, its name, and its schemas by field.
    paths: dict[str, str] = {}
    for path, name, schemas in functions:
        if (earlier := paths.setdefault(name, path)) != path:
            message = f"{path}.name and {earlier}.name are the same: each tool needs its own name"
            raise invalid_field(f"{path}.name", message)
        for field, schema in schemas.items():
            check_depth(f"{path}.{field}", schema)


def tool_options(
    offered: Iterable[tuple[Tool, bool | None]], choice: str | ToolName | None, allowed: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the fields of `RequestOptions` for tools. Raises ApiError (400) if a required tool is not offered.

    `offered` contains each tool with its `strict`. `allowed`: names of the tools that may be called; None: all.
    """
    tools = {str(tool["function"]["name"]): (tool, is_strict) for tool, is_strict in offered}
    for name in (choice.name,) if isinstance(choice, ToolName) else allowed or ():
        if not tools:
            raise _no_tools_error()
        if name not in tools:
            raise invalid_field("tool_choice", "tool_choice is not the name of a tool")
    if allowed is not None:
        tools = {name: tool for name, tool in tools.items() if name in allowed}
    if choice is None or choice in ("none", "auto"):
        tool_choice: ToolChoice = "auto"
    elif not tools:
        raise _no_tools_error()
    else:
        tool_choice = choice if isinstance(choice, ToolName) else "required"
    if choice == "none":
        tools = {}
    return {
        "tools": tuple(tool for tool, _ in tools.values()) or None,
        "tool_choice": tool_choice,
        "strict_tools": tuple(name for name, (_, is_strict) in tools.items() if is_strict),
    }


_no_tools_error = partial(invalid_field, "tool_choice", "tool_choice requires a tool call, but no tools are given")
