"""Fields as strangers fill them: strict types, nothing unknown, and a fault found early ends the looking."""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


class StrictFields(BaseModel):
    """No field beyond those listed, and no value of another type, a boolean for a number least of all.

    Lists of such fields should fail fast: one fault is told, and each that is collected costs a thousand bytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_one_unknown(cls, given: Any) -> Any:
        """Of many fields that nobody knows all but the first are dropped unread: it is the one that is refused."""
        fields = cls.model_fields
        if not isinstance(given, dict) or len(given) <= len(fields):
            return given
        known = {field.alias or name for name, field in fields.items()}
        unknown = next(name for name in given if name not in known)
        return {name: given[name] for name in (*known, unknown) if name in given}


def at_most(entries: int) -> BeforeValidator:
    """Of an object with more entries one too many is left, for whoever counts them; the others are dropped unread."""

    def cut(given: Any) -> Any:
        return dict(islice(given.items(), entries + 1)) if isinstance(given, dict) else given

    return BeforeValidator(cut)
