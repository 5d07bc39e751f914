"""Packing of cache blocks as defined in native/cache_format.h.

Shapes: B blocks, KH key-value heads, D head size, L rows; a block holds 128 positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor.kv_formats import KV_FORMATS
from notso.qtensor.reference.kv_cache import LEVELS, TILE, Rounded, round_vectors
from notso.qtensor.reference.ops import Floats

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.intp]

BITS: dict[str, tuple[int, int]] = {name: (bits.key, bits.value) for name, bits in KV_FORMATS.items() if name != "f16"}


def take(block: Bytes, format: str, kv_heads: int, head_dim: int) -> tuple[Rounded, Rounded]:
    """Return keys and values (128, KH, D) of a block (KH, bytes per head) below f16."""
    heads = block.reshape(kv_heads, -1)
    keys, values, scales = _parts(heads, format, head_dim)
    key_bits, value_bits = BITS[format]
    k = _levels(unpack_groups(keys, head_dim // 4, TILE, key_bits), key_bits).transpose(2, 0, 1, 3)
    v = _levels(unpack_groups(values, TILE // 4, head_dim, value_bits), value_bits).transpose(1, 3, 0, 2)
    both = scales.copy().view(np.float16).reshape(kv_heads, 2, TILE)
    shape = TILE, kv_heads, head_dim
    return Rounded(k.reshape(shape), both[:, 0].T), Rounded(v.reshape(shape), both[:, 1].T)


def take_halves(block: Bytes, kv_heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Return keys and values of an f16 block as float32."""
    halves = block.view(np.float16).reshape(kv_heads, 2, -1).astype(np.float32)
    keys = halves[:, 0].reshape(kv_heads, head_dim, TILE).transpose(2, 0, 1)
    return keys, halves[:, 1].reshape(kv_heads, TILE, head_dim).transpose(1, 0, 2)


def put(pool: Bytes, format: str, k: Floats, v: Floats, positions: npt.NDArray[Any], tables: npt.NDArray[Any]) -> None:
    """Write row i of k and v (L, KH, D) at positions[i] by tables[i]."""
    kv_heads, dim = k.shape[1:]
    for row, (p, table) in enumerate(zip(positions, tables, strict=True)):
        run, place = divmod(table[p // TILE], pool.shape[2])
        heads, slot = pool[run, :, place], p % TILE
        if format == "f16":
            halves = heads.view(np.float16).reshape(kv_heads, 2, -1)
            halves[:, 0].reshape(kv_heads, dim, TILE)[:, :, slot] = k[row]
            halves[:, 1].reshape(kv_heads, TILE, dim)[:, slot] = v[row]
            continue
        keys, values, scales = _parts(heads, format, dim)
        for part, x, bits, groups, lanes in (
            (keys, k[row], BITS[format][0], dim // 4, TILE),
            (values, v[row], BITS[format][1], TILE // 4, dim),
        ):
            rounded, numbers = round_vectors(x, bits), unpack_groups(part, groups, lanes, bits)
            new = rounded.levels + 128 if bits == 8 else np.searchsorted(LEVELS[bits], rounded.levels)
            if part is keys:
                numbers[:, :, slot] = new.reshape(kv_heads, groups, 4)
            else:
                numbers[:, slot // 4, :, slot % 4] = new
            part[:] = pack_groups(numbers, bits)
            scales.view(np.float16).reshape(kv_heads, 2, TILE)[:, int(part is values), slot] = rounded.scales


def _parts(heads: Bytes, format: str, dim: int) -> tuple[Bytes, Bytes, Bytes]:
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

    def together(part: Numbers, count: int, step: int) -> Numbers:
        split = part.reshape(heads, -1, count, lanes, 4)
        shifts = (np.arange(count) * step)[:, None, None]
        return np.asarray((split << shifts).sum(axis=2).reshape(heads, -1))

    if bits == 8:
        packed = numbers.reshape(heads, -1)
    elif bits == 4:
        packed = together(numbers, 2, 4)
    else:
        packed = np.concatenate([together(numbers & 3, 4, 2), together(numbers >> 2, 8, 1)], axis=1)
    return packed.astype(np.uint8)


def _levels(numbers: Numbers, bits: int) -> npt.NDArray[np.int32]:
    return (numbers - 128 if bits == 8 else np.array(LEVELS[bits])[numbers]).astype(np.int32)
