"""Validate untrusted input with strict pydantic models."""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


class StrictFields(BaseModel):
    """Reject unknown fields and values of the wrong type, such as booleans for numbers."""

    # Lists of these models should use fail_fast: only one error is reported, and each error collected costs a kilobyte.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_first_unknown(cls, data: Any) -> Any:
        # pydantic would create an error for each unknown field, so only the first unknown field is kept.
        fields = cls.model_fields
        if not isinstance(data, dict) or len(data) <= len(fields):
            return data
        known = {field.alias or name for name, field in fields.items()}
        unknown = next(name for name in data if name not in known)
        return {name: data[name] for name in (*known, unknown) if name in data}


def limit_entries(entries: int) -> BeforeValidator:
    """Keep at most `entries` + 1 members of an object. The field's length check still rejects larger objects."""

    # The dropped members are never validated, so a huge object costs little.
    def truncate(data: Any) -> Any:
        return dict(islice(data.items(), entries + 1)) if isinstance(data, dict) else data

    return BeforeValidator(truncate)
