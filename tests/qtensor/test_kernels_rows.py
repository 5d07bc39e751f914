"""Operations on rows of floats: all families equal the generic one, which is close to its NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import ops
from notso.qtensor.formats import FORMATS, Format
from notso.qtensor.reference import ops as reference
from notso.qtensor.tensor import QTensor

# Relative errors compared with float64. One rounding in float32 is 6e-8.
EXP_TOLERANCE = 2.5e-7  # the polynomial, the split of ln 2, and the divisions of the softmax
SILU_TOLERANCE = 5e-7  # exp, an addition, a division and a product
NORM_TOLERANCE = 5e-7  # a sum over lanes, a square root, a division and two products
SOFTMAX_TOLERANCE = 2e-6  # x minus the maximum is rounded before exp: half a unit of up to 20; and the sum over the row

SIZES = (*range(1, 71), 127, 128, 129, 255, 1000, 4099)

Make = Callable[..., QTensor]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]


def numbers(rng: np.random.Generator, *shape: int, scale: float = 3.0) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def silu(gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    out = np.full_like(gate, np.nan)
    ops.silu_mul(gate, up, out)
    return out


def normed(x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], eps: float = 1e-6) -> npt.NDArray[np.float32]:
    out = np.full_like(x, np.nan)
    ops.rms_norm(x, weight, eps, out)
    return out


def softmaxed(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    out = x.copy()
    ops.softmax(out)
    return out


def test_row_operations_match_numpy_for_all_sizes(every_family: Every) -> None:
    rng = np.random.default_rng(1)
    for size in SIZES:
        a, b, weight = numbers(rng, 3, size), numbers(rng, 3, size), numbers(rng, size)

        def added(a: npt.NDArray[np.float32] = a, b: npt.NDArray[np.float32] = b) -> npt.NDArray[np.float32]:
            out = np.full_like(a, np.nan)
            ops.add(a, b, out)
            return out

        np.testing.assert_array_equal(every_family(added), reference.add(a, b))
        np.testing.assert_allclose(
            every_family(lambda a=a, b=b: silu(a, b)), reference.silu_mul(a, b), rtol=SILU_TOLERANCE, atol=1e-37
        )
        np.testing.assert_allclose(
            every_family(lambda a=a, weight=weight: normed(a, weight)),
            reference.rms_norm(a, weight, 1e-6),
            rtol=NORM_TOLERANCE,
        )
        result = every_family(lambda a=a: softmaxed(a))
        np.testing.assert_allclose(result, reference.softmax(a), rtol=SOFTMAX_TOLERANCE, atol=1e-37)
        np.testing.assert_allclose(result.sum(axis=1), 1, rtol=1e-5)


def test_batch_of_rows_equals_single_rows(every_family: Every) -> None:
    """The row is split into pieces for several threads; boundaries leave no gap and change no bit."""
    rng = np.random.default_rng(2)
    gate, up = numbers(rng, 7, 11008), numbers(rng, 7, 11008)
    whole = every_family(lambda: silu(gate, up))
    np.testing.assert_array_equal(whole, np.concatenate([silu(gate[i : i + 1], up[i : i + 1]) for i in range(7)]))
    weight = numbers(rng, 2048)
    x = numbers(rng, 50, 2048)
    whole = every_family(lambda: normed(x, weight))
    np.testing.assert_array_equal(whole, np.concatenate([normed(x[i : i + 1].copy(), weight) for i in range(50)]))


def test_row_operations_work_in_place(every_family: Every) -> None:
    rng = np.random.default_rng(3)
    a, b, weight = numbers(rng, 4, 75), numbers(rng, 4, 75), numbers(rng, 75)

    def in_place(call: Callable[[npt.NDArray[np.float32]], None]) -> npt.NDArray[np.float32]:
        x = a.copy()
        call(x)
        return x

    for call, expected in (
        (lambda x: ops.add(x, b, x), a + b),
        (lambda x: ops.silu_mul(x, b, x), silu(a, b)),
        (lambda x: ops.silu_mul(b, x, x), silu(b, a)),
        (lambda x: ops.rms_norm(x, weight, 1e-6, x), normed(a, weight)),
    ):
        np.testing.assert_array_equal(every_family(lambda call=call: in_place(call)), expected)


def test_exp_error_is_within_tolerance(every_family: Every) -> None:
    """Measure exp through the softmax of [0, x]: the quotient of its two outputs. All callers of exp have x <= 0."""
    rng = np.random.default_rng(4)
    halves_of_ln2 = (np.arange(-249, 1) * (np.log(2) / 2)).astype(np.float32)  # where the range reduction changes
    near = [np.nextafter(halves_of_ln2, np.float32(s), dtype=np.float32) for s in (-np.inf, np.inf)]
    x = np.concatenate([-rng.uniform(0, 86, 20000), -np.geomspace(1e-30, 86, 500), halves_of_ln2, *near])
    x = x[(x <= 0) & (x > -86.9)].astype(np.float32)
    result = every_family(lambda: softmaxed(np.stack([np.zeros_like(x), x], axis=1)))
    error = np.abs(result[:, 1].astype(np.float64) / result[:, 0] / np.exp(x.astype(np.float64)) - 1)
    assert error.max() < EXP_TOLERANCE, f"{error.max()} at {x[error.argmax()]}"


def test_silu_matches_numpy_over_the_whole_range(every_family: Every) -> None:
    gate = np.concatenate([np.linspace(-100, 100, 4001), [0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30]]).astype(np.float32)
    gate = gate.reshape(1, -1)
    up = np.ones_like(gate)
    result = every_family(lambda: silu(gate, up))
    np.testing.assert_allclose(result, reference.silu_mul(gate, up), rtol=SILU_TOLERANCE, atol=1e-7)
    ordinary = np.abs(gate) < 80
    np.testing.assert_allclose(result[ordinary], reference.silu_mul(gate, up)[ordinary], rtol=SILU_TOLERANCE)


def test_softmax_of_extreme_and_equal_values_matches_numpy(every_family: Every) -> None:
    for row in ([0.0] * 33, [1e30, 0, -1e30], [-3e38, 3e38], [5.0, 5.0], [-1e4] * 20 + [-1e4 + 1], [7.0]):
        x = np.array([row], np.float32)
        result = every_family(lambda x=x: softmaxed(x))
        np.testing.assert_allclose(result, reference.softmax(x), rtol=SOFTMAX_TOLERANCE, atol=1e-37)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [5, 16, 40, 67])
def test_non_finite_values_affect_only_their_row(bad: float, size: int, every_family: Every) -> None:
    """NaN and infinities in a row never give ordinary values, and do not affect other rows."""
    rng = np.random.default_rng(size)
    for place in range(0, size, 3):
        x, other, weight = numbers(rng, 3, size), numbers(rng, 3, size), numbers(rng, size)
        x[1, place] = bad
        results = [
            every_family(lambda x=x, weight=weight: normed(x, weight)),
            every_family(lambda x=x, other=other: silu(other, x)),
        ]
        if bad != -np.inf:  # minus infinity correctly gives zero
            results += [every_family(lambda x=x, other=other: silu(x, other)), every_family(lambda x=x: softmaxed(x))]
        for result in results:
            assert not np.isfinite(result[1]).all() and np.isfinite(result[[0, 2]]).all()


def test_rms_norm_of_extreme_scales_matches_numpy(every_family: Every) -> None:
    weight = np.ones(40, np.float32)
    for scale in (0.0, 1e-42, 1e-20, 1e15):
        x = numbers(np.random.default_rng(5), 2, 40, scale=1) * np.float32(scale)
        result = every_family(lambda x=x: normed(x, weight))
        np.testing.assert_allclose(result, reference.rms_norm(x, weight, 1e-6), rtol=NORM_TOLERANCE, atol=1e-40)


def test_argmax_takes_the_first_of_equals(every_family: Every) -> None:
    rng = np.random.default_rng(6)
    for size in (1, 2, 31, 1000):
        x = rng.integers(0, 5, (20, size)).astype(np.float32)

        def best(x: npt.NDArray[np.float32] = x) -> npt.NDArray[np.int32]:
            out = np.full(len(x), -1, np.int32)
            ops.argmax(x, out)
            return out

        np.testing.assert_array_equal(every_family(best), reference.argmax(x))


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("kind", ["plain", "wild", "ones", "zero"])
def test_embed_rows_matches_numpy(format: Format, kind: str, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng(7)
    weight = make_weight(format, 40, 512, rng, kind, offset=3)
    ids = np.concatenate([rng.integers(0, 40, 50), [0, 39, 39]]).astype(np.int32)

    def rows() -> npt.NDArray[np.float32]:
        out = np.full((len(ids), 512), np.nan, np.float32)
        ops.embed_rows(weight, ids, out)
        return out

    np.testing.assert_array_equal(every_family(rows), reference.embedding_rows(weight, ids))


def test_gather_rows_copies_the_selected_rows() -> None:
    rng = np.random.default_rng(8)
    x = numbers(rng, 9, 33)
    ids = np.array([8, 0, 3, 3], np.int32)
    out = np.full((4, 33), np.nan, np.float32)
    ops.gather_rows(x, ids, out)
    np.testing.assert_array_equal(out, x[ids])
