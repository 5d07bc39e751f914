"""Block formats without dedicated kernels, unpacked to signed integers, integer scales, and d.

Numpy reference for `native/kernels/portable/unpacked_blocks.h`. Arrays of blocks are (n, block_bytes) uint8. Layouts:
ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.formats import (
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
    Q5_0,
    Q5_1,
    TQ1_0,
    TQ2_0,
    Format,
)
from notso.qtensor.reference.grids import grid

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[Any]

LEVELS_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32)
LEVELS_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)  # twice E2M1's values


class Unpacked256(NamedTuple):
    """256-value block: value = d * scales[j] * q - dmin * mins[j] for 16-value group j."""

    d: Floats  # (n,): the file's half, divided by a power of two if that makes the rest integers
    dmin: Floats  # (n,); zero except in Q2_K
    scales: Integers  # (n, 16) int32
    mins: Integers  # (n, 16) int32
    q: Integers  # (n, 256) int32, -128..127


class Unpacked32(NamedTuple):
    """32-value block: value = d * q + m."""

    d: Floats  # (n,)
    m: Floats  # (n,); zero except in Q5_1
    q: Integers  # (n, 32) int32


def _half(b: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(b[:, start : start + 2]).view("<f2")[:, 0].astype(np.float32)


def _words(b: Bytes, start: int, count: int, kind: str) -> Integers:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(b[:, start : start + size * count]).view(kind).astype(np.int64)


def _no_min(b: Bytes) -> Floats:
    return np.zeros(len(b), np.float32)


def _without_mins(d: Floats, scales: Integers, q: Integers) -> Unpacked256:
    n = len(d)
    return Unpacked256(
        d, np.zeros(n, np.float32), scales.reshape(n, 16), np.zeros((n, 16), np.int32), q.reshape(n, 256)
    )


def _nibbles(qs: Bytes) -> Integers:
    # (n, 16 * runs) -> (n, 32 * runs): per sixteen bytes, low nibbles before high ones.
    runs = qs.reshape(len(qs), -1, 1, 16).astype(np.int32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(qs), -1)


def _pairs(qs: Bytes) -> Integers:
    # (n, 64) -> (n, 256): per 32 bytes, the lowest two bits first.
    return (qs.reshape(-1, 2, 1, 32).astype(np.int32) >> 2 * np.arange(4)[:, None] & 3).reshape(len(qs), 256)


def _nibble_pairs(b: Bytes) -> Integers:
    # (n, k) -> (n, 2 * k): each byte's low nibble, then its high one.
    return np.stack([b & 15, b >> 4], axis=2).reshape(len(b), -1).astype(np.int32)


def _signs(bits: Integers) -> Integers:
    # (n, k) -> (n, k, 8): 1 and -1, lowest bit first.
    return 1 - 2 * (bits[:, :, None] >> np.arange(8) & 1)


def _even(seven: Integers) -> Integers:
    # The eighth sign bit makes the number of set bits even.
    parity: Integers = seven
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    eight: Integers = seven | (parity & 1) << 7
    return eight


def _fifth_bits(b: Bytes, start: int) -> Integers:
    return (_words(b, start, 1, "<u4") >> np.arange(32) & 1).astype(np.int32) << 4


def _q5_0(b: Bytes) -> Unpacked32:
    return Unpacked32(_half(b, 0), _no_min(b), (_nibbles(b[:, 6:]) | _fifth_bits(b, 2)) - 16)


def _q5_1(b: Bytes) -> Unpacked32:
    return Unpacked32(_half(b, 0), _half(b, 2), _nibbles(b[:, 8:]) | _fifth_bits(b, 4))


def _iq4_nl(b: Bytes) -> Unpacked32:
    return Unpacked32(_half(b, 0), _no_min(b), LEVELS_IQ4[_nibbles(b[:, 2:])])


def _mxfp4(b: Bytes) -> Unpacked32:
    d = np.ldexp(np.float32(1), b[:, 0].astype(np.int32) - 128).astype(np.float32)
    return Unpacked32(d, _no_min(b), LEVELS_MXFP4[_nibbles(b[:, 1:])])


def _q2_k(b: Bytes) -> Unpacked256:
    scales = b[:, :16].astype(np.int32)
    return Unpacked256(_half(b, 80), _half(b, 82), scales & 15, scales >> 4, _pairs(b[:, 16:80]))


def _q3_k(b: Bytes) -> Unpacked256:
    high = (b[:, None, :32].astype(np.int32) >> np.arange(8)[:, None] & 1).reshape(len(b), 256)
    s = b[:, 96:108].astype(np.int32)
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    top = (s[:, None, 8:] >> 2 * np.arange(4)[:, None] & 3).reshape(len(b), 16)
    return _without_mins(_half(b, 108), (low | top << 4) - 32, _pairs(b[:, 32:96]) + 4 * high - 4)


def _iq4_xs(b: Bytes) -> Unpacked256:
    high = _words(b, 2, 1, "<u2") >> 2 * np.arange(8) & 3
    scales = (_nibble_pairs(b[:, 4:8]) | high << 4) - 32
    return _without_mins(_half(b, 0), np.repeat(scales, 2, axis=1), LEVELS_IQ4[_nibbles(b[:, 8:])])


def _by_seven(words: Integers) -> Integers:
    # (n, 8) words of four times seven sign bits -> (n, 32, 8).
    return _signs(_even(words[:, :, None] >> 7 * np.arange(4) & 127).reshape(len(words), 32))


def _iq2_xxs(b: Bytes) -> Unpacked256:
    words = _words(b, 2, 16, "<u4").reshape(-1, 8, 2)
    rows = grid("IQ2_XXS")[(words[:, :, :1] >> 8 * np.arange(4) & 255).reshape(len(b), 32)]
    scales = np.repeat(2 * (words[:, :, 1] >> 28) + 1, 2, axis=1)
    return _without_mins(_half(b, 0) / np.float32(8), scales, rows * _by_seven(words[:, :, 1]))


def _iq2_xs(b: Bytes) -> Unpacked256:
    words = _words(b, 2, 32, "<u2")
    rows = grid("IQ2_XS")[words & 511]
    return _without_mins(
        _half(b, 0) / np.float32(8), 2 * _nibble_pairs(b[:, 66:74]) + 1, rows * _signs(_even(words >> 9))
    )


def _iq2_s(b: Bytes) -> Unpacked256:
    high = (b[:, 66:74, None].astype(np.int64) >> 2 * np.arange(4) & 3).reshape(len(b), 32)
    rows = grid("IQ2_S")[b[:, 2:34] | high << 8]
    return _without_mins(
        _half(b, 0) / np.float32(8), 2 * _nibble_pairs(b[:, 74:82]) + 1, rows * _signs(b[:, 34:66].astype(np.int64))
    )


def _iq3_xxs(b: Bytes) -> Unpacked256:
    words = _words(b, 66, 8, "<u4")
    rows = grid("IQ3_XXS")[b[:, 2:66]].reshape(len(b), 32, 8)
    scales = np.repeat(2 * (words >> 28) + 1, 2, axis=1)
    return _without_mins(_half(b, 0) / np.float32(4), scales, rows * _by_seven(words))


def _iq3_s(b: Bytes) -> Unpacked256:
    high = (b[:, 66:74, None].astype(np.int64) >> np.arange(8) & 1).reshape(len(b), 64)
    rows = grid("IQ3_S")[b[:, 2:66] | high << 8].reshape(len(b), 32, 8)
    scales = np.repeat(2 * _nibble_pairs(b[:, 106:110]) + 1, 2, axis=1)
    return _without_mins(_half(b, 0), scales, rows * _signs(b[:, 74:106].astype(np.int64)))


def _iq1_s(b: Bytes) -> Unpacked256:
    words = _words(b, 34, 8, "<u2")
    high = (words[:, :, None] >> 3 * np.arange(4) & 7).reshape(len(b), 32)
    shift = np.where(words & 0x8000, -1, 1).repeat(4, axis=1)
    scales = np.repeat(2 * (words >> 12 & 7) + 1, 2, axis=1)
    return _without_mins(
        _half(b, 0) / np.float32(8), scales, 8 * grid("IQ1_S")[b[:, 2:34] | high << 8] + shift[:, :, None]
    )


def _iq1_m(b: Bytes) -> Unpacked256:
    high = _nibble_pairs(b[:, 32:48])
    words = _words(b, 48, 4, "<u2")
    half = (words >> 12 << 4 * np.arange(4)).sum(axis=1).astype("<u2").view("<f2").astype(np.float32)
    shift = np.where(high & 8, -1, 1)
    scales = 2 * (words[:, :, None] >> 3 * np.arange(4) & 7) + 1
    return _without_mins(
        half / np.float32(8), scales, 8 * grid("IQ1_S")[b[:, :32] | (high & 7) << 8] + shift[:, :, None]
    )


def _trits(b: Bytes, digits: int) -> Integers:
    # (n, k) -> (n, digits * k) of -1, 0 and 1: the first base-3 digit of every byte, then the second, ...
    powered = b[:, None, :] * (3 ** np.arange(digits)).astype(np.uint8)[:, None]
    return (powered.astype(np.int32) * 3 >> 8).reshape(len(b), -1) - 1


def _tq1_0(b: Bytes) -> Unpacked256:
    q = np.concatenate([_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], axis=1)
    return _without_mins(_half(b, 52), np.ones((len(b), 16), np.int32), q)


def _tq2_0(b: Bytes) -> Unpacked256:
    return _without_mins(_half(b, 64), np.ones((len(b), 16), np.int32), _pairs(b[:, :64]) - 1)


# Functions that unpack (n, block_bytes) uint8.
UNPACK_256: dict[Format, Callable[[Bytes], Unpacked256]] = {
    Q2_K: _q2_k,
    Q3_K: _q3_k,
    IQ4_XS: _iq4_xs,
    IQ2_XXS: _iq2_xxs,
    IQ2_XS: _iq2_xs,
    IQ2_S: _iq2_s,
    IQ3_XXS: _iq3_xxs,
    IQ3_S: _iq3_s,
    IQ1_S: _iq1_s,
    IQ1_M: _iq1_m,
    TQ1_0: _tq1_0,
    TQ2_0: _tq2_0,
}

UNPACK_32: dict[Format, Callable[[Bytes], Unpacked32]] = {
    Q5_0: _q5_0,
    Q5_1: _q5_1,
    IQ4_NL: _iq4_nl,
    MXFP4: _mxfp4,
}


def numbers_of(format: Format, b: Bytes) -> Floats:
    """Return float32 values, with one rounding per operation."""
    if format in UNPACK_32:
        small = UNPACK_32[format](b)
        numbers: Floats = small.d[:, None] * small.q.astype(np.float32)
        return numbers + small.m[:, None] if format == Q5_1 else numbers
    w = UNPACK_256[format](b)
    scale = w.d[:, None] * w.scales.astype(np.float32)
    minimum = w.dmin[:, None] * w.mins.astype(np.float32)
    q = w.q.reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(-1, 256)
