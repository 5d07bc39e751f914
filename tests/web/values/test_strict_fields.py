"""The number of collected errors is limited, however many faults a body has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.request_fields import fields
from notso.web.api.request_fields.fields import MAX_HINTS
from notso.web.api.shared.api_request import MAX_NAMES, ignored_headers
from notso.web.chat.files import import_process
from notso.web.chat.files.imports import validate_chats
from notso.web.edge.errors import ApiError
from notso.web.values.errors import Problem
from notso.web.values.strict_fields import StrictFields, limit_entries


class Few(StrictFields):
    one: int = 1
    two: int = Field(default=2, alias="second")
    some: Annotated[dict[str, int], limit_entries(3)] = Field(default={}, max_length=3)


def test_only_first_unknown_field_is_reported() -> None:
    with pytest.raises(ValidationError) as refused:
        Few.model_validate({"x": 1, "one": "no"} | {f"k{number}": 1 for number in range(1000)} | {"second": 4})
    assert [(each["loc"], each["type"]) for each in refused.value.errors()] == [
        *((("one",), "int_type"), (("x",), "extra_forbidden")),
    ]
    assert Few.model_validate({"one": 5, "second": 6, "some": {"a": 1, "b": 2, "c": 3}}).two == 6


def test_oversized_mapping_is_validated_only_up_to_limit() -> None:
    with pytest.raises(ValidationError) as refused:
        Few.model_validate({"some": {f"k{number}": "x" for number in range(1000)}})
    assert refused.value.error_count() == 4
    with pytest.raises(ValidationError, match="at most 3"):
        Few.model_validate({"some": {f"k{number}": 1 for number in range(1000)}})


UNKNOWN = {f"k{number}": 1 for number in range(50_000)}


@pytest.mark.parametrize("where", ["body", "message"])
def test_number_of_reported_unknown_fields_is_limited(where: str) -> None:
    message = {"role": "user", "content": "x", **(UNKNOWN if where == "message" else {})}
    asked = parse_chat_request({"messages": [message], **(UNKNOWN if where == "body" else {})})
    (named,) = ignored_headers(asked).values()
    assert named.count("k") == MAX_NAMES and named.endswith(f", and at least {MAX_HINTS - MAX_NAMES} more")


ASKED: list[dict[str, Any]] = [
    {"messages": [{}] * 60_000},
    {"messages": [{"role": "user", "content": [{}] * 60_000}]},
    {"messages": [{"role": "user", "content": "x"}], "stop": [1] * 200_000},
    {"messages": [{"role": "user", "content": "x"}], "logit_bias": {f"k{number}": 1 for number in range(50_000)}},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * 60_000},
]


@pytest.mark.parametrize("body", ASKED, ids=range(len(ASKED)))
def test_number_of_validation_errors_is_limited(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    collected = fields._to_api_error

    def noted(error: ValidationError, *rest: Any) -> ApiError:
        counts.append(error.error_count())
        return collected(error, *rest)

    monkeypatch.setattr(fields, "_to_api_error", noted)
    with pytest.raises(ApiError):
        parse_chat_request(body)
    assert counts and counts[0] < 1100


FILES: list[tuple[Callable[[], bytes], str]] = [
    (lambda: b"[" + b"{}," * 2_000_000 + b"{}]", "more than 50,000 messages"),
    (lambda: b"[" + b"1," * 2_000_000 + b"1]", "more than 50,000 messages"),
    (lambda: b'[{"role": "user", "content": [' + b"[]," * 300_000 + b"[]]}]", "at least 1 item"),
    (lambda: b'[{"role": "user", "content": [' + b"1," * 5_000_000 + b"1]}]", "an unexpected value"),
    (lambda: b'[{"role": "user", "content": ' + b"[" * 100 + b"]" * 100 + b"}]", "at least 1 item"),
    (lambda: b"[" * 5000 + b"]" * 5000, "nested too deep"),
    (
        lambda: (
            b'{"format": "notso-chats", "version": 2, "chats": ['
            + b",".join([b'{"messages": [' + b",".join([b"{}"] * 20_000) + b"]}"] * 3)
            + b"]}"
        ),
        "more than 50,000 messages",
    ),
]


@pytest.mark.parametrize(("make", "reason"), FILES, ids=range(len(FILES)))
def test_import_file_with_too_many_values_is_rejected(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(Problem) as refused:
        validate_chats(import_process.decode_entries(import_process.encode_entries(make())), str)
    assert refused.value.status == 400 and reason in refused.value.sentence
