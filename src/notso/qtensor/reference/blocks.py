"""Reference implementation of the block formats.

`dequantize` computes float32 values with one rounding per operation, and `quantize` creates blocks. Arrays of blocks
are (n, block_bytes) uint8; fields are little-endian; d (a scale), dmin (the scale of the minima) and m (a minimum) are
float16 in the file and float32 here. Layouts: ggml's `ggml-common.h` and `ggml-quants.c`.

A super-block consists of groups of values; each group has an integer scale. Quantization searches for scales that
minimize sum(w * (dequantized - x)^2), where w is the importance of each value. For each group, it tries several scales
near the one that maps the largest value to the largest integer, fits each of them to the resulting integers by least
squares, and keeps the best. It then fits the minima to the rounded scales. Finally, it fits d and dmin of each
super-block to all integers of the super-block.

The search uses arrays of shape (values per group, groups), in which each group is a column. Sums over a group
are thus evaluated in a fixed order, which does not depend on other groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import BF16, F16, F32, MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, Format, row_bytes
from notso.qtensor.reference.unpacked_blocks import (
    UNPACK_32,
    UNPACK_256,
    dequantize_blocks,
    read_half,
)

# The search maps a group's largest value to the largest integer plus each of STRETCHES. With signed integers, it maps
# the value of largest magnitude to -32 plus each of SIGNED_STRETCHES.
STRETCHES = np.linspace(-1.0, 1.0, 9)
SIGNED_STRETCHES = np.linspace(-1.0, 3.0, 13)


def round_to_half(x: Floats) -> Floats:
    """Return `x` rounded to float16, as float32."""
    return x.astype(np.float16).astype(np.float32)


def _reciprocal(x: Floats) -> Floats:
    # Returns 1 / x, or zero where x is zero or too small for a finite reciprocal.
    usable = np.abs(x) > np.float32(1e-37)
    return np.where(usable, 1 / np.where(usable, x, np.float32(1)), np.float32(0)).astype(np.float32)


def quantize_symmetric(scale: Floats, x: Floats, low: int, high: int) -> tuple[Floats, Integers]:
    """Return float16-rounded scales (n,) and q = x / scale, rounded and clipped to low..high."""
    d = round_to_half(scale)
    return d, np.clip(np.rint(x * _reciprocal(d)[:, None]), low, high).astype(np.int32)


def _columns(x: Floats, group: int) -> Floats:
    return np.ascontiguousarray(x.reshape(-1, group).T)


def _fit_with_minimum(x: Floats, w: Floats, top: int) -> tuple[Floats, Floats]:
    # Fits scale and minimum (n,), both >= 0, so that scale * q - minimum approximates x, with integers q in 0..top. x
    # and w have shape (32, n).
    low = np.minimum(x.min(axis=0), np.float32(0))
    y = x - low  # nonnegative, which limits cancellation in the differences below
    spread = y.max(axis=0)
    sum_w, wy = w.sum(axis=0), w * y
    sum_y = wy.sum(axis=0)
    best_scale, best_minimum = spread / np.float32(top), -low
    best_error = np.full(x.shape[1], np.inf, np.float32)
    for stretch in STRETCHES:
        inverse = np.float32(top + stretch) * _reciprocal(spread)
        q = np.clip(np.rint(y * inverse), 0, top)
        wq = w * q
        sum_q, sum_qq, sum_qy = wq.sum(axis=0), (wq * q).sum(axis=0), (wy * q).sum(axis=0)
        scale = (sum_w * sum_qy - sum_q * sum_y) * _reciprocal(sum_w * sum_qq - sum_q * sum_q)
        lowered = (scale * sum_q - sum_y) * _reciprocal(sum_w)  # minimum of y
        through_zero = lowered < low  # the stored minimum cannot be negative: keep it at zero and fit only the scale
        scale = np.maximum(np.where(through_zero, (sum_qy + low * sum_q) * _reciprocal(sum_qq), scale), 0)
        lowered = np.where(through_zero, low, lowered)
        error = scale * (scale * sum_qq - 2 * (lowered * sum_q + sum_qy)) + lowered * (lowered * sum_w + 2 * sum_y)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, lowered - low, best_minimum)
    return best_scale.astype(np.float32), best_minimum.astype(np.float32)


def quantize_super_blocks(x: Floats, w: Floats, top: int) -> tuple[Floats, Floats, Integers, Integers, Integers]:
    """Return d, dmin (n,), scales, mins (n, 8) in 0..63, q (n, 256) in 0..top for x, w (n, 256)."""
    columns, weights = _columns(x, 32), _columns(w, 32)
    scale, minimum = (part.reshape(-1, 8) for part in _fit_with_minimum(columns, weights, top))
    d, scales = quantize_symmetric(scale.max(axis=1) / np.float32(63), scale, 0, 63)
    # Fit the minimum again, to compensate in part for the rounding of the scale.
    stored = (d[:, None] * scales.astype(np.float32)).reshape(-1)
    q = np.clip(np.rint((columns + minimum.reshape(-1)) * _reciprocal(stored)), 0, top)
    fitted = (weights * (stored * q - columns)).sum(axis=0) * _reciprocal(weights.sum(axis=0))
    minimum = np.where(stored > 0, np.maximum(fitted, 0), minimum.reshape(-1)).astype(np.float32).reshape(-1, 8)
    dmin, mins = quantize_symmetric(minimum.max(axis=1) / np.float32(63), minimum, 0, 63)
    q = _quantized_values(columns, d, dmin, scales, mins, top)
    d, dmin = _refit_scales(columns, weights, d, dmin, scales, mins, q)
    q = _quantized_values(columns, d, dmin, scales, mins, top)
    return d, dmin, scales, mins, q.T.astype(np.int32).reshape(len(x), 256)


def _quantized_values(x: Floats, d: Floats, dmin: Floats, scales: Integers, mins: Integers, top: int) -> Floats:
    stored = (d[:, None] * scales.astype(np.float32)).reshape(-1)
    minimum = (dmin[:, None] * mins.astype(np.float32)).reshape(-1)
    q: Floats = np.clip(np.rint((x + minimum) * _reciprocal(stored)), 0, top)
    return q


def _refit_scales(
    x: Floats, w: Floats, d: Floats, dmin: Floats, scales: Integers, mins: Integers, q: Floats
) -> tuple[Floats, Floats]:
    # Fits d and dmin of each super-block by least squares in double precision; the integers are fixed. The results are
    # used only if both are positive and less than twice the old values.
    s, m = scales.astype(np.float64), mins.astype(np.float64)
    wq, wx = w * q, w * x

    def by_block(sums: Floats) -> npt.NDArray[np.float64]:
        return sums.astype(np.float64).reshape(-1, 8)

    ss = (s * s * by_block((wq * q).sum(axis=0))).sum(axis=1)
    sm = (s * m * by_block(wq.sum(axis=0))).sum(axis=1)
    mm = (m * m * by_block(w.sum(axis=0))).sum(axis=1)
    sx = (s * by_block((wq * x).sum(axis=0))).sum(axis=1)
    mx = (m * by_block(wx.sum(axis=0))).sum(axis=1)
    determinant = ss * mm - sm * sm
    solvable = determinant > 1e-9 * ss * mm
    safe = np.where(solvable, determinant, 1)
    fitted_d, fitted_dmin = (sx * mm - sm * mx) / safe, (sm * sx - ss * mx) / safe
    # If all minima are zero, d is the only unknown.
    only_d = ~solvable & (mm == 0) & (ss > 0)
    fitted_d = np.where(only_d, sx / np.where(only_d, ss, 1), fitted_d)
    usable = (fitted_d > 0) & (fitted_d < 2 * d) & (only_d | (solvable & (fitted_dmin > 0) & (fitted_dmin < 2 * dmin)))
    return (
        np.where(usable, round_to_half(np.where(usable, fitted_d, 0).astype(np.float32)), d),
        np.where(usable & ~only_d, round_to_half(np.where(usable & ~only_d, fitted_dmin, 0).astype(np.float32)), dmin),
    )


def quantize_signed_super_blocks(x: Floats, w: Floats) -> tuple[Floats, Integers, Integers]:
    """Return d (n,), scales (n, 16) in -128..127, q (n, 256) in -32..31 for x, w (n, 256)."""
    groups, weights = _columns(x, 16), _columns(w, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=0)[None], axis=0)[0]
    wx = weights * groups
    best_scale = np.zeros(groups.shape[1], np.float32)
    best_gain = np.full(groups.shape[1], -np.inf, np.float32)
    for stretch in SIGNED_STRETCHES:
        inverse = np.float32(-32 + stretch) * _reciprocal(extreme)
        q = np.clip(np.rint(groups * inverse), -32, 31)
        sum_qx = (q * wx).sum(axis=0)
        scale = sum_qx * _reciprocal((weights * q * q).sum(axis=0))
        gain = sum_qx * scale  # reduction of the error, compared with a scale of zero
        better = gain > best_gain
        best_gain, best_scale = np.where(better, gain, best_gain), np.where(better, scale, best_scale)
    scale = best_scale.reshape(-1, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)[:, 0]
    d, scales = quantize_symmetric(largest / np.float32(-128), scale, -128, 127)
    q = _signed_quantized_values(groups, d, scales)
    steps = scales.astype(np.float64)
    qx = (steps * (q * wx).sum(axis=0).astype(np.float64).reshape(-1, 16)).sum(axis=1)
    qq = (steps * steps * (weights * q * q).sum(axis=0).astype(np.float64).reshape(-1, 16)).sum(axis=1)
    fitted = qx / np.where(qq > 0, qq, 1)
    usable = (qq > 0) & (np.abs(fitted) < 2 * np.abs(d)) & (np.sign(fitted) == np.sign(d))
    d = np.where(usable, round_to_half(np.where(usable, fitted, 0).astype(np.float32)), d)
    return d, scales, _signed_quantized_values(groups, d, scales).T.astype(np.int32).reshape(len(x), 256)


def _signed_quantized_values(x: Floats, d: Floats, scales: Integers) -> Floats:
    stored = (d[:, None] * scales.astype(np.float32)).reshape(-1)
    q: Floats = np.clip(np.rint(x * _reciprocal(stored)), -32, 31)
    return q


Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[Any]

MAX_HALF = 65504.0
LARGEST = {F32: 3.4028235e38, BF16: 3.3895314e38}  # largest storable value; MAX_HALF for all other formats
CHUNK_VALUES = 1 << 20  # values per chunk; bounds the size of temporary arrays


class Q8KBlocks(NamedTuple):
    """Activations in blocks of 256: value = d * q."""

    d: Floats  # (M, K / 256); NaN if the block contained NaN or infinity
    q: npt.NDArray[np.int8]  # (M, K / 256, 256), -127..127
    bsums: npt.NDArray[np.int16]  # (M, K / 256, 16): sums of 16 adjacent q


class Q8x32Blocks(NamedTuple):
    """Activations in blocks of 32."""

    d: Floats  # (M, K / 32); NaN if the block contained NaN or infinity
    q: npt.NDArray[np.int8]  # (M, K / 32, 32), -127..127


def _dequantize_bf16(b: Bytes) -> Floats:
    upper = np.ascontiguousarray(b).view("<u2")[:, 0].astype(np.uint32) << 16
    return upper.view(np.float32)


_NUMBERS: dict[Format, Callable[[Bytes], Floats]] = {
    F32: lambda b: np.ascontiguousarray(b).view("<f4").astype(np.float32),
    F16: lambda b: read_half(b, 0),
    BF16: _dequantize_bf16,
}


def _dequantize_blocks(format: Format, b: Bytes) -> Floats:
    return _NUMBERS[format](b) if format in _NUMBERS else dequantize_blocks(format, b)


def split_blocks(format: Format, rows: Bytes) -> Bytes:
    """Reshape rows to (n, block_bytes). Raises OperandError for incomplete blocks."""
    if rows.dtype != np.uint8 or rows.ndim < 1 or rows.shape[-1] % format.block_bytes:
        raise OperandError(f"{rows.dtype} {rows.shape} does not consist of whole {format.name} blocks")
    return rows.reshape(-1, format.block_bytes)


def dequantize(format: Format, rows: Bytes) -> Floats:
    """Dequantize (..., row_bytes) uint8 to (..., cols) float32. Raises OperandError for incomplete blocks."""
    # Invalid scales (NaN, infinity) propagate to the values.
    blocks = split_blocks(format, rows)
    out = np.empty((len(blocks), format.block_values), np.float32)
    step = CHUNK_VALUES // format.block_values
    with np.errstate(all="ignore"):
        for i in range(0, len(blocks), step):
            out[i : i + step] = _dequantize_blocks(format, blocks[i : i + step]).reshape(-1, format.block_values)
    return out.reshape(*rows.shape[:-1], rows.shape[-1] // format.block_bytes * format.block_values)


def half_bytes(values: Floats) -> Bytes:
    """Return (n, 2) bytes of half-precision numbers."""
    return values.astype("<f2")[:, None].view(np.uint8)


def pack_scales(scales: Integers, mins: Integers) -> Bytes:
    """Pack (n, 8) scales and mins into the 12 bytes of Q4_K and Q5_K (see unpacked_blocks.py)."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    third = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1).astype(np.uint8)


def _pack_nibbles(q: Integers, width: int) -> Bytes:
    runs = q.reshape(len(q), -1, 2, width)
    packed: Bytes = (runs[:, :, 0] | runs[:, :, 1] << 4).astype(np.uint8)
    return packed.reshape(len(q), -1)


def _pack_q4_k(x: Floats, w: Floats) -> Bytes:
    d, dmin, scales, mins, q = quantize_super_blocks(x, w, 15)
    return np.concatenate([half_bytes(d), half_bytes(dmin), pack_scales(scales, mins), _pack_nibbles(q, 32)], axis=1)


def _pack_q5_k(x: Floats, w: Floats) -> Bytes:
    d, dmin, scales, mins, q = quantize_super_blocks(x, w, 31)
    fifth = (q.reshape(-1, 8, 32) >> 4 << np.arange(8)[:, None]).sum(axis=1).astype(np.uint8)
    head = [half_bytes(d), half_bytes(dmin), pack_scales(scales, mins)]
    return np.concatenate([*head, fifth, _pack_nibbles(q & 15, 32)], axis=1)


def _pack_q6_k(x: Floats, w: Floats) -> Bytes:
    d, scales, q = quantize_signed_super_blocks(x, w)
    raised = q + 32
    high = (raised.reshape(-1, 2, 4, 32) >> 4 << 2 * np.arange(4)[:, None]).sum(axis=2).reshape(-1, 64)
    scale_bytes = scales.astype(np.int8).view(np.uint8)
    return np.concatenate([_pack_nibbles(raised & 15, 64), high.astype(np.uint8), scale_bytes, half_bytes(d)], axis=1)


def _pack_q8_0(x: Floats) -> Bytes:
    d, q = quantize_symmetric(np.abs(x).max(axis=1) / np.float32(127), x, -127, 127)
    return np.concatenate([half_bytes(d), q.astype(np.int8).view(np.uint8)], axis=1)


def _pack_q4_0(x: Floats) -> Bytes:
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)[:, 0]
    # The value of largest magnitude becomes -8, because there is no +8.
    d, q = quantize_symmetric(extreme / np.float32(-8), x, -8, 7)
    return np.concatenate([half_bytes(d), _pack_nibbles(q + 8, 16)], axis=1)


def _pack_q4_1(x: Floats) -> Bytes:
    low = round_to_half(x.min(axis=1))
    d, q = quantize_symmetric((x.max(axis=1) - low) / np.float32(15), x - low[:, None], 0, 15)
    return np.concatenate([half_bytes(d), half_bytes(low), _pack_nibbles(q, 16)], axis=1)


def _pack_bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1) >> 16  # round half to even
    return nearest.astype("<u2").view(np.uint8)


_BYTES: dict[Format, Callable[[Floats], Bytes]] = {
    F32: lambda x: x.astype("<f4").view(np.uint8),
    F16: lambda x: x.astype("<f2").view(np.uint8),
    BF16: _pack_bf16,
    Q4_0: _pack_q4_0,
    Q4_1: _pack_q4_1,
    Q8_0: _pack_q8_0,
}
_SEARCHED: dict[Format, Callable[[Floats, Floats], Bytes]] = {Q4_K: _pack_q4_k, Q5_K: _pack_q5_k, Q6_K: _pack_q6_k}
SEARCHED_VALUES = 1 << 17  # values per chunk of a search, so that a chunk stays in the CPU cache
# Minimum importance relative to the mean. A weight that is unimportant in the text from which the importance was
# computed may matter in other texts.
LEAST_IMPORTANCE = np.float32(1e-3)


def quantize(
    format: Format, values: npt.NDArray[np.float32], importance: npt.NDArray[np.float32] | None = None
) -> Bytes:
    """Quantize (..., cols) float32 to (..., row_bytes) uint8, minimizing errors weighted by `importance` (cols,).

    Raises OperandError for formats that can only be read, incomplete blocks, invalid importance, NaN, infinity, or
    values out of the format's range.
    """
    # Simple formats round to nearest. Only super-block formats search for scales and use `importance`.
    if format not in _BYTES and format not in _SEARCHED:
        raise OperandError(f"quantizing to {format.name} is not supported")
    x = np.ascontiguousarray(values, np.float32)
    bytes_per_row = row_bytes(format, x.shape[-1] if x.ndim else 0)
    if not np.isfinite(x).all():
        raise OperandError(f"NaN or infinity cannot be stored as {format.name}")
    largest = np.abs(x).max(initial=0)
    if largest > LARGEST.get(format, MAX_HALF):
        raise OperandError(f"values up to {largest:.3g} are too large for {format.name}")
    flat = x.reshape(-1, format.block_values)
    out = np.empty((len(flat), format.block_bytes), np.uint8)
    if format in _SEARCHED:
        weights = _importance_weights(importance, x.shape[-1]).reshape(-1, format.block_values)
        step = SEARCHED_VALUES // format.block_values
        for i in range(0, len(flat), step):
            part = flat[i : i + step]
            columns = np.arange(i, i + len(part)) % len(weights)
            out[i : i + step] = _SEARCHED[format](part, weights[columns])
    else:
        step = CHUNK_VALUES // format.block_values
        for i in range(0, len(flat), step):
            out[i : i + step] = _BYTES[format](flat[i : i + step])
    return out.reshape(*x.shape[:-1], bytes_per_row)


def _importance_weights(importance: npt.NDArray[np.float32] | None, columns: int) -> Floats:
    if importance is None:
        return np.ones(columns, np.float32)
    if importance.shape != (columns,) or not np.isfinite(importance).all() or importance.min() < 0:
        raise OperandError(f"importance must have {columns} finite, nonnegative values")
    mean = np.float32(importance.mean(dtype=np.float64))
    if mean <= 0:
        return np.ones(columns, np.float32)
    weights: Floats = np.maximum(importance.astype(np.float32) / mean, LEAST_IMPORTANCE)
    return weights


_SCALE_FIELDS: dict[Format, tuple[int, ...]] = {
    F16: (0,), Q4_0: (0,), Q4_1: (0, 2), Q8_0: (0,), Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,),
}  # fmt: skip


def scales_of(format: Format, rows: Bytes) -> Floats:
    """Return scales and minima, or the values of a float format, as (n, 1 or 2) float32. Raises OperandError."""
    # If all returned numbers are finite, every value of the tensor is finite. In MXFP4, a value can overflow although
    # its scale is finite, so each scale is returned multiplied by the largest magnitude in its block.
    blocks = split_blocks(format, rows)
    if format in _SCALE_FIELDS:
        return np.stack([read_half(blocks, start) for start in _SCALE_FIELDS[format]], axis=1)
    if format in UNPACK_32:
        small = UNPACK_32[format](blocks)
        if format == MXFP4:
            with np.errstate(over="ignore"):
                largest: Floats = small.d * np.abs(small.q).max(axis=1).astype(np.float32)
            return largest[:, None]
        return np.stack([small.d, small.m], axis=1)
    if format in UNPACK_256:
        large = UNPACK_256[format](blocks)
        return np.stack([large.d, large.dmin], axis=1)
    return _NUMBERS[format](blocks).reshape(-1, 1)


def quantize_q8k(x: npt.NDArray[np.float32]) -> Q8KBlocks:
    """Quantize activations (M, K) float32 in blocks of 256. Raises OperandError for incomplete blocks."""
    # d = max|x| / 127, q = x * (127 / max|x|) rounded half to even, in float32. A block with max|x| < 1e-30 becomes
    # zero; a block with NaN or infinity has d = NaN and q = 0, so that its products are NaN.
    d, q = _quantize_activations(x, 256)
    return Q8KBlocks(d, q, q.reshape(len(x), -1, 16, 16).sum(axis=3, dtype=np.int16))


def quantize_q8x32(x: npt.NDArray[np.float32]) -> Q8x32Blocks:
    """Quantize activations (M, K) float32 in blocks of 32. Raises OperandError for incomplete blocks."""
    return Q8x32Blocks(*_quantize_activations(x, 32))


def _quantize_activations(x: npt.NDArray[np.float32], block_size: int) -> tuple[Floats, npt.NDArray[np.int8]]:
    if x.ndim != 2 or x.shape[1] % block_size or x.dtype != np.float32:
        expected = f"float32 (M, K) with K a multiple of {block_size}"
        raise OperandError(f"activations must be {expected}, not {x.dtype} {x.shape}")
    blocks = x.reshape(len(x), -1, block_size)
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(blocks).all(axis=2))
    clean = np.where(finite[:, :, None], blocks, np.float32(0))
    largest = np.abs(clean).max(axis=2)
    usable = largest >= np.float32(1e-30)
    inverse = np.where(usable, np.float32(127) / np.where(usable, largest, np.float32(1)), np.float32(0))
    q = np.rint(clean * inverse[:, :, None]).astype(np.int8)
    d = np.where(usable, largest / np.float32(127), np.float32(0))
    return np.where(finite, d, np.float32(np.nan)), q
