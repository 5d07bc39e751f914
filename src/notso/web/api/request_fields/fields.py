"""What the bodies of all requests have in common: strict types, and a word about every field, known or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from notso.web.values.strict_fields import StrictFields

MAX_PARTS = 256
MAX_SCHEMA_DEPTH = 32

Text = Annotated[str, Field(max_length=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Fields(StrictFields):
    """Of any body."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)


class TextPart(Fields):
    """A piece of a message's content. Pictures and sound have no type here: the model reads text."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Note:
    """What is to be said of a field: in the compatibility page, and to who sends what cannot be honoured.

    works: it does what the API's own documents say. inert: it is taken where it asks for nothing. refused: it has no
    meaning here. later: it is not there yet. `instead`: what to do about a value that is refused, if not `text`.
    """

    state: Literal["works", "inert", "refused", "later"]
    text: str
    instead: str = ""

    @property
    def advice(self) -> str:
        """For who is refused."""
        return self.instead or ("" if self.state in ("works", "inert") else self.text)


Notes = dict[str, Note]


def works(text: str, instead: str = "") -> Note:
    """The field is honoured."""
    return Note("works", text, instead)


def inert(text: str, instead: str = "") -> Note:
    """The field is taken where it asks for nothing."""
    return Note("inert", text, instead)


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
