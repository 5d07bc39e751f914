"""Reference implementation of KV formats of at most 8 bits and of attention over them, bit-identical to the kernels.

A head's vector is rotated, and each of its values is rounded to a level (an integer in -127..127) times the vector's
half-precision scale. With 8 bits, every integer in this range is a level; formats with fewer bits have a table of
levels fitted to a Gaussian (Lloyd 1957, Max 1960).

Blocks hold 128 positions, packed as native/cache_format.h defines. Shapes: L rows, S positions, H query heads, KH KV
heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from notso.qtensor.formats import KV_FORMATS, TILE_POSITIONS
from notso.qtensor.reference.ops import Floats, fma

TILE = TILE_POSITIONS
LEVELS: dict[int, list[int]] = {
    4: [-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127],
    3: [-127, -79, -45, -14, 14, 45, 79, 127],
}
SIGMAS = {4: 2.7326, 3: 2.1520}  # number of bits -> outermost level, in standard deviations of the Gaussian
LOG2E = np.float32(1.44269504)
EXP2 = [0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0]

Halves = npt.NDArray[np.float16]
Integers = npt.NDArray[np.int32]


class RoundedVectors(NamedTuple):
    """Rotated vectors in a cache format: value = level * scale."""

    levels: Integers  # (..., D), -127..127
    scales: Halves  # (...)

    def values(self) -> Floats:
        return rotate(np.asarray(self.levels.astype(np.float32) * self.scales[..., None].astype(np.float32)))


def rotate(x: Floats) -> Floats:
    """Apply a Hadamard rotation to x (..., D), in segments of the largest power of two that divides D."""
    size = x.shape[-1] & -x.shape[-1]
    y = x.astype(np.float32)
    width = 1
    while width < size:
        pairs = y.reshape(*x.shape[:-1], -1, 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        if width == 8:  # the kernels also scale the values here, after combining the sixteen lanes of a register
            y = y * (np.float32(1) / np.sqrt(np.float32(size)))
        width *= 2
    return np.asarray(y, np.float32)


def round_vectors(x: Floats, bits: int) -> RoundedVectors:
    """Rotate x (..., D) and round it to 8, 4 or 3 bits."""
    with np.errstate(all="ignore"):
        rotated = rotate(x)
        return _round_to_bytes(rotated) if bits == 8 else _to_levels(rotated, bits)


def _round_to_bytes(x: Floats) -> RoundedVectors:
    # scale = half(max|x| / 127), level = x * (1 / scale) rounded half to even. With NaN or infinity, the scale is NaN.
    top = np.where(np.isfinite(x).all(axis=-1), np.abs(x).max(axis=-1), np.float32(np.nan))
    scales = (top / np.float32(127)).astype(np.float16)
    step = scales.astype(np.float32)
    usable = (step > 0) & np.isfinite(step)
    inverse = np.float32(1) / np.where(usable, step, np.float32(1))
    levels = np.rint(np.clip(x * inverse[..., None], -127, 127))
    return RoundedVectors(np.where(usable[..., None], levels, 0).astype(np.int32), scales)


def _to_levels(x: Floats, bits: int) -> RoundedVectors:
    # Scales the table's levels to the standard deviation of x, and rounds x to the nearest ones. With
    # scale = sum x^2 / sum x level, the dot product of x and its rounded vector equals the dot product of x with
    # itself, so rounding does not bias scores. The scale is stored in half precision.
    table = np.array(LEVELS[bits], np.float32)
    squares = fold16_chain(x, x)
    size = np.float32(x.shape[-1])
    step = np.sqrt(squares / size) * np.float32(SIGMAS[bits] / 127)
    usable = np.isfinite(squares) & (squares >= np.float32(1e-30))
    inverse = np.float32(1) / np.where(usable, step, np.float32(1))
    borders = (table[1:] + table[:-1]) / 2
    upper = borders[len(borders) // 2 + 1 :]  # levels are symmetric about zero
    y = x * inverse[..., None]
    outward = (np.abs(y)[..., None] > upper).sum(axis=-1)
    half = len(table) // 2
    numbers = np.where(y < 0, half - 1 - outward, half + outward)
    numbers = np.where(usable[..., None], numbers, half)
    levels = table[numbers]
    scales = np.where(usable, squares / np.where(usable, fold16_chain(x, levels), np.float32(1)), np.float32(0))
    scales = np.where(np.isfinite(squares), scales, np.float32(np.nan))
    return RoundedVectors(levels.astype(np.int32), scales.astype(np.float16))


def fold16_chain(a: Floats, b: Floats) -> Floats:
    """Return sum(a * b) over the last axis, using fused multiply-adds in sixteen lanes, then a tree of sums."""
    a, b = (part.reshape(*part.shape[:-1], -1, 16) for part in (a, b))
    lanes = np.zeros((*a.shape[:-2], 16), np.float32)
    for i in range(a.shape[-2]):
        lanes = fma(a[..., i, :], b[..., i, :], lanes)
    return _fold(lanes)


def _fold(lanes: Floats) -> Floats:
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return np.asarray(lanes[..., 0], np.float32)


def exp2(x: Floats) -> Floats:
    """Approximate 2^x for x clamped to [-100, 127]."""
    x = np.clip(x, np.float32(-100), np.float32(127))
    whole = np.rint(x)
    r = x - whole
    p = np.full_like(x, EXP2[0])
    for coefficient in EXP2[1:]:
        p = fma(p, r, np.full_like(x, coefficient))
    return np.ldexp(p, np.nan_to_num(whole).astype(np.int32))


def attention(q: Floats, keys: RoundedVectors, values: RoundedVectors, start: int, scale: float) -> Floats:
    """Return causal attention of q (L, H, D) over keys and values (S, KH, D). start: position of q[0]."""
    # Operations are ordered as in ByteAttentionTask in native/kernel_table.h.
    out = np.empty_like(q)
    head = np.arange(q.shape[1]) // (q.shape[1] // keys.levels.shape[1])
    for row in range(len(q)):
        seen = start + row + 1
        k, v = (
            RoundedVectors(part.levels[:seen, head].swapaxes(0, 1), part.scales[:seen, head].T)
            for part in (keys, values)
        )
        with np.errstate(all="ignore"):
            out[row] = _attend(q[row], k, v, np.float32(scale))
    return out


class _State(NamedTuple):
    peak: Floats  # (H,)
    total: Floats  # (H,)
    o: Floats  # (H, D)


def _attend(q: Floats, k: RoundedVectors, v: RoundedVectors, scale: np.float32) -> Floats:
    # q (H, D), k and v (H, S, D) -> (H, D).
    rotated = rotate(q)
    top = np.where(np.isfinite(rotated).all(axis=-1), np.abs(rotated).max(axis=-1), np.float32(np.nan))
    usable = top >= np.float32(1e-30)
    inverse = np.float32(127) / np.where(usable, top, np.float32(1))
    query = np.where(usable[:, None], np.rint(np.clip(rotated * inverse[:, None], -127, 127)), 0)
    unit = np.where(top < np.float32(1e-30), np.float32(0), top / np.float32(127)) * scale * LOG2E
    state = _State(np.full(len(q), -1e30, np.float32), np.zeros(len(q), np.float32), np.zeros_like(q))
    for begin in range(0, k.levels.shape[1], TILE):
        tile = np.s_[:, begin : begin + TILE]
        dots = np.einsum("hsd,hd->hs", k.levels[tile].astype(np.float64), query).astype(np.float32)
        scores = dots * (k.scales[tile].astype(np.float32) * unit[:, None])
        state = _attend_tile(scores, RoundedVectors(v.levels[tile], v.scales[tile]), state)
    return rotate(state.o / state.total[:, None])


def _attend_tile(s: Floats, v: RoundedVectors, state: _State) -> _State:
    # Adds one tile, with scores s (H, n) and values v (H, n, D), to the running softmax.
    peak = np.maximum(state.peak, s.max(axis=-1))
    correction = exp2(state.peak - peak)
    p = exp2(s - peak[:, None])
    lanes = np.zeros((len(p), -(-p.shape[1] // 16) * 16), np.float32)
    lanes[:, : p.shape[1]] = p
    sums = _fold(np.add.accumulate(lanes.reshape(len(p), -1, 16), axis=1)[:, -1])
    w = p * v.scales.astype(np.float32)
    largest = np.where(np.isfinite(w).all(axis=-1), np.abs(w).max(axis=-1), np.float32(np.nan))
    usable = largest >= np.float32(1e-30)
    inverse = np.float32(32767) / np.where(usable, largest, np.float32(1))
    whole = np.where(usable[:, None], np.rint(w * inverse[:, None]), 0).astype(np.float64)
    unit = np.where(largest < np.float32(1e-30), np.float32(0), largest / np.float32(32767))[:, None]
    weighted = np.einsum("hs,hsd->hd", whole, v.levels.astype(np.float64)).astype(np.float32)
    o = fma(weighted, unit, state.o * correction[:, None])
    return _State(peak, fma(state.total, correction, sums), o)


Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.intp]

BITS: dict[str, tuple[int, int]] = {name: (bits.key, bits.value) for name, bits in KV_FORMATS.items() if name != "f16"}


def unpack_block(block: Bytes, format: str, kv_heads: int, head_dim: int) -> tuple[RoundedVectors, RoundedVectors]:
    """Return keys and values (128, KH, D) of a block (KH, bytes per head) in a format other than f16."""
    heads = block.reshape(kv_heads, -1)
    keys, values, scales = _split_heads(heads, format, head_dim)
    key_bits, value_bits = BITS[format]
    k = _decode_levels(unpack_groups(keys, head_dim // 4, TILE, key_bits), key_bits).transpose(2, 0, 1, 3)
    v = _decode_levels(unpack_groups(values, TILE // 4, head_dim, value_bits), value_bits).transpose(1, 3, 0, 2)
    both = scales.copy().view(np.float16).reshape(kv_heads, 2, TILE)
    shape = TILE, kv_heads, head_dim
    return RoundedVectors(k.reshape(shape), both[:, 0].T), RoundedVectors(v.reshape(shape), both[:, 1].T)


def unpack_half_block(block: Bytes, kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Return an f16 block's keys and values as float32."""
    halves = block.view(np.float16).reshape(kv_heads, 2, -1).astype(np.float32)
    keys = halves[:, 0].reshape(kv_heads, head_dim, TILE).transpose(2, 0, 1)
    return keys, halves[:, 1].reshape(kv_heads, TILE, head_dim).transpose(1, 0, 2)


def put(pool: Bytes, format: str, k: Floats, v: Floats, positions: npt.NDArray[Any], tables: npt.NDArray[Any]) -> None:
    """Write row i of k, v (L, KH, D) to positions[i] in `pool`; tables[i] is the block table of the row's sequence."""
    if not len(positions):
        return
    kv_heads, dim = k.shape[1:]
    rows_of: dict[tuple[int, int], list[int]] = {}  # rows by block, so that each block is unpacked only once
    for row, (p, table) in enumerate(zip(positions, tables, strict=True)):
        rows_of.setdefault(divmod(int(table[p // TILE]), pool.shape[2]), []).append(row)
    slots = positions % TILE
    rounded = [] if format == "f16" else [round_vectors(x, bits) for x, bits in zip((k, v), BITS[format], strict=True)]
    for (run, index), rows in rows_of.items():
        heads = pool[run, :, index]
        if format == "f16":
            halves = heads.view(np.float16).reshape(kv_heads, 2, -1)
            for row in rows:
                halves[:, 0].reshape(kv_heads, dim, TILE)[:, :, slots[row]] = k[row]
                halves[:, 1].reshape(kv_heads, TILE, dim)[:, slots[row]] = v[row]
            continue
        *parts, scales = _split_heads(heads, format, dim)
        halves = scales.view(np.float16).reshape(kv_heads, 2, TILE)
        for kind, (part, (levels, new_scales), bits) in enumerate(zip(parts, rounded, BITS[format], strict=True)):
            groups, lanes = (TILE // 4, dim) if kind else (dim // 4, TILE)
            numbers = unpack_groups(part, groups, lanes, bits)
            for row in rows:
                new = levels[row] + 128 if bits == 8 else np.searchsorted(LEVELS[bits], levels[row])
                slot = slots[row]
                if kind:
                    numbers[:, slot // 4, :, slot % 4] = new
                else:
                    numbers[:, :, slot] = new.reshape(kv_heads, groups, 4)
                halves[:, kind, slot] = new_scales[row]
            part[:] = pack_groups(numbers, bits)


def _split_heads(heads: Bytes, format: str, dim: int) -> tuple[Bytes, Bytes, Bytes]:
    key_bytes, value_bytes = (TILE * dim * bits // 8 for bits in BITS[format])
    return tuple(np.split(heads, [key_bytes, key_bytes + value_bytes], axis=1))  # type: ignore[return-value]


def unpack_groups(data: Bytes, groups: int, lanes: int, bits: int) -> Numbers:
    """Unpack bytes (KH, n) to integers (KH, groups, lanes, 4)."""
    rows: Numbers = data.reshape(len(data), -1, lanes, 4).astype(np.intp)
    if bits == 8:
        return rows
    if bits == 4:
        return np.stack([rows & 15, rows >> 4], axis=2).reshape(len(data), groups, lanes, 4)
    low, high = rows[:, : groups // 4], rows[:, groups // 4 :]
    two = np.stack([low >> 2 * j & 3 for j in range(4)], axis=2).reshape(len(data), groups, lanes, 4)
    one = np.stack([high >> j & 1 for j in range(8)], axis=2).reshape(len(data), groups, lanes, 4)
    return np.asarray(two | one << 2)


def pack_groups(numbers: Numbers, bits: int) -> Bytes:
    """Pack integers (KH, groups, lanes, 4) to bytes (KH, n)."""
    heads, _, lanes, _ = numbers.shape

    def combine(part: Numbers, count: int, step: int) -> Numbers:
        split = part.reshape(heads, -1, count, lanes, 4)
        shifts = (np.arange(count) * step)[:, None, None]
        return np.asarray((split << shifts).sum(axis=2).reshape(heads, -1))

    if bits == 8:
        packed = numbers.reshape(heads, -1)
    elif bits == 4:
        packed = combine(numbers, 2, 4)
    else:
        packed = np.concatenate([combine(numbers & 3, 4, 2), combine(numbers >> 2, 8, 1)], axis=1)
    return packed.astype(np.uint8)


def _decode_levels(numbers: Numbers, bits: int) -> npt.NDArray[np.int32]:
    return (numbers - 128 if bits == 8 else np.array(LEVELS[bits])[numbers]).astype(np.int32)
