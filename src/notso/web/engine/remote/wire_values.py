"""Convert the values that a front end and an engine exchange to and from JSON, based on their type hints.

Fields that have their default value are omitted. NaN is written in the format of Python's json module. This is not
valid JSON, but both ends use that module.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date as Date
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from notso.smollm3 import (
    ContextLengthError,
    DownloadError,
    EngineError,
    EngineLostError,
    InvalidRequestError,
    ModelError,
    ModelFileError,
    NotsoError,
    OutOfMemoryError,
    Sentence,
    TemplateError,
)
from notso.web.engine.port import ChatEngine
from notso.web.values.errors import EngineUnavailableError

Converter = Callable[[Any], Any]

ERRORS: dict[str, type[NotsoError]] = {
    kind.__name__: kind
    for kind in (
        *(ContextLengthError, DownloadError, EngineError, EngineLostError, InvalidRequestError, ModelError),
        *(EngineUnavailableError, ModelFileError, NotsoError, OutOfMemoryError, TemplateError),
    )
}
"""Error classes that the receiver restores. An error of another class is restored as its nearest base class that is
listed here."""
# Attributes that are sent with an error, if it has them.
_ERROR_ATTRIBUTES = ("param", "needed_tokens", "context_tokens", "at_least", "needed_bytes", "available_bytes")

METHODS = frozenset(
    {
        *("render", "tokenize", "detokenize", "token_bytes", "encode_chat", "count_tokens", "estimate"),
        *("speculative_prefill", "clear_cache", "forget_reading", "receipt"),
    }
)
"""ChatEngine methods that front ends may call through /call."""


def to_wire(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, NotsoError):
        return error_to_wire(value)
    if is_dataclass(value):
        field_values = ((name, getattr(value, name), default) for name, default in _defaults(cast(type, type(value))))
        return {name: to_wire(each) for name, each, default in field_values if not _is_default(each, default)}
    if isinstance(value, Mapping):
        return {str(name): to_wire(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [to_wire(each) for each in value]
    if isinstance(value, Date):
        return value.isoformat()
    raise InvalidRequestError(f"a {type(value).__name__} cannot be sent to a remote engine")


def from_wire(hint: Any, value: Any) -> Any:
    """Convert a parsed JSON value to type `hint`.

    Raises ValueError if the value does not match, or InvalidRequestError if the type rejects its fields' values.
    """
    return _converter(hint)(value)


def error_to_wire(error: NotsoError) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, NotsoError)]
    body: dict[str, Any] = {"kinds": kinds, "message": str(error)}
    if isinstance(error.sentence, Sentence):
        body |= {"code": error.sentence.code, "values": dict(error.sentence.values)}
    return body | {n: getattr(error, n) for n in _ERROR_ATTRIBUTES if hasattr(error, n)}


def error_from_wire(value: Any) -> NotsoError:
    """Restore an error. Raises ValueError if `value` is malformed."""
    if not isinstance(value, dict) or not isinstance(value.get("kinds"), list):
        raise ValueError("not an error")
    kind = next((ERRORS[each] for each in value["kinds"] if isinstance(each, str) and each in ERRORS), EngineError)
    message = str(value.get("message"))
    if "code" in value:
        values = value.get("values")
        if not isinstance(values, dict) or not all(isinstance(each, str | int) for each in values.values()):
            raise ValueError("invalid values in a message")
        message = Sentence(message, str(value["code"]), **values)
    attributes = {name: value.get(name) for name in _ERROR_ATTRIBUTES}
    if kind is ContextLengthError:
        numbers = (from_wire(int, attributes["needed_tokens"]), from_wire(int, attributes["context_tokens"]))
        return ContextLengthError(*numbers, at_least=bool(attributes["at_least"]))
    if kind is InvalidRequestError:
        return InvalidRequestError(message, param=from_wire(str | None, attributes["param"]))
    if kind is OutOfMemoryError:
        needed, available = (from_wire(int, attributes[name]) for name in ("needed_bytes", "available_bytes"))
        return OutOfMemoryError(message, needed_bytes=needed, available_bytes=available)
    return kind(message)


class MethodTypes:
    def __init__(self, name: str) -> None:
        method = getattr(ChatEngine, name)
        self._signature = inspect.signature(method)
        self._hints = get_type_hints(method)

    def pack(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        bound = self._signature.bind(None, *arguments, **keywords)
        bound.apply_defaults()
        return {name: to_wire(each) for name, each in bound.arguments.items() if name != "self"}

    def unpack(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not set(value) <= set(self._hints) - {"return"}:
            raise ValueError("invalid arguments of this method")
        return {name: from_wire(self._hints[name], each) for name, each in value.items()}

    def unpack_result(self, value: Any) -> Any:
        return from_wire(self._hints["return"], value)


method_types = cache(MethodTypes)


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    def default(field: Any) -> Any:
        return field.default_factory() if field.default_factory is not MISSING else field.default

    return tuple((field.name, default(field)) for field in fields(kind))


def _is_default(value: Any, default: Any) -> bool:
    # `repr` is compared, too, because 1 and 1.0 are equal, but one must not replace the other.
    if value is default:
        return True
    return not is_dataclass(value) and bool(value == default) and repr(value) == repr(default)


@cache
def _converter(hint: Any) -> Converter:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (Union, types.UnionType):
        return _one_of([_converter(each) for each in arguments])
    if origin is Literal:
        return _literal(frozenset(arguments))
    if origin is tuple:
        return _sequence(_converter(arguments[0]), tuple)
    if origin in (list, Sequence):
        return _sequence(_converter(arguments[0]), list)
    if origin is Mapping:
        return _mapping(*map(_converter, arguments), has_int_keys=arguments[0] is int)
    if hint is bytes:
        return _sequence(_exact_type(int), bytes)
    if hint is Date:
        return lambda value: Date.fromisoformat(_exact_type(str)(value))
    if isinstance(hint, type) and issubclass(hint, NotsoError):
        return error_from_wire
    if is_dataclass(hint):
        return _dataclass(cast(type, hint))
    return _exact_type(*{float: (float, int), type(None): (type(None),)}.get(hint, (hint,)))


def _exact_type(*kinds: type) -> Converter:
    def unpack(value: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"not a valid {kinds[0].__name__}")
        return value

    return unpack


def _literal(values: frozenset[Any]) -> Converter:
    def unpack(value: Any) -> Any:
        if not isinstance(value, str) or value not in values:
            raise ValueError("an unknown value")
        return value

    return unpack


def _one_of(converters: list[Converter]) -> Converter:
    def unpack(value: Any) -> Any:
        for convert in converters:
            try:
                return convert(value)
            except InvalidRequestError:
                raise
            except ValueError:
                continue
        raise ValueError("a value of an unexpected type")

    return unpack


def _sequence(convert: Converter, kind: type) -> Converter:
    def unpack(value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("not a list")
        return kind(map(convert, value))

    return unpack


def _mapping(convert_key: Converter, convert_value: Converter, *, has_int_keys: bool) -> Converter:
    def unpack(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return {convert_key(int(key) if has_int_keys else key): convert_value(each) for key, each in value.items()}

    return unpack


def _dataclass(kind: type) -> Converter:
    hints = get_type_hints(kind)
    field_types = {field.name: hints[field.name] for field in fields(kind)}

    def unpack(value: Any) -> Any:
        if not isinstance(value, dict) or not value.keys() <= field_types.keys():
            raise ValueError(f"not a valid {kind.__name__}")
        try:
            # Converters are looked up only now, because a recursive type needs its own converter, which does not exist
            # until `_dataclass` has returned.
            return kind(**{name: _converter(field_types[name])(each) for name, each in value.items()})
        except TypeError as error:
            raise ValueError(f"not a valid {kind.__name__}") from error

    return unpack
