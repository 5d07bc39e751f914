"""Searches for scales give smaller errors than simple scales, in particular for important columns."""

from __future__ import annotations

import numpy as np
import pytest

from notso.qtensor import OperandError
from notso.qtensor.formats import Q4_K, Q5_K, Q6_K, Q8_0, Format
from notso.qtensor.reference import blocks

SEARCHED = [Q4_K, Q5_K, Q6_K]

OBVIOUS = {Q4_K: 15, Q5_K: 31, Q6_K: 63}
"""Number of steps between the minimum and the maximum of a group."""


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)


def error(format: Format, x: np.ndarray, importance: np.ndarray | None, judged_by: np.ndarray) -> float:
    made = blocks.dequantize(format, blocks.quantize(format, x, importance))
    return float((judged_by * np.square(made - x)).sum(dtype=np.float64))


@pytest.mark.parametrize("format", SEARCHED, ids=str)
def test_scale_search_is_better_than_min_max_scales(format: Format) -> None:
    """Even if the simple scales are exact, which scales in files are not."""
    x = numbers(1, 16, 1024)
    groups = x.reshape(-1, 16 if format is Q6_K else 32).astype(np.float64)
    if format is Q6_K:
        low, step = -np.abs(groups).max(axis=1), 2 * np.abs(groups).max(axis=1) / OBVIOUS[format]
    else:
        low, step = groups.min(axis=1), np.ptp(groups, axis=1) / OBVIOUS[format]
    nearest = np.rint((groups - low[:, None]) / step[:, None]) * step[:, None] + low[:, None]
    assert error(format, x, None, np.ones(1024)) < np.square(nearest - groups).sum()


@pytest.mark.parametrize("format", SEARCHED, ids=str)
def test_importance_moves_errors_to_less_important_columns(format: Format) -> None:
    x = numbers(2, 64, 512)
    importance = np.random.default_rng(3).lognormal(0, 1.5, 512).astype(np.float32)
    known, unknown = (error(format, x, given, importance) for given in (importance, None))
    assert known < 0.9 * unknown
    assert error(format, x, None, np.ones(512)) < error(format, x, importance, np.ones(512))


@pytest.mark.parametrize("format", SEARCHED, ids=str)
def test_only_relative_importance_of_columns_matters(format: Format) -> None:
    """Only relative importance of columns matters. Rows of several super-blocks are processed in arbitrary pieces."""
    x = numbers(4, 3 * blocks.SEARCHED_VALUES // 768 + 1, 768)
    importance = np.random.default_rng(5).lognormal(0, 1, 768).astype(np.float32)
    together = blocks.quantize(format, x, importance)
    for row in (0, len(x) // 2, len(x) - 1):
        np.testing.assert_array_equal(together[row], blocks.quantize(format, x[row], importance))
    np.testing.assert_array_equal(together, blocks.quantize(format, x, importance * np.float32(4)))
    same = blocks.quantize(format, x, np.full(768, 7, np.float32))
    np.testing.assert_array_equal(same, blocks.quantize(format, x))
    np.testing.assert_array_equal(same, blocks.quantize(format, x, np.zeros(768, np.float32)))


def test_formats_without_scale_search_ignore_importance() -> None:
    x = numbers(6, 4, 256)
    np.testing.assert_array_equal(blocks.quantize(Q8_0, x, np.arange(256, dtype=np.float32)), blocks.quantize(Q8_0, x))


@pytest.mark.parametrize("bad", [np.ones(255), np.full(256, np.nan), np.full(256, np.inf), np.full(256, -1.0)])
def test_invalid_importance_is_rejected(bad: np.ndarray) -> None:
    with pytest.raises(OperandError, match="importance must have 256 finite"):
        blocks.quantize(Q4_K, numbers(7, 2, 256), bad.astype(np.float32))
