"""Block layouts are compared with the `gguf` package and with hand-made blocks, and survive a round trip."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import BF16, F16, F32, FORMATS, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, Format
from notso.qtensor.reference import blocks
from notso.qtensor.reference.random_blocks import HALVES, write_halves
from notso.qtensor.reference.unpacked_blocks import UNPACK_256, grid

ALL = list(FORMATS.values())

# Root mean square error of quantizing normally distributed values, relative to their own; measured and rounded up. An
# incorrect layout gives 0.3 or more.
ROUNDTRIP_ERROR = {
    F32: 0.0,
    F16: 3e-4,
    BF16: 2e-3,
    Q4_0: 0.095,
    Q4_1: 0.085,
    Q8_0: 0.006,
    Q4_K: 0.075,
    Q5_K: 0.038,
    Q6_K: 0.02,
}
MADE = list(ROUNDTRIP_ERROR)
QUANTIZED = [f for f in MADE if not f.is_float]
ONLY_READ = [f for f in ALL if f not in MADE]


def random_blocks(format: Format, count: int, seed: int) -> np.ndarray:
    """Return random blocks with finite scales, including subnormal, tiny, huge and negative ones."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, format.block_bytes), np.uint8)
    if format is F32:
        return (
            (rng.standard_normal((count, 1)) * 10.0 ** rng.integers(-30, 30, (count, 1))).astype("<f4").view(np.uint8)
        )
    if format in (F16, BF16):
        raw[:, :2] = _scales(rng, count)[:, None].astype("<f2").view(np.uint8)
    if format.name == "MXFP4":
        raw[:, 0] = np.minimum(raw[:, 0], 200)
    if format in HALVES:
        write_halves(format, raw, np.stack([_scales(rng, count) for _ in HALVES[format]], axis=1))
    return raw


def _scales(rng: np.random.Generator, count: int) -> np.ndarray:
    scales = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 4, count)
    return np.clip(scales, -60000, 60000).astype(np.float32)


@pytest.mark.parametrize("format", ALL, ids=str)
def test_dequantize_equals_the_gguf_package(format: Format) -> None:
    raw = random_blocks(format, 4 * 300, seed=format.ggml_type).reshape(4, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(format.ggml_type))
    got = blocks.dequantize(format, raw)
    assert got.dtype == np.float32 and got.shape == (4, 300 * format.block_values)
    assert np.count_nonzero(got) > got.size // 2
    np.testing.assert_array_equal(got, expected)


def test_q4_k_dequantizes_a_hand_made_block() -> None:
    raw = np.zeros(144, np.uint8)
    raw[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    raw[2:4] = np.frombuffer(np.float16(0.25).tobytes(), np.uint8)
    scales = raw[4:16]
    scales[1] = 63 | 2 << 6  # scale 1 = 63; adds 32 to scale 5
    scales[5] = 17 | 3 << 6  # min 1 = 17; adds 48 to min 5
    scales[9] = 7 | 9 << 4  # low nibbles of scale 5 and min 5
    raw[16 + 0] = 0xA0  # value 32: high nibble 10, sub-block 1
    raw[16 + 64 + 3] = 0xB0  # value 128 + 32 + 3: high nibble 11, sub-block 5
    numbers = blocks.dequantize(Q4_K, raw)
    assert numbers[32] == 0.5 * 63 * 10 - 0.25 * 17
    assert numbers[33] == -0.25 * 17
    assert numbers[163] == 0.5 * 39 * 11 - 0.25 * 57
    assert numbers[0] == 0


def test_q6_k_dequantizes_a_hand_made_block() -> None:
    raw = np.zeros(210, np.uint8)
    raw[208:210] = np.frombuffer(np.float16(2.0).tobytes(), np.uint8)
    raw[192:208] = np.arange(16, dtype=np.int8).view(np.uint8) * 3
    raw[64 + 32 + 5] = 0xC0  # second half, third quarter, l = 5: low nibble 12, from the high nibble
    raw[128 + 32 + 5] = 0x40  # ... and upper bits 1 at position 6
    numbers = blocks.dequantize(Q6_K, raw)
    assert numbers[128 + 96 + 5] == 2.0 * (3 * 14) * (12 + 16 - 32)


@pytest.mark.parametrize("format", ONLY_READ, ids=str)
def test_quantizing_to_read_only_formats_is_rejected(format: Format) -> None:
    with pytest.raises(OperandError, match=f"quantizing to {format.name} is not supported"):
        blocks.quantize(format, np.zeros((1, 256), np.float32))


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ3_XXS", "IQ3_S"])
def test_grids_match_the_gguf_package(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(grid(name), theirs.grid.reshape(theirs.grid_shape))


@pytest.mark.parametrize("format", MADE, ids=str)
def test_quantize_round_trip_error_is_bounded(format: Format) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((7, 1024)) * 0.02 * 4.0 ** rng.integers(-3, 4, (7, 1))).astype(np.float32)
    raw = blocks.quantize(format, x)
    assert raw.dtype == np.uint8 and raw.shape == (7, 1024 // format.block_values * format.block_bytes)
    error = np.sqrt(np.square(blocks.dequantize(format, raw) - x).mean(axis=1) / np.square(x).mean(axis=1))
    assert error.max() <= ROUNDTRIP_ERROR[format]


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_quantize_handles_constant_tiny_and_sparse_rows(format: Format) -> None:
    rows = np.zeros((7, 256), np.float32)
    rows[1] = 1.0
    rows[2] = -3.0
    rows[3, 17] = -5.0  # a single value
    rows[4] = 1e-9  # below the range of a float16 scale: becomes zero, not NaN
    rows[5] = np.linspace(0.5, 1.5, 256)
    rows[6] = 1e-38
    got = blocks.dequantize(format, blocks.quantize(format, rows))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_allclose(got[[1, 2, 5]], rows[[1, 2, 5]], rtol=0.16)
    assert got[3, 17] == pytest.approx(-5.0, rel=0.02)
    np.testing.assert_allclose(got[[4, 6]], 0, atol=2e-8)


@pytest.mark.parametrize("format", [Q4_0, Q4_1, Q8_0], ids=str)
def test_quantize_is_as_good_as_the_gguf_package(format: Format) -> None:
    x = np.random.default_rng(2).standard_normal((20, 256)).astype(np.float32)
    theirs = blocks.dequantize(format, gguf.quants.quantize(x, gguf.GGMLQuantizationType(format.ggml_type)))
    ours = blocks.dequantize(format, blocks.quantize(format, x))
    assert np.square(ours - x).mean() <= 1.01 * np.square(theirs - x).mean()


def test_bf16_rounding_matches_the_gguf_package() -> None:
    x = np.random.default_rng(3).standard_normal((2, 4096)).astype(np.float32)
    x[0, :3] = [1.00390625, 1.01171875, -0.0]  # two ties and a negative zero
    np.testing.assert_array_equal(blocks.quantize(BF16, x), gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16))


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_row_quantizes_the_same_alone_and_in_a_batch(format: Format) -> None:
    x = np.random.default_rng(4).standard_normal((2, blocks.CHUNK_VALUES + 512)).astype(np.float32)
    together = blocks.quantize(format, x)
    np.testing.assert_array_equal(together[1], blocks.quantize(format, x[1]))
    np.testing.assert_array_equal(blocks.dequantize(format, together)[1], blocks.dequantize(format, together[1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", MADE, ids=str)
def test_quantize_rejects_nan_and_infinity(format: Format, bad: float) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 200] = bad
    with pytest.raises(OperandError, match="NaN or infinity"):
        blocks.quantize(format, x)


@pytest.mark.parametrize("format", [F16, BF16, *QUANTIZED], ids=str)
def test_quantize_rejects_too_large_values(format: Format) -> None:
    x = np.full((1, 256), 3.4e38, np.float32)
    x[0, ::2] *= -1
    with pytest.raises(OperandError, match="too large"):
        blocks.quantize(format, x)


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_partial_blocks_are_rejected(format: Format) -> None:
    with pytest.raises(OperandError):
        blocks.quantize(format, np.zeros((2, format.block_values + 1), np.float32))
    with pytest.raises(OperandError):
        blocks.dequantize(format, np.zeros(format.block_bytes - 1, np.uint8))
    with pytest.raises(OperandError):
        blocks.dequantize(format, np.zeros(format.block_bytes, np.int8))


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_scales_of_reveals_an_infinite_scale(format: Format) -> None:
    raw = random_blocks(format, 50, seed=5)
    assert np.isfinite(blocks.scales_of(format, raw)).all()
    start = 208 if format is Q6_K else 0
    raw[31, start : start + 2] = [0, 0x7C]  # infinity
    assert np.flatnonzero(~np.isfinite(blocks.scales_of(format, raw)).all(axis=1)).tolist() == [31]


def test_dequantize_keeps_leading_dimensions_and_empty_arrays() -> None:
    raw = random_blocks(Q8_0, 12, seed=6).reshape(2, 3, 68)
    assert blocks.dequantize(Q8_0, raw).shape == (2, 3, 64)
    assert blocks.dequantize(Q8_0, raw[:0]).shape == (0, 3, 64)
    assert blocks.dequantize(F32, np.zeros((3, 0), np.uint8)).shape == (3, 0)


# ---------------------------------------------------------------- activations


def test_q8k_quantizes_hand_made_values() -> None:
    x = np.zeros((1, 512), np.float32)
    x[0, :4] = [127.0, -63.5, 2.5, 3.5]  # 2.5 and 3.5 are ties and are rounded to even
    x[0, 256:258] = [1e-31, -1e-31]  # a block too small for a scale
    d, q, bsums = blocks.quantize_q8k(x)
    assert d.tolist() == [[1.0, 0.0]]
    assert q[0, 0, :5].tolist() == [127, -64, 2, 4, 0]
    assert not q[0, 1].any()
    assert bsums[0, 0].tolist() == [127 - 64 + 2 + 4] + [0] * 15


def test_q8k_range_sums_and_error_are_correct() -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((9, 768)) * 10.0 ** rng.integers(-20, 20, (9, 1))).astype(np.float32)
    d, q, bsums = blocks.quantize_q8k(x)
    assert (d.dtype, q.dtype, bsums.dtype) == (np.float32, np.int8, np.int16)
    assert np.abs(q.astype(int)).max(axis=2).min() == 127 and q.min() >= -127
    np.testing.assert_array_equal(bsums, q.astype(int).reshape(9, 3, 16, 16).sum(axis=3))
    error = np.abs(d[:, :, None].astype(np.float64) * q - x.reshape(9, 3, 256))
    assert (error <= 0.5001 * d[:, :, None]).all()


def test_q8k_marks_non_finite_blocks_with_nan() -> None:
    x = np.ones((3, 512), np.float32)
    x[0, 3], x[1, 300], x[2, 511] = np.nan, np.inf, -np.inf
    d, q, bsums = blocks.quantize_q8k(x)
    assert np.isnan(d).tolist() == [[True, False], [False, True], [False, True]]
    assert not q[np.isnan(d)].any() and not bsums[np.isnan(d)].any()
    assert q[0, 1].tolist() == [127] * 256


def test_q8x32_equals_q8k_of_smaller_blocks() -> None:
    x = (np.random.default_rng(9).standard_normal((3, 512)) * np.geomspace(1e-3, 1e3, 512)).astype(np.float32)
    x[0, :32], x[1, 40], x[2, 100] = 1e-31, np.nan, np.inf
    d, q = blocks.quantize_q8x32(x)
    assert (d.shape, d.dtype, q.shape, q.dtype) == ((3, 16), np.float32, (3, 16, 32), np.int8)
    assert np.argwhere(np.isnan(d)).tolist() == [[1, 1], [2, 3]] and d[0, 0] == 0 and not q[0, 0].any()
    for block in range(16):  # each block alone among zeros
        alone = np.zeros((3, 256), np.float32)
        alone[:, :32] = x[:, 32 * block : 32 * block + 32]
        wide = blocks.quantize_q8k(alone)
        np.testing.assert_array_equal(d[:, block], wide.d[:, 0])
        np.testing.assert_array_equal(q[:, block], wide.q[:, 0, :32])


@pytest.mark.parametrize("shape", [(256,), (2, 255), (1, 2, 256)])
def test_quantize_q8k_and_q8x32_reject_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(OperandError):
        blocks.quantize_q8k(np.zeros(shape, np.float32))
    with pytest.raises(OperandError):
        blocks.quantize_q8k(np.zeros((1, 256), np.float64))
    with pytest.raises(OperandError):
        blocks.quantize_q8x32(np.zeros(shape, np.float32))


@pytest.mark.parametrize("format", [Q4_K, Q5_K], ids=str)
def test_super_block_scales_survive_packing(format: Format) -> None:
    """Every combination of the six-bit fields' bits is preserved, whatever the neighboring fields contain."""
    rng = np.random.default_rng(8)
    scales, mins = rng.integers(0, 64, (2, 500, 8))
    raw = random_blocks(format, 500, seed=9)
    raw[:, 4:16] = blocks.pack_scales(scales, mins)
    unpacked = UNPACK_256[format](raw)
    np.testing.assert_array_equal(unpacked.scales, scales)
    np.testing.assert_array_equal(unpacked.mins, mins)
