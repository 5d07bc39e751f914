"""Quickly generate random blocks for synthetic models, kernel tests and device checks.

The integers of quantized formats are random bytes. Scales and minima are chosen so that values have the given standard
deviation and, like trained weights, a mean near 0.
"""

from __future__ import annotations

import numpy as np

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import (
    BF16,
    F16,
    F32,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    Format,
)
from notso.qtensor.reference.blocks import Bytes, Floats, half_bytes, pack_scales, quantize

POOL = 4096  # number of sets of scales that `_scale_pool` generates

# Mean (where needed) and standard deviation of uniform integers in 0..15, 0..31, 0..63 and 0..255.
_MEAN_4, _STD_4 = 7.5, 4.61
_MEAN_5, _STD_5 = 15.5, 9.23
_STD_6 = 18.47
_STD_8 = 73.9
# Format -> mean and standard deviation of the values that random bytes encode if d is 1 and the minima are 0. Generated
# blocks have minima that make the mean 0.
_OTHERS: dict[Format, tuple[float, float]] = {
    Q5_0: (0.0, 9.23),
    Q5_1: (15.5, 9.23),
    Q2_K: (11.3, 13.9),
    Q3_K: (0.0, 43.3),
    IQ4_NL: (0.0, 67.2),
    IQ4_XS: (0.0, 1250.0),
    IQ2_XXS: (0.0, 53.8),
    IQ2_XS: (0.0, 56.1),
    IQ2_S: (0.0, 56.4),
    IQ3_XXS: (0.0, 142.6),
    IQ3_S: (0.0, 140.3),
    IQ1_S: (0.0, 7.2),
    IQ1_M: (0.0, 7.2),
    TQ1_0: (0.0, 0.82),
    TQ2_0: (0.0, 1.12),
    MXFP4: (0.0, 5.84),
}

# Format -> byte offsets of the half-precision numbers in a block.
HALVES: dict[Format, tuple[int, ...]] = {
    **dict.fromkeys((Q4_0, Q8_0, Q5_0, IQ4_NL, IQ4_XS, IQ2_XXS), (0,)),
    **dict.fromkeys((IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S), (0,)),
    **dict.fromkeys((Q4_1, Q4_K, Q5_K, Q5_1), (0, 2)),
    Q6_K: (208,),
    Q2_K: (80, 82),
    Q3_K: (108,),
    TQ1_0: (52,),
    TQ2_0: (64,),
    IQ1_M: (48,),  # one nibble in each of four words
}


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Return `count` random bytes."""
    # Generating 64 bits at a time is several times faster than `Generator.bytes`.
    words = rng.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
    return words.view(np.uint8)[:count]


def random_blocks(format: Format, count: int, rng: np.random.Generator, std: float = 0.02) -> Bytes:
    """Return valid blocks, uint8 (count, block_bytes), of values with standard deviation `std`."""
    if format in (F32, F16, BF16):
        numbers = rng.standard_normal((count, 1), np.float32) * np.float32(std)
        return quantize(format, numbers)
    out = random_bytes(rng, count * format.block_bytes).reshape(count, format.block_bytes)
    if format in HALVES and format in _OTHERS:
        write_halves(format, out, _random_halves(format, count, rng, std))
        return out
    pick = rng.integers(0, POOL, count, dtype=np.uint16)
    start, heads = _scale_pool(format, rng, std)
    out[:, start : start + heads.shape[1]] = heads[pick]
    return out


def write_halves(format: Format, packed: Bytes, halves: Floats) -> None:
    """Write half-precision numbers, shape (blocks, numbers per block), into blocks."""
    bits = halves.astype("<f2").view("<u2")
    for start, column in zip(HALVES[format], bits.T, strict=True):
        if format == IQ1_M:
            high = packed[:, start + 1 : start + 8 : 2]
            high[:] = high & 15 | (column[:, None] >> 4 * np.arange(4) & 15) << 4
        else:
            packed[:, start : start + 2] = np.ascontiguousarray(column)[:, None].view(np.uint8)


def _random_halves(format: Format, count: int, rng: np.random.Generator, std: float) -> Floats:
    mean, deviation = _OTHERS[format]
    d = rng.uniform(0.7, 1.3, count).astype(np.float32) * np.float32(std / deviation)
    if format == Q5_1:
        return np.stack([d, d * np.float32(-mean)], axis=1)
    if format == Q2_K:  # dmin * mins, with mins of 7.5 on average, removes the mean
        return np.stack([d, d * np.float32(mean / 7.5)], axis=1)
    signed: Floats = d * rng.choice(np.array([-1, 1], np.float32), count)
    return signed[:, None]


def _scale_pool(format: Format, rng: np.random.Generator, std: float) -> tuple[int, Bytes]:
    # Returns the offset of the scales within a block, and POOL variants of their bytes.
    spread = rng.uniform(0.7, 1.3, POOL).astype(np.float32)
    sign = rng.choice(np.array([-1, 1], np.float32), POOL)
    if format in (Q4_K, Q5_K):
        mean, deviation = (_MEAN_4, _STD_4) if format == Q4_K else (_MEAN_5, _STD_5)
        d = spread * np.float32(std / (48 * deviation))
        scales = rng.integers(32, 64, (POOL, 8), np.int32)
        mins = np.clip(scales + rng.integers(-3, 4, (POOL, 8), np.int32), 0, 63)
        return 0, np.concatenate([half_bytes(d), half_bytes(d * np.float32(mean)), pack_scales(scales, mins)], axis=1)
    if format == Q6_K:
        d = spread * np.float32(std / (24 * _STD_6))
        scales = rng.integers(16, 32, (POOL, 16), np.int8) * rng.choice(np.array([-1, 1], np.int8), (POOL, 16))
        return 192, np.concatenate([scales.view(np.uint8), half_bytes(d)], axis=1)
    if format == Q8_0:
        return 0, half_bytes(sign * spread * np.float32(std / _STD_8))
    if format == MXFP4:
        exponents = np.round(np.log2(spread * std / _OTHERS[format][1])) + 128
        return 0, exponents.astype(np.uint8)[:, None]
    d = sign * spread * np.float32(std / _STD_4)
    if format == Q4_1:
        return 0, np.concatenate([half_bytes(d), half_bytes(d * np.float32(-_MEAN_4))], axis=1)
    if format == Q4_0:
        return 0, half_bytes(d)
    raise OperandError(f"random blocks of {format.name} are not supported")
