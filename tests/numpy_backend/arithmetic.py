"""The kernels' float operations in NumPy, in the order specified in native/kernel_table.h, so that the bits are equal.

Quantized operations are in `notso.qtensor.reference`, whose float operations compute in float64 instead.
Shapes: L rows, H query heads, KH heads of keys and values, D head dimension, S positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor.reference import blocks
from notso.qtensor.reference import ops as reference
from notso.qtensor.reference.kv_cache import TILE, fold16_chain
from notso.qtensor.reference.ops import Floats, fma
from notso.qtensor.tensor import QTensor

Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer[Any]]

ONE = np.float32(1)
HALF_PI = tuple(float.fromhex(part) for part in ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69"))
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")


def chain(a: Floats, b: Floats) -> Floats:
    """Sum a * b over the last axis, padded with zeros, in sixteen lanes, which are then added pairwise."""
    short = -a.shape[-1] % 16
    if short:
        a, b = (np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, short)]) for part in (a, b))
    return fold16_chain(a, b)


def exp(x: Floats) -> Floats:
    """Return e^x for x clamped to [-87, 88], as v_exp in native/kernels/portable/float_kernels.h."""
    x = np.clip(x, np.float32(-87), np.float32(88))
    n = np.rint(x * np.float32(1.44269504))
    r = fma(n, np.float32(-0.693145751953125), x)
    r = fma(n, np.float32(-1.42860682e-6), r)
    p = np.full_like(r, ONE / np.float32(5040))
    for term in (720, 120, 24, 6, 2, 1, 1):
        p = fma(p, r, np.full_like(r, ONE / np.float32(term)))
    return np.ldexp(p, n.astype(np.int32))


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return x (L, C) times 1 / sqrt(mean of squares + eps), times weight (C,)."""
    scale = ONE / np.sqrt(chain(x, x) / np.float32(x.shape[-1]) + np.float32(eps))
    return np.asarray(x * scale[:, None] * weight, np.float32)


def silu_mul(gate: Floats, up: Floats) -> Floats:
    """Return gate / (1 + exp(-gate)) * up."""
    return np.asarray(gate / (ONE + exp(np.float32(0) - gate)) * up, np.float32)


def matmul(x: Floats, weight: QTensor) -> Floats:
    """Return x (L, K) times the transpose of weight (N, K)."""
    if not weight.format.is_float:
        return reference.matmul_q8k(x, weight)
    numbers = blocks.dequantize(weight.format, weight.row_data())
    return chain(
        np.broadcast_to(numbers, (len(x), *numbers.shape)), np.broadcast_to(x[:, None], (len(x), *numbers.shape))
    )


def rope_table(frequencies: Doubles, positions: Integers, factor: float) -> tuple[Floats, Floats]:
    """Return cosines and sines (L, D/2), with the reduction and series of native/ops/rope_table.cpp in float64."""
    x = positions.astype(np.float64)[:, None] * frequencies
    n = np.rint(x * TWO_OVER_PI)
    angle = ((x - n * HALF_PI[0]) - n * HALF_PI[1]) - n * HALF_PI[2]
    z = angle * angle
    sine, cosine = np.zeros_like(z), np.zeros_like(z)
    for k in range(19, 2, -2):
        sine = (1.0 - sine) * z / float(k * (k - 1))
    for k in range(20, 1, -2):
        cosine = (1.0 - cosine) * z / float(k * (k - 1))
    s, c, quarter = angle - angle * sine, 1.0 - cosine, n.astype(np.int64) & 3
    cos, sin = np.choose(quarter, [c, -s, -c, s]), np.choose(quarter, [s, c, -s, -c])
    return (cos * factor).astype(np.float32), (sin * factor).astype(np.float32)


def rope(x: Floats, cosine: Floats, sine: Floats, *, adjacent: bool) -> Floats:
    """Return x (L, H, D) rotated by cosine and sine (L, D/2)."""
    half = x.shape[2] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(0, half), slice(half, None))
    a, b, c, s = x[..., first], x[..., second], cosine[:, None], sine[:, None]
    out = np.empty_like(x)
    out[..., first] = fma(-b, s, a * c)
    out[..., second] = fma(b, c, a * s)
    return out


def attention(q: Floats, k: Floats, v: Floats, limits: Integers, scale: float) -> Floats:
    """Compute attention over half-precision values: q (L, H, D), k and v (S, KH, D) as stored in the cache.

    Row i attends to the first limits[i] positions. The order is that of AttentionTask in native/kernel_table.h.
    """
    rows, heads, dim = q.shape
    shared = heads // k.shape[1]
    top = np.full((rows, heads), np.float32(-1e30))
    total, o = np.zeros((rows, heads), np.float32), np.zeros_like(q)
    for begin in range(0, int(limits.max()), TILE):
        keys, values = (np.repeat(part[begin : begin + TILE], shared, axis=1) for part in (k, v))
        scores = np.zeros((rows, heads, len(keys)), np.float32)
        for d in range(dim):
            scores = fma(q[:, :, d, None], keys[:, :, d].T, scores)
        scores = scores * np.float32(scale)
        seen = (begin + np.arange(len(keys)) < limits[:, None])[:, None]
        new_top = np.maximum(top, np.where(seen, scores, -np.inf).max(axis=-1)).astype(np.float32)
        correction = exp(top - new_top)
        p = np.where(seen, exp(scores - new_top[..., None]), np.float32(0))
        lanes = np.pad(p, [(0, 0), (0, 0), (0, -len(keys) % 16)]).reshape(rows, heads, -1, 16)
        sums = np.add.accumulate(lanes, axis=2)[:, :, -1]
        for width in (8, 4, 2, 1):
            sums = sums[..., :width] + sums[..., width : 2 * width]
        reached = (limits > begin)[:, None]
        new_total, new_o = fma(total, correction, sums[..., 0]), o * correction[..., None]
        for j in range(len(values)):
            new_o = fma(p[:, :, j, None], values[j], new_o)
        top = np.where(reached, new_top, top)
        total = np.where(reached, new_total, total)
        o = np.where(reached[..., None], new_o, o)
    return np.asarray(o / total[..., None], np.float32)
