"""Quantized matrix products: all kernel families equal the generic one bit for bit, which equals its NumPy reference.

The sizes are those at which such kernels have failed: columns around register blocks, remainders of rows and inputs,
and 1, 3 and 43 blocks. Minima are nonzero and columns differ, so that mix-ups are detected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from long_tests import is_long
from twins import PACKED, packed_twin, same_bits

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import FORMATS, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, Format
from notso.qtensor.reference import ops as reference
from notso.qtensor.reference.random_blocks import HALVES, write_halves
from notso.qtensor.tensor import QTensor

COLUMNS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 34, 48, 49, 64, 65, 97, 128, 129, 512)
ROWS = (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 70)
QUANTIZED = [f for f in FORMATS.values() if not f.is_float]
PLAIN = [f for f in FORMATS.values() if f.is_float]
SUB_BLOCKS = (Q8_0, Q4_0, Q4_1)

# The order of summation differs from NumPy's float64: at most a few roundings of the largest partial sum.
FLOAT_SUM_TOLERANCE = 2e-6

Make = Callable[..., QTensor]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)
each_quantized = pytest.mark.parametrize("format", QUANTIZED, ids=str)


def drawn(values: tuple[int, ...]) -> list[tuple[Format, int]]:
    """Return each format with a fifth of the values and each value with a fifth of the formats; all pairs after changes
    of native code."""
    pairs = itertools.product(enumerate(FORMATS.values()), enumerate(values))
    return [(format, value) for (i, format), (j, value) in pairs if (i + j) % 5 == 0 or is_long("native")]


def activations(rng: np.random.Generator, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Return rows with different scales and offsets, so that mixed-up columns or sums are detected."""
    scale = np.geomspace(0.1, 10, rows, dtype=np.float32)[:, None]
    return (rng.standard_normal((rows, cols), np.float32) + np.float32(0.3)) * scale


def product(x: npt.NDArray[np.float32], weight: QTensor) -> npt.NDArray[np.float32]:
    out = np.full((len(x), weight.rows), np.nan, np.float32)
    ops.matmul(x, weight, out)
    if weight.format.name in PACKED and weight.cols % 256 == 0:
        packed = np.full_like(out, np.nan)
        ops.matmul(x, packed_twin(weight), packed)
        assert same_bits(packed, out), f"a packed {weight.format.name} differs from rows"
    return out


def twin(x: npt.NDArray[np.float32], weight: QTensor) -> npt.NDArray[np.float32]:
    """Return the NumPy reference's result; rows are padded with zeros to a multiple of 256 on both sides."""
    missing = -weight.cols % 256
    if missing:
        padding = np.zeros((weight.rows, missing // weight.format.block_values * weight.format.block_bytes), np.uint8)
        data = np.concatenate([weight.row_data(), padding], axis=1).reshape(-1)
        weight = QTensor("padded", weight.format, (weight.rows, weight.cols + missing), data)
        x = np.pad(x, ((0, 0), (0, missing)))
    return reference.matmul_q8k(x, weight)


@pytest.mark.parametrize(("format", "columns"), drawn(COLUMNS), ids=str)
def test_kernel_families_agree(format: Format, columns: int, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng([columns, format.ggml_type])
    for rows in ROWS if columns < 512 else (37,):
        for cols in (256, 768) if columns < 64 else (512,):
            weight, x = make_weight(format, rows, cols, rng), activations(rng, columns, cols)
            assert np.isfinite(every_family(lambda x=x, weight=weight: product(x, weight))).all()


@each_format
def test_row_panels_agree_and_stay_within_bounds(format: Format, make_weight: Make, every_family: Every) -> None:
    """More rows than a panel, complete and partial panels, and results with and without nontemporal stores."""
    rng = np.random.default_rng(format.ggml_type)
    few = ((16, 130, 256), (18, 288, 512), (32, 176, 768), (33, 272, 512), (50, 304, 768))
    for columns, rows, cols in (*few, (128, 48, 768), (129, 160, 256), (200, 144, 256)):
        weight, x = make_weight(format, rows, cols, rng), activations(rng, columns, cols)
        results = []
        for offset in (0, 16):  # offset of the output from a cache line
            room = np.full(columns * rows + 64, np.nan, np.float32)
            begin = (-room.ctypes.data % 64 + offset) // 4
            out = room[begin : begin + columns * rows].reshape(columns, rows)

            def compute(x: npt.NDArray[np.float32] = x, w: QTensor = weight, out: Any = out) -> npt.NDArray[Any]:
                out[:] = np.nan
                ops.matmul(x, w, out)
                return np.array(out)

            results.append(every_family(compute))
            assert np.isnan(room[:begin]).all() and np.isnan(room[begin + out.size :]).all()
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("format", [Q4_K, Q5_K, Q6_K], ids=str)
def test_kernel_families_agree_for_1_to_49_columns(format: Format, make_weight: Make, every_family: Every) -> None:
    """Columns in registers, one and several passes; tiles of four rows and of one; more blocks than are prefetched;
    columns whose sums fit in 16 bits next to others."""
    rng = np.random.default_rng(format.ggml_type)
    weight = make_weight(format, 81, 5 * 256, rng)
    for columns in range(1, 50):
        x = activations(rng, columns, weight.cols)
        x[columns // 2, 256:768] = np.where(rng.random(512) < 0.9, 1, -1)
        every_family(lambda x=x: product(x, weight))


@each_format
@pytest.mark.parametrize("kind", ["wild", "ones", "zero", "nonfinite"])
def test_kernel_families_agree_on_arbitrary_bytes(
    format: Format, kind: str, make_weight: Make, every_family: Every
) -> None:
    rng = np.random.default_rng([7, format.ggml_type])
    for columns, rows, cols in ((1, 5, 256), (9, 18, 768), (21, 48, 768), (33, 40, 512), (64, 4, 256)):
        weight, x = make_weight(format, rows, cols, rng, kind), activations(rng, columns, cols)
        result = every_family(lambda x=x, weight=weight: product(x, weight))
        if kind == "zero":
            assert not result.any()
        elif kind != "nonfinite":
            assert np.isfinite(result).all() and result.any()


@each_format
def test_kernel_families_agree_on_long_rows(format: Format, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng(format.ggml_type)
    weight = make_weight(format, 22, 43 * 256, rng)
    for columns in (1, 3, 8, 23, 39, 90):  # the last sizes need more than one chunk of memory for activations
        x = activations(rng, columns, weight.cols)
        every_family(lambda x=x: product(x, weight))


@pytest.mark.parametrize("format", [*SUB_BLOCKS, *PLAIN], ids=str)
@pytest.mark.parametrize("cols", [32, 96, 288, 480, 544])
def test_kernel_families_agree_on_partial_super_blocks(
    format: Format, cols: int, make_weight: Make, every_family: Every
) -> None:
    rng = np.random.default_rng([cols, format.ggml_type])
    for columns, rows in ((1, 1), (2, 7), (5, 18)):
        weight, x = make_weight(format, rows, cols, rng), activations(rng, columns, cols)
        result = every_family(lambda x=x, weight=weight: product(x, weight))
        if format in SUB_BLOCKS:
            np.testing.assert_array_equal(result, twin(x, weight))


@pytest.mark.parametrize("format", PLAIN, ids=str)
def test_float_rows_of_any_length_match_numpy(format: Format, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng(format.ggml_type)
    for cols in (*range(1, 35), 47, 63, 65, 257):
        weight, x = make_weight(format, 5, cols, rng), activations(rng, 3, cols)
        result = every_family(lambda x=x, weight=weight: product(x, weight))
        bound = np.abs(x) @ np.abs(weight.dequantize()).T
        assert (np.abs(result - reference.matmul_dequantized(x, weight)) <= FLOAT_SUM_TOLERANCE * bound).all()


@pytest.mark.parametrize(("format", "offset"), drawn((1, 2, 3, 7, 14, 31)), ids=str)
def test_unaligned_weights_give_identical_products(
    format: Format, offset: int, make_weight: Make, every_family: Every
) -> None:
    rng_here, rng_there = np.random.default_rng(5), np.random.default_rng(5)
    here = make_weight(format, 35, 512, rng_here)
    there = make_weight(format, 35, 512, rng_there, offset=offset)
    x = activations(np.random.default_rng(offset), 19, 512)
    expected = product(x, here)
    np.testing.assert_array_equal(every_family(lambda: product(x, there)), expected)


@each_quantized
@pytest.mark.parametrize("kind", ["plain", "wild", "ones"])
def test_quantized_matmul_equals_numpy(format: Format, kind: str, make_weight: Make) -> None:
    rng = np.random.default_rng([11, format.ggml_type])
    for columns, rows, cols in ((1, 17, 768), (7, 33, 256), (23, 5, 11008 if kind == "plain" else 768)):
        weight, x = make_weight(format, rows, cols, rng, kind), activations(rng, columns, cols)
        np.testing.assert_array_equal(product(x, weight), twin(x, weight))


@pytest.mark.parametrize("format", PLAIN, ids=str)
def test_float_matmul_is_close_to_numpy(format: Format, make_weight: Make) -> None:
    rng = np.random.default_rng(format.ggml_type)
    for columns, rows, cols in ((1, 17, 768), (23, 33, 2048)):
        weight, x = make_weight(format, rows, cols, rng), activations(rng, columns, cols)
        bound = np.abs(x) @ np.abs(weight.dequantize()).T
        error = np.abs(product(x, weight) - reference.matmul_dequantized(x, weight))
        assert (error <= FLOAT_SUM_TOLERANCE * bound).all()


@each_format
def test_column_does_not_depend_on_neighbors(format: Format, make_weight: Make, every_family: Every) -> None:
    """A column's bits do not depend on the batch or on its position in it (reliability DT1)."""
    rng = np.random.default_rng(format.ggml_type)
    weight, x = make_weight(format, 21, 768, rng), activations(rng, 23, 768)
    together = every_family(lambda: product(x, weight))
    order = rng.permutation(23)
    for family in kernel_choice.available_kernels():
        kernel_choice.use_kernels(family)
        alone = np.concatenate([product(x[i : i + 1].copy(), weight) for i in range(23)])
        np.testing.assert_array_equal(alone, together)
        np.testing.assert_array_equal(product(x[order], weight), together[order])


@each_format
def test_non_finite_activations_affect_only_their_rows(format: Format, make_weight: Make, every_family: Every) -> None:
    """NaN and infinities affect only their own rows; zeros, subnormals and huge values are ordinary numbers."""
    rng = np.random.default_rng(format.ggml_type)
    weight = make_weight(format, 25, 512, rng)
    x = activations(rng, 21, 512)
    bad = {1: np.nan, 3: np.inf, 5: -np.inf}
    for row, value in bad.items():
        x[row, 300 + row] = value
    x[7] = 0
    x[8] *= np.float32(1e-42)
    x[9, :256] *= np.float32(1e-33)  # a block counts as zero below a threshold, and this is lower
    x[10] = 0
    x[10, 511] = 1.0
    x[11] *= np.float32(1e30)
    result = every_family(lambda: product(x, weight))
    finite = np.isfinite(result).all(axis=1)
    assert [i for i in range(len(x)) if not finite[i]] == list(bad)
    assert not np.isfinite(result[list(bad)]).any(), "rows with NaN must have no finite output"
    assert not result[7].any()
    if not format.is_float:
        np.testing.assert_array_equal(result, reference.matmul_q8k(x, weight))


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_extremes_do_not_overflow(format: Format, make_weight: Make, every_family: Every) -> None:
    """All integers are maximal, so that saturating byte instructions would give errors."""
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        weight = make_weight(format, 24, 768, np.random.default_rng(1), "ones")
        body = weight.data.reshape(-1, format.block_bytes)
        body[:] = fill
        if format in HALVES:
            halves = np.random.default_rng(3).standard_normal((len(body), len(HALVES[format])))
            write_halves(format, body, halves.astype(np.float32))
        for sign, columns in itertools.product((1, -1), (1, 2, 4, 8, 16, 20, 48)):  # few; half a tile, one, two, three
            x = np.full((max(columns, 4), 768), sign, np.float32)
            x[1, ::2] *= -1
            x[2, ::3] *= -1
            x[3, 256:] *= -1
            x[:, 512:] = activations(np.random.default_rng(2), len(x), 256)  # a block with ordinary sums
            x = x[:columns]
            result = every_family(lambda x=x, weight=weight: product(x, weight))
            np.testing.assert_array_equal(result, reference.matmul_q8k(x, weight))


@pytest.mark.parametrize("format", [Q4_K, Q5_K], ids=str)
def test_packed_scales_and_minima_are_unpacked_in_order(format: Format, every_family: Every) -> None:
    """One input, and one scale or minimum at a time, to check the unpacking of all eight of both from twelve bytes."""
    from notso.qtensor.reference.blocks import pack_scales

    block = np.zeros((16, format.block_bytes), np.uint8)
    block[:, 0:4] = np.array([1.0, 1.0], "<f2").view(np.uint8)
    block[:, 16:] = 0xFF  # all integers are maximal
    scales, mins = np.zeros((16, 8), np.int32), np.zeros((16, 8), np.int32)
    for j in range(8):
        scales[j, j] = 63 - j
        mins[8 + j, j] = 63 - j
    block[:, 4:16] = pack_scales(scales, mins)
    weight = QTensor("scales", format, (16, 256), block.reshape(-1))
    x = np.kron(np.eye(16, 8, dtype=np.float32), np.ones((1, 32), np.float32))
    result = every_family(lambda: product(x, weight))
    largest = 15 if format == Q4_K else 31
    expected = np.concatenate([largest * 32 * np.diag(63 - np.arange(8)), -32 * np.diag(63 - np.arange(8))])
    np.testing.assert_allclose(result[:8].T, expected, rtol=1e-6)


def test_matmul_many_equals_single_products(make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng(3)
    weights = [make_weight(f, 10 + 7 * i, 512, rng) for i, f in enumerate(FORMATS.values())]
    for columns in (1, 3, 6, 40):  # with three columns, AVX-512 uses tiles for some formats
        x = activations(rng, columns, 512)
        apart = [product(x, w) for w in weights]

        def together(x: npt.NDArray[np.float32] = x) -> npt.NDArray[np.float32]:
            outs = [np.full((len(x), w.rows), np.nan, np.float32) for w in weights]
            ops.matmul_many(x, list(zip(weights, outs, strict=True)))
            return np.concatenate([out.reshape(-1) for out in outs])

        np.testing.assert_array_equal(every_family(together), np.concatenate([a.reshape(-1) for a in apart]))
