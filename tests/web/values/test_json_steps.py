"""Incremental JSON encoding gives the same text as the json module, in small steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notso.web.values import json_steps as module
from notso.web.values.json_steps import STEP_ITEMS, json_bytes, json_steps

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(max_size=3), inner))


def entry(others: int = 0) -> dict[str, Any]:
    token: dict[str, Any] = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    return token | ({"top_logprobs": [entry() for _ in range(others)]} if others else {})


@given(VALUES)
def test_output_matches_json_module(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert "".join(json_steps(value)) == whole and json_bytes(value) == whole.encode()


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"logprobs": {"content": [entry(20) for _ in range(400)]}} for _ in range(4)]},
        {"tokens": [{"id": number, "piece": "ab"} for number in range(5_000)]},
        {"tokens": list(range(5_000))},
        {"data": [[0.5] * 300] * 40},
    ],
)
def test_each_step_encodes_limited_amount(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, largest = module._encode, 0

    def count(value: Any) -> str:
        nonlocal largest
        text = encode(value)
        largest = max(largest, len(text))
        return text

    monkeypatch.setattr(module, "_encode", count)
    json_bytes(value)
    whole = len(encode(value))
    assert 0 < largest <= min((STEP_ITEMS + 1) * len(encode(entry(20))), whole // 5)


def test_nan_and_infinity_are_rejected_unless_allowed() -> None:
    for value in ({"a": float("nan")}, [[float("inf")]]):
        with pytest.raises(ValueError):
            json_bytes(value)
    assert json_bytes({"a": float("nan")}, allow_nan=True) == b'{"a":NaN}'
