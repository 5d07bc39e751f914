"""The NumPy reference operations, compared with manual calculations and with simpler code."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import BF16, F16, F32, FORMATS, Q2_K, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, Format
from notso.qtensor.reference import blocks, ops
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.reference.unpacked_blocks import UNPACK_32, UNPACK_256
from notso.qtensor.tensor import QTensor

QUANTIZED = [f for f in FORMATS.values() if not f.is_float]

# |matmul_q8k - matmul_dequantized| relative to |x| |w|, the error of 8-bit activations: measured 0.002, rounded up.
ACTIVATION_ERROR = 0.004


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# ---------------------------------------------------------------- fma


def nearest_float32(exact: Fraction) -> np.float32:
    """Round an exact value to float32 by comparing the neighbors of an approximation."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.uint32)) & 1))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(1)
    near = (2.0 ** -rng.integers(8, 23, 4000)).astype(np.float32)
    # for one half, a * b is close to half a unit in the last place of c; for the other half, c is arbitrary
    a = (2.0**-12 * (1 + near)).astype(np.float32)
    b = (2.0**-12 * (1 - near)).astype(np.float32)
    c = (1 + rng.integers(0, 1 << 22, 4000) / (1 << 23)).astype(np.float32)
    a[2000:] = rng.standard_normal(2000) * 10.0 ** rng.integers(-5, 5, 2000)
    c[1000:] *= rng.choice([-1, 1], 3000)
    got = ops.fma(a, b, c)
    exact = [Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)) for p, q, r in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, np.array([nearest_float32(e) for e in exact], np.float32))
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != got).any()  # the inputs are difficult enough for a difference


def test_fma_propagates_non_finite_values() -> None:
    got = ops.fma(floats(np.nan, np.inf, 3e38, 1.0), floats(1, 1, 3, 0), floats(0, 1, 0, -np.inf))
    assert np.isnan(got[0]) and got[1] == np.inf and got[2] == np.inf and got[3] == -np.inf


# ---------------------------------------------------------------- matmul


def random_weight(format: Format, rows: int, cols: int, seed: int) -> QTensor:
    rng = np.random.default_rng(seed)
    if format in UNPACK_32 or format in UNPACK_256:  # formats that can only be read
        packed = random_blocks(format, rows * cols // format.block_values, rng)
        return QTensor("w", format, (rows, cols), packed.reshape(-1))
    return QTensor.quantize((rng.standard_normal((rows, cols)) * 0.02).astype(np.float32), format, "w")


def random_input(rows: int, cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_matmul_q8k_is_near_the_dequantized_product(format: Format) -> None:
    x, weight = random_input(5, 1024, seed=2), random_weight(format, 70, 1024, seed=3)
    got, wanted = ops.matmul_q8k(x, weight), ops.matmul_dequantized(x, weight)
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight.dequantize(), axis=1)
    assert got.dtype == np.float32 and got.shape == (5, 70)
    assert (np.abs(got - wanted) / sizes).max() < ACTIVATION_ERROR
    assert np.corrcoef(got.ravel(), wanted.ravel())[0, 1] > 0.9999


def scalar_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return np.float32(ops.fma(np.array([a]), np.array([b]), np.array([c]))[0])


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_matmul_q8k_equals_scalar_loops(format: Format) -> None:
    """The same sums computed by scalar loops over one row, written from the block definitions only."""
    x, weight = random_input(1, 512, seed=4), random_weight(format, 3, 512, seed=5)
    dx, qx, bsums = (part[0] for part in blocks.quantize_q8k(x))
    fine_d, fine_q = (part[0] for part in blocks.quantize_q8x32(x))
    per_block = 256 // format.block_values
    for row in range(3):
        acc = np.float32(0)
        packed = weight.row_data(row, row + 1).reshape(-1, format.block_bytes)
        for b in range(2):
            ours = packed[b * per_block : (b + 1) * per_block]
            if format in (Q4_K, Q5_K):
                part = UNPACK_256[format](ours)
                total = sum(int(part.q[0, i]) * int(part.scales[0, i // 32]) * int(qx[b, i]) for i in range(256))
                minimum = sum(int(part.mins[0, i // 2]) * int(bsums[b, i]) for i in range(16))
                f = np.float32(total) * part.d[0]
                f = scalar_fma(-np.float32(minimum), part.dmin[0], f)
            elif format in UNPACK_256:
                large = UNPACK_256[format](ours)
                total = sum(int(large.q[0, i]) * int(large.scales[0, i // 16]) * int(qx[b, i]) for i in range(256))
                f = np.float32(total) * large.d[0]
                if format is Q2_K:
                    minimum = sum(int(large.mins[0, i]) * int(bsums[b, i]) for i in range(16))
                    f = scalar_fma(-np.float32(minimum), large.dmin[0], f)
            else:
                small = UNPACK_32[format](ours)
                f = np.float32(0)
                for j in range(8):
                    q, d = fine_q[8 * b + j], fine_d[8 * b + j]
                    total = sum(int(small.q[j, i]) * int(q[i]) for i in range(32))
                    f = scalar_fma(np.float32(total), small.d[j] * d, f)
                    if format in (Q4_1, Q5_1):
                        f = scalar_fma(np.float32(sum(int(each) for each in q)) * d, small.m[j], f)
            acc = acc + f if format.block_values == 32 else scalar_fma(f, dx[b], acc)
        assert acc == ops.matmul_q8k(x, weight)[0, row]


def test_matmul_q8k_is_exact_for_the_largest_integers() -> None:
    """All fields at their extremes: sums exceed 2^24, above which float32 does not represent every integer."""
    raw = np.full((1, 210), 0xFF, np.uint8)  # all values are 31
    raw[0, 192:208] = 0x80  # scale -128
    raw[0, 208:210] = [0, 0x3C]  # d = 1
    weight = QTensor("w", Q6_K, (1, 256), raw.reshape(-1))
    x = np.full((1, 256), 127.0, np.float32)
    assert ops.matmul_q8k(x, weight)[0, 0] == -128 * 31 * 127 * 256


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_matmul_q8k_does_not_depend_on_chunks_or_batch(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random_input(3, 256, seed=6), random_weight(format, 40, 256, seed=7)
    whole = ops.matmul_q8k(x, weight)
    monkeypatch.setattr(ops, "ROW_CHUNK", 7)
    np.testing.assert_array_equal(ops.matmul_q8k(x, weight), whole)
    np.testing.assert_array_equal(ops.matmul_q8k(x[1:2], weight), whole[1:2])


def test_matmul_q8k_confines_infinity_to_one_row() -> None:
    x, weight = random_input(3, 512, seed=8), random_weight(Q4_K, 5, 512, seed=9)
    x[1, 400] = np.inf
    got = ops.matmul_q8k(x, weight)
    assert np.isnan(got).all(axis=1).tolist() == [False, True, False] and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("format", [F32, F16, BF16], ids=str)
def test_matmul_of_float_formats_matches_float64(format: Format) -> None:
    x, weight = random_input(4, 100, seed=10), random_weight(format, 6, 100, seed=11)
    wanted = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    np.testing.assert_allclose(ops.matmul(x, weight), wanted, rtol=1e-6, atol=1e-7)
    with pytest.raises(OperandError):
        ops.matmul_q8k(x, weight)


def test_matmul_matches_manual_calculation() -> None:
    weight = QTensor.quantize(np.array([[1, 2], [3, 4], [5, 6]], np.float32), F32)
    assert ops.matmul(np.array([[1, 10]], np.float32), weight).tolist() == [[21, 43, 65]]


def test_matmul_rejects_invalid_inputs() -> None:
    weight = random_weight(Q8_0, 2, 256, seed=12)
    for bad in (np.zeros((1, 512), np.float32), np.zeros(256, np.float32), np.zeros((1, 256), np.float64)):
        with pytest.raises(OperandError):
            ops.matmul(bad, weight)
    with pytest.raises(OperandError, match="multiple of 256"):
        ops.matmul(np.zeros((1, 288), np.float32), random_weight(Q8_0, 2, 288, seed=13))


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=str)
def test_embedding_rows_equal_dequantized_rows(format: Format) -> None:
    weight = random_weight(format, 9, 256, seed=14)
    ids = np.array([8, 0, 0, 3])
    np.testing.assert_array_equal(ops.embedding_rows(weight, ids), weight.dequantize()[ids])
    for bad in ([9], [-1], [[0]]):
        with pytest.raises(OperandError):
            ops.embedding_rows(weight, np.array(bad))
    assert ops.embedding_rows(weight, np.array([], np.int64)).shape == (0, 256)


# ---------------------------------------------------------------- elementwise operations


def test_rms_norm_matches_manual_calculation() -> None:
    got = ops.rms_norm(np.array([[3, 4], [0, 0]], np.float32), floats(1, 2), eps=0.0 + 1e-6)
    root = math.sqrt(12.5 + 1e-6)
    np.testing.assert_allclose(got, [[3 / root, 8 / root], [0, 0]], rtol=1e-7)
    assert ops.rms_norm(floats(1e-3, 1e-3), floats(1, 1), eps=1e-6) == pytest.approx(
        1 / math.sqrt(2)
    )  # eps under the root


def test_silu_mul_matches_manual_calculation() -> None:
    got = ops.silu_mul(floats(0, 1, -200, 30), floats(5, 2, 7, 1))
    assert got.tolist() == pytest.approx([0, 2 / (1 + math.exp(-1)), 0, 30], rel=1e-6, abs=1e-30)


def test_add_and_argmax_match_manual_calculation() -> None:
    assert ops.add(floats(1, 2), floats(0.5, -2)).tolist() == [1.5, 0]
    assert ops.argmax(np.array([[1, 7, 7], [-3, -1, -2]], np.float32)).tolist() == [1, 1]
    with pytest.raises(OperandError):
        ops.argmax(np.zeros((2, 0), np.float32))
    with pytest.raises(OperandError):
        ops.add(floats(1), floats(1, 2))


def test_softmax_matches_manual_calculation() -> None:
    got = ops.softmax(np.array([[1000, 1000 + math.log(3)], [-np.inf, 0]], np.float32))
    np.testing.assert_allclose(got, [[0.25, 0.75], [0, 1]], atol=1e-5)


# ---------------------------------------------------------------- rotary positions


def test_inverse_frequencies_match_manual_calculation() -> None:
    assert ops.inverse_frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])


def test_rope_pairs_and_halves_match_manual_calculation() -> None:
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    frequencies, position = np.array([math.pi / 2, math.pi]), np.array([1])
    np.testing.assert_allclose(ops.rope(x, position, frequencies, "pairs"), [[[-2, 1, -3, -4]]], atol=1e-6)
    np.testing.assert_allclose(ops.rope(x, position, frequencies, "halves"), [[[-3, -2, 1, -4]]], atol=1e-6)
    np.testing.assert_array_equal(ops.rope(x, np.array([0]), frequencies), x)


def test_rope_layouts_differ_only_in_order() -> None:
    x = random_input(6, 2 * 16, seed=15).reshape(6, 2, 16)
    frequencies, positions = ops.inverse_frequencies(16, 1e4), np.arange(3, 9)
    order = np.arange(16).reshape(2, 8).T.reshape(-1)  # pair order of a row in halves order
    by_halves = ops.rope(x, positions, frequencies, "halves")[:, :, order]
    np.testing.assert_array_equal(by_halves, ops.rope(np.ascontiguousarray(x[:, :, order]), positions, frequencies))


def test_rope_scores_depend_on_distance_only() -> None:
    q, k = random_input(2, 32, seed=16).reshape(2, 1, 1, 32)
    frequencies = ops.inverse_frequencies(32, 5e6)

    def score(p: int, s: int) -> float:
        rotated = ops.rope(q, np.array([p]), frequencies), ops.rope(k, np.array([s]), frequencies)
        return float((rotated[0].astype(np.float64) * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-4)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


def test_yarn_frequencies_match_expected_values() -> None:
    """head 128, theta 5e6, factor 2 over 65,536: pairs up to 24 keep their frequency; from 39 on, it is halved."""
    plain = ops.inverse_frequencies(128, 5e6)
    got, scale = ops.yarn_frequencies(128, 5e6, 2.0, 65536)
    np.testing.assert_array_equal(got[:25], plain[:25])
    np.testing.assert_allclose(got[39:], plain[39:] / 2)
    ramp = (30 - 24) / 15
    assert got[30] == pytest.approx(plain[30] * (1 - ramp) + plain[30] / 2 * ramp)
    assert scale == pytest.approx(1.0693147)
    unscaled, one = ops.yarn_frequencies(128, 5e6, 1.0, 65536)
    np.testing.assert_allclose(unscaled, plain)
    assert one == 1.0


def test_rope_scale_multiplies_the_result() -> None:
    x = random_input(2, 8, seed=17).reshape(2, 1, 8)
    frequencies, positions = ops.inverse_frequencies(8, 1e4), np.array([5, 6])
    doubled = ops.rope(x, positions, frequencies, scale=2.0)
    np.testing.assert_allclose(doubled, 2 * ops.rope(x, positions, frequencies), rtol=1e-6)


# ---------------------------------------------------------------- attention


def test_attention_matches_manual_calculation() -> None:
    """Two query heads share a key head. The first row attends to one key, the second to two."""
    k = np.array([[[1, 0]], [[0, 1]], [[9, 9]]], np.float32)
    v = np.array([[[1, 2]], [[3, 4]], [[99, 99]]], np.float32)
    q = np.array([[[0, 0], [5, 5]], [[0, 0], [math.log(3), 0]]], np.float32)
    got = ops.attention(q, k, v, start=0, scale=1.0)
    np.testing.assert_allclose(got[0], [[1, 2], [1, 2]], rtol=1e-6)
    np.testing.assert_allclose(got[1], [[2, 3], [0.75 * 1 + 0.25 * 3, 0.75 * 2 + 0.25 * 4]], rtol=1e-6)


def test_attention_uses_default_scale_and_grouped_heads() -> None:
    rng = np.random.default_rng(18)
    q = rng.standard_normal((1, 8, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 5, 2, 16)).astype(np.float32)
    got = ops.attention(q, k, v, start=4)
    for head in range(8):
        scores = k[:, head // 4] @ q[0, head] / 4
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(got[0, head], weights @ v[:, head // 4], rtol=1e-4, atol=1e-6)


def test_attention_row_by_row_equals_full_attention() -> None:
    rng = np.random.default_rng(19)
    q = rng.standard_normal((6, 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 6, 2, 8)).astype(np.float32)
    whole = ops.attention(q, k, v, start=0)
    rows = [ops.attention(q[i : i + 1], k[: i + 1], v[: i + 1], start=i) for i in range(6)]
    np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_attention_rejects_invalid_shapes() -> None:
    q, k = np.zeros((2, 4, 8), np.float32), np.zeros((5, 2, 8), np.float32)
    for start in (-1, 4):
        with pytest.raises(OperandError):
            ops.attention(q, k, k, start)
    with pytest.raises(OperandError):
        ops.attention(q, np.zeros((5, 3, 8), np.float32), np.zeros((5, 3, 8), np.float32), 0)
    with pytest.raises(OperandError):
        ops.attention(q, k, k[:4], 0)
