"""Rotary positions: the table compared with float64, and the rotation with its NumPy reference, in both layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import ops
from notso.qtensor.errors import OperandError
from notso.qtensor.reference import ops as reference

TABLE_TOLERANCE = 6.1e-8  # half a unit in the last place of a float32 just below one, plus the error of float64
ROPE_TOLERANCE = 3e-7  # rounding of the table, two products and a sum; relative to the pair's length

Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]


def table_to(
    frequencies: npt.NDArray[np.float64], positions: int, factor: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines of all positions below `positions`."""
    table = tuple(np.empty((positions, frequencies.size), np.float32) for _ in range(2))
    ops.rope_table(frequencies, np.arange(positions, dtype=np.int32), table, factor)  # type: ignore[arg-type]
    return table  # type: ignore[return-value]


@pytest.mark.parametrize("theta", [10_000.0, 5_000_000.0])
def test_table_is_exact_up_to_the_last_position(theta: float) -> None:
    frequencies = reference.inverse_frequencies(128, theta)
    cosine, sine = table_to(frequencies, 131_072)
    assert cosine.shape == sine.shape == (131_072, 64)
    for positions in (slice(0, 300), slice(65_400, 65_600), slice(130_900, 131_072), slice(0, None, 509)):
        angles = np.arange(131_072, dtype=np.float64)[positions, None] * frequencies
        assert np.abs(cosine[positions] - np.cos(angles)).max() < TABLE_TOLERANCE
        assert np.abs(sine[positions] - np.sin(angles)).max() < TABLE_TOLERANCE
    assert (cosine[0] == 1).all() and (sine[0] == 0).all()


def test_table_is_accurate_at_quadrant_boundaries(every_family: Every) -> None:
    quarter = np.arange(1, 200, dtype=np.float64) * np.pi / 2
    frequencies = np.concatenate([quarter, np.nextafter(quarter, 0), np.nextafter(quarter, 1e9), -quarter, [0.0, 1e6]])
    cosine, sine = table_to(frequencies, 2)
    assert np.abs(cosine[1] - np.cos(frequencies)).max() < TABLE_TOLERANCE
    assert np.abs(sine[1] - np.sin(frequencies)).max() < TABLE_TOLERANCE


def test_factor_multiplies_both_tables() -> None:
    frequencies, factor = reference.yarn_frequencies(128, 5e6, 2.0, 65_536)
    plain, scaled = table_to(frequencies, 50), table_to(frequencies, 50, factor)
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(other, one * factor, rtol=2e-7)


def test_positions_may_come_in_any_order() -> None:
    frequencies = reference.inverse_frequencies(64, 5e6)
    whole = table_to(frequencies, 500)
    positions = np.array([499, 0, 3, 3, 120], np.int32)
    some = np.empty((5, 32), np.float32), np.empty((5, 32), np.float32)
    ops.rope_table(frequencies, positions, some)
    for one, other in zip(some, whole, strict=True):
        np.testing.assert_array_equal(one, other[positions])


@pytest.mark.parametrize("frequency", [np.nan, np.inf])
def test_invalid_rope_table_arguments_are_rejected(frequency: float) -> None:
    with pytest.raises(OperandError):
        table_to(np.array([1.0, frequency]), 3)
    with pytest.raises(OperandError):
        table_to(np.array([1.0]), 3, factor=float("nan"))
    with pytest.raises(OperandError, match="negative"):
        ops.rope_table(
            np.ones(2), np.array([1, -1], np.int32), (np.empty((2, 2), np.float32), np.empty((2, 2), np.float32))
        )


def rotated(
    x: npt.NDArray[np.float32],
    positions: npt.NDArray[np.int32],
    table: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    adjacent: bool,
) -> npt.NDArray[np.float32]:
    out = x.copy()
    ops.rope(out, positions, table, adjacent=adjacent)
    return out


@pytest.mark.parametrize("dim", [2, 4, 6, 16, 30, 32, 34, 64, 128])
@pytest.mark.parametrize("adjacent", [True, False], ids=["pairs", "halves"])
def test_rope_matches_numpy(dim: int, adjacent: bool, every_family: Every) -> None:
    rng = np.random.default_rng(dim)
    frequencies = reference.inverse_frequencies(dim, 5e6)
    table = table_to(frequencies, 1000)
    for rows, heads in ((1, 1), (1, 16), (37, 3)):
        x = rng.standard_normal((rows, heads, dim), np.float32)
        positions = rng.integers(0, 1000, rows).astype(np.int32)
        result = every_family(lambda x=x, positions=positions: rotated(x, positions, table, adjacent))
        expected = reference.rope(x, positions, frequencies, "pairs" if adjacent else "halves")
        assert np.abs(result - expected).max() < ROPE_TOLERANCE * np.abs(x).max() * 2


def test_the_layouts_are_permutations_of_each_other(every_family: Every) -> None:
    rng = np.random.default_rng(1)
    table = table_to(reference.inverse_frequencies(64, 1e4), 500)
    x = rng.standard_normal((5, 4, 64), np.float32)
    positions = np.array([0, 1, 77, 400, 499], np.int32)
    halves = every_family(lambda: rotated(x, positions, table, False))
    interleave = np.arange(64).reshape(2, 32).T.reshape(-1)
    pairs = every_family(lambda: rotated(np.ascontiguousarray(x[:, :, interleave]), positions, table, True))
    np.testing.assert_array_equal(pairs, halves[:, :, interleave])
    assert not np.array_equal(halves, rotated(x, positions, table, True)), "the layouts must differ"


def test_rope_keeps_position_zero_and_vector_length(every_family: Every) -> None:
    table = table_to(reference.inverse_frequencies(128, 5e6), 65_536)
    x = np.random.default_rng(2).standard_normal((3, 2, 128), np.float32)
    result = every_family(lambda: rotated(x, np.array([0, 30_000, 65_535], np.int32), table, True))
    np.testing.assert_array_equal(result[0], x[0])
    np.testing.assert_allclose(np.linalg.norm(result, axis=2), np.linalg.norm(x, axis=2), rtol=1e-6)
