"""What the bodies of all requests have in common: strict types, and a word about every field, known or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

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
