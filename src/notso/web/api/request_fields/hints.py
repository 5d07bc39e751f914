"""Hints: fields that are taken, change nothing of the answer, and are named to who sent them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from notso.web.api.request_fields.field_reader import printable, unsupported
from notso.web.api.request_fields.fields import spelling

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
