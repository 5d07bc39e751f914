"""Depth, objects and values of a JSON text are counted before it is parsed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.plugins import json_shape
from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape

TEXTS = st.text(alphabet='a"\\{}[],:\n\u00e9\U0001f600', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Return depth, objects, and values as counted in the bytes: commas and opening brackets."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    depth = 1 + max((each[0] for each in inner), default=0)
    objects = isinstance(value, dict) + sum(each[1] for each in inner)
    return depth, objects, 1 + max(0, len(value) - 1) + sum(each[2] for each in inner)


def fits(body: bytes, limits: JsonLimits) -> bool:
    try:
        check_shape(body, limits)
    except JsonShapeError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(VALUES, st.booleans(), st.integers(2, 40))
def test_json_limits_are_exact_for_any_window_size(value: Any, ascii_only: bool, window: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    depth, objects, values = counted(value)
    before, json_shape.WINDOW_BYTES = json_shape.WINDOW_BYTES, window
    try:
        strings = body.count(b'"')  # an upper limit
        assert fits(body, JsonLimits(depth, objects, max(values, strings)))
        if depth:
            assert not fits(body, JsonLimits(depth - 1, objects, max(values, strings)))
            assert not fits(body, JsonLimits(depth, objects, values - 1))
        escapes = body.count(b"\\")
        assert fits(body, JsonLimits(depth, objects, max(values, strings), escapes))
        if escapes:
            assert not fits(body, JsonLimits(depth, objects, max(values, strings), escapes - 1))
        if objects:
            assert not fits(body, JsonLimits(depth, objects - 1, max(values, strings)))
    finally:
        json_shape.WINDOW_BYTES = before


@pytest.mark.parametrize("unit", [b"{},", b"[],", b"[", b"1,", b'""', b'"', b'\\"', b"\\", b"\\n", b"]", b'"a",'])
def test_check_shape_takes_linear_time(unit: bytes) -> None:
    body = b'["' + unit * (8_000_000 // len(unit))
    began = time.thread_time()
    fits(body, JsonLimits(64, 100_000, 1_000_000))
    fits(body[1:], JsonLimits(64, 100_000, 1_000_000))
    assert time.thread_time() - began < 8
