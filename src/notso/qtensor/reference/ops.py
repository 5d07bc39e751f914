"""Reference implementation of the operations, in numpy.

`matmul_q8k` does the same float operations as the kernels, so its results are bit-identical to theirs. Most other
functions compute in float64 and round once; their results are compared with tolerances. Shapes: M or L rows, K inputs,
N outputs, S stored positions, H query heads, KH KV heads, D head size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import Q2_K, Q4_1, Q4_K, Q5_1, Q5_K, Format
from notso.qtensor.reference import blocks
from notso.qtensor.reference.unpacked_blocks import UNPACK_32, UNPACK_256
from notso.qtensor.tensor import QTensor

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Layout: TypeAlias = Literal["pairs", "halves"]

ROW_CHUNK = 512  # weight rows per chunk


def _require_operand(condition: bool, message: str) -> None:
    if not condition:
        raise OperandError(message)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c in float32 with one rounding."""
    # The product of two float32 is exact in float64. The sum is rounded to odd (its last bit is set if it is inexact),
    # so that rounding it again, to float32, is correct.
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = np.asarray(product + c)
        back = total - product
        residue = (product - (total - back)) + (c - back)
        bits = total.view(np.int64)
        is_even = (residue != 0) & (bits & 1 == 0) & np.isfinite(total)
        if is_even.any():  # the neighbor in the direction of the residue is odd
            bits += np.where((residue > 0) == (total > 0), is_even, -1 * is_even)
        return total.astype(np.float32)


def embedding_rows(weight: QTensor, ids: npt.NDArray[np.integer[Any]]) -> Floats:
    """Return dequantized rows `ids` (L,) of `weight`. Raises OperandError."""
    ids = np.asarray(ids)
    _require_operand(ids.ndim == 1, f"row indices must be one-dimensional, not {ids.shape}")
    _require_operand(
        not ids.size or (ids.min() >= 0 and ids.max() < weight.rows), f"row indices must be in 0..{weight.rows - 1}"
    )
    return blocks.dequantize(weight.format, weight.row_data()[ids])


def matmul_dequantized(x: Floats, weight: QTensor) -> Floats:
    """Return x @ weight.T, computed in float64 from dequantized weights."""
    _check_matmul(x, weight)
    out = np.empty((len(x), weight.rows), np.float32)
    for start in range(0, weight.rows, ROW_CHUNK):
        stop = min(start + ROW_CHUNK, weight.rows)
        out[:, start:stop] = x.astype(np.float64) @ weight.dequantize(start, stop).astype(np.float64).T
    return out


def matmul_q8k(x: Floats, weight: QTensor) -> Floats:
    """Return x (M, K) @ weight.T, bit-identical to the kernels; K must be a multiple of 256. Raises OperandError."""
    # Activations are quantized in blocks of 256 (`quantize_q8k`, scale dx), or in blocks of 32 if the weight's blocks
    # have 32 values (`quantize_q8x32`). Integer products are summed exactly; for each block in order, the sums are
    # combined in float:
    #
    #   Q4_K, Q5_K   f = float(sum q sc x) * d;  f = fma(-float(sum m bsum), dmin, f);  acc = fma(f, dx, acc)
    #   Q6_K         f = float(sum q sc x) * d;  acc = fma(f, dx, acc)
    #   Q8_0, Q4_0   for each group of eight blocks (256 values): f = 0;
    #                for each block: f = fma(float(sum q x), d * dx, f);  then acc = acc + f
    #   Q4_1         like Q8_0, with a second step per block: f = fma(float(sum x) * dx, m, f)
    #   others       Q2_K like Q4_K, Q5_1 like Q4_1, the rest like Q6_K (blocks of 256 values) or Q8_0 (blocks of 32);
    #                `unpacked_blocks.py` unpacks them
    _check_matmul(x, weight)
    _require_operand(not weight.format.is_float, f"{weight.format.name} has no integer blocks")
    x = np.ascontiguousarray(x)
    _require_operand(x.shape[1] % 256 == 0, f"{x.shape[1]} values are not a multiple of 256")
    out = np.empty((len(x), weight.rows), np.float32)
    if weight.format.block_values == 32:
        block_sums = partial(_small_block_sums, blocks.quantize_q8x32(x))
    else:
        block_sums = partial(_super_block_sums, blocks.quantize_q8k(x))
    for start in range(0, weight.rows, ROW_CHUNK):
        stop = min(start + ROW_CHUNK, weight.rows)
        packed = blocks.split_blocks(weight.format, weight.row_data(start, stop))
        out[:, start:stop] = block_sums(weight.format, packed, stop - start)
    return out


def _super_block_sums(x: blocks.Q8KBlocks, format: Format, packed: blocks.Bytes, rows: int) -> Floats:
    d, dmin, scales, mins, q = UNPACK_256[format](packed)
    scaled = (q.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(rows, -1, 256)
    groups = mins.shape[1]
    d, dmin, mins = d.reshape(rows, -1), dmin.reshape(rows, -1), mins.reshape(rows, -1, groups)
    bsums = x.bsums.reshape(len(x.d), -1, groups, 16 // groups).sum(axis=3)
    acc = np.zeros((len(x.d), rows), np.float32)
    for b in range(x.d.shape[1]):
        f = _exact_dot(x.q[:, b], scaled[:, b]) * d[None, :, b]
        if format in (Q4_K, Q5_K, Q2_K):
            f = fma(-_exact_dot(bsums[:, b], mins[:, b]), dmin[None, :, b], f)
        acc = fma(f, x.d[:, b, None], acc)
    return acc


def _small_block_sums(x: blocks.Q8x32Blocks, format: Format, packed: blocks.Bytes, rows: int) -> Floats:
    d, m, q = (part.reshape(rows, -1, *part.shape[1:]) for part in UNPACK_32[format](packed))
    acc = np.zeros((len(x.d), rows), np.float32)
    with np.errstate(all="ignore"):  # MXFP4's largest scales overflow
        for first in range(0, x.d.shape[1], 8):
            f = np.zeros_like(acc)
            for j in range(first, first + 8):
                dx = x.d[:, j, None]
                f = fma(_exact_dot(x.q[:, j], q[:, j]), d[None, :, j] * dx, f)
                if format in (Q4_1, Q5_1):
                    total = x.q[:, j].sum(axis=1, dtype=np.int32)[:, None].astype(np.float32)
                    f = fma(total * dx, m[None, :, j], f)
            acc = acc + f
    return acc


def _exact_dot(x: npt.NDArray[Any], w: npt.NDArray[Any]) -> Floats:
    # Exact, because the sums are far below 2^53. numpy multiplies float64 matrices faster than integer matrices.
    sums: Doubles = x.astype(np.float64) @ w.astype(np.float64).T
    return sums.astype(np.float32)


def matmul(x: Floats, weight: QTensor) -> Floats:
    """Return x (M, K) @ weight.T: `matmul_q8k` for quantized weights, `matmul_dequantized` for others."""
    return matmul_dequantized(x, weight) if weight.format.is_float else matmul_q8k(x, weight)


def _check_matmul(x: Floats, weight: QTensor) -> None:
    _require_operand(x.ndim == 2 and x.dtype == np.float32, f"input must be float32 (M, K), not {x.dtype} {x.shape}")
    _require_operand(
        x.shape[1] == weight.cols, f"input has {x.shape[1]} columns, but tensor {weight.name!r} has {weight.cols}"
    )


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return weight * x / sqrt(mean(x^2) + eps); x (..., C), weight (C,)."""
    _require_operand(weight.shape == x.shape[-1:], f"weight {weight.shape} does not match {x.shape}")
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps)
    result: Doubles = wide * scale * weight
    return result.astype(np.float32)


def silu_mul(gate: Floats, up: Floats) -> Floats:
    """Return gate / (1 + exp(-gate)) * up."""
    _require_operand(gate.shape == up.shape, f"shapes {gate.shape} and {up.shape} differ")
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        result: Doubles = wide / (1 + np.exp(-wide)) * up
    return result.astype(np.float32)


def add(a: Floats, b: Floats) -> Floats:
    """Return a + b in float32."""
    _require_operand(a.shape == b.shape, f"shapes {a.shape} and {b.shape} differ")
    return np.asarray(a + b, np.float32)


def softmax(x: Floats) -> Floats:
    """Return the softmax over the last axis."""
    return _softmax(x.astype(np.float64)).astype(np.float32)


def _softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)


def argmax(x: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the first maximum."""
    _require_operand(x.ndim > 0 and x.shape[-1] > 0, "argmax needs at least one value")
    return np.asarray(np.argmax(x, axis=-1), np.int64)


def inverse_frequencies(size: int, theta: float) -> Doubles:
    """Return theta^(-2i / size) for i < size / 2 (Su et al., RoFormer)."""
    _require_operand(size > 0 and size % 2 == 0, f"a rotated head must have an even size, not {size}")
    return theta ** (-2 * np.arange(size // 2, dtype=np.float64) / size)


def yarn_frequencies(
    size: int, theta: float, factor: float, original_positions: int, beta_fast: float = 32, beta_slow: float = 1
) -> tuple[Doubles, float]:
    """Return YaRN's frequencies, and its factor for cos and sin (Peng et al. 2023)."""

    # Frequencies with more than `beta_fast` turns over the original context length are kept, and those with fewer than
    # `beta_slow` turns are divided by `factor`; those in between are interpolated linearly.
    def pair_turning(turns: float) -> float:
        return size * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_turning(beta_fast)), 0)
    last = min(math.ceil(pair_turning(beta_slow)), size - 1)
    ramp = np.clip((np.arange(size // 2) - first) / max(last - first, 0.001), 0, 1)
    plain = inverse_frequencies(size, theta)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rope(
    x: Floats,
    positions: npt.NDArray[np.integer[Any]],
    frequencies: Doubles,
    layout: Layout = "pairs",
    scale: float = 1.0,
) -> Floats:
    """Rotate x (L, H, D) by positions * frequencies (D / 2,)."""
    # layout: "pairs" rotates (2i, 2i + 1), as in GGUF files; "halves" rotates (i, i + D / 2). scale: factor for cos and
    # sin, used with YaRN.
    _require_operand(
        x.ndim == 3 and positions.shape == x.shape[:1], f"input {x.shape} and positions {positions.shape} disagree"
    )
    _require_operand(
        frequencies.shape == (x.shape[2] // 2,), f"{len(frequencies)} frequencies do not fit size {x.shape[2]}"
    )
    _require_operand(layout in ("pairs", "halves"), f"layout {layout!r} is neither 'pairs' nor 'halves'")
    angles = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    half = x.shape[2] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if layout == "pairs" else (slice(0, half), slice(half, None))
    a, b = x[:, :, first].astype(np.float64), x[:, :, second].astype(np.float64)
    out = np.empty_like(x)
    out[:, :, first] = a * cos - b * sin
    out[:, :, second] = b * cos + a * sin
    return out


def attention(q: Floats, k: Floats, v: Floats, start: int, scale: float | None = None) -> Floats:
    """Return causal attention of q (L, H, D) over k, v (S, KH, D). start: position of q[0]."""
    # Query head h reads KV head h // (H / KH). Keys after the last query are ignored. `scale` defaults to 1 / sqrt(D).
    _require_operand(
        q.ndim == 3 and k.ndim == 3 and k.shape == v.shape, f"shapes {q.shape}, {k.shape}, {v.shape} disagree"
    )
    length, heads, size = q.shape
    _require_operand(
        k.shape[2] == size and heads % k.shape[1] == 0, f"query heads {q.shape[1:]} do not fit keys {k.shape[1:]}"
    )
    _require_operand(
        start >= 0 and start + length <= len(k), f"positions {start}..{start + length - 1} are outside {len(k)} keys"
    )
    factor = 1 / math.sqrt(size) if scale is None else scale
    group = heads // k.shape[1]
    out = np.empty_like(q)
    for row in range(length):
        seen = start + row + 1
        for head in range(heads):
            keys, values = k[:seen, head // group].astype(np.float64), v[:seen, head // group].astype(np.float64)
            out[row, head] = _softmax(keys @ q[row, head].astype(np.float64) * factor) @ values
    return out
