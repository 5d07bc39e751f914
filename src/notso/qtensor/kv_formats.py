"""The number formats of a key-value cache, and what each takes: the one place in Python that lists them.

native/cache_format.h says how their bytes lie, and a test holds it to this table. Names say the bits of a key and of a
value. Every format but f16 holds one half-precision scale for each head's vector, so k8v8 takes 8.125 bits a number
with heads of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from notso.qtensor.errors import OperandError

KVFormat: TypeAlias = Literal["f16", "k8v8", "k8v4", "k4v4", "k4v3"]

TILE_POSITIONS = 128
"""Positions of a sequence that lie together in one block of the cache."""

MAX_BYTE_DIM = 1024
"""Head dimension up to which the integer sums of formats below f16 stay exact."""

SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVBits:
    """Bits of one number of a key and of a value, without scales."""

    key: int
    value: int

    @property
    def is_low_bit(self) -> bool:
        """Under 8 bits: beside it lies a second pool, in k8v8, for each sequence's first and last tile."""
        return min(self.key, self.value) < 8

    def pair_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key and value at one position, scales included."""
        scales = 0 if self.key == 16 else 2 * SCALE_BYTES
        return (self.key + self.value) * head_dim // 8 + scales


KV_FORMATS: dict[KVFormat, KVBits] = {
    "f16": KVBits(16, 16),
    "k8v8": KVBits(8, 8),
    "k8v4": KVBits(8, 4),
    "k4v4": KVBits(4, 4),
    "k4v3": KVBits(4, 3),
}
"""Largest first, in the order of their numbers in native/cache_format.h."""

KV_FORMAT_NUMBERS: dict[KVFormat, int] = {name: number for number, name in enumerate(KV_FORMATS)}


def kv_block_bytes(format: KVFormat, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block. Raises OperandError for a format that does not exist or heads that cannot be stored."""
    if format not in KV_FORMATS:
        raise OperandError(f"KV format {format!r} does not exist; there are {', '.join(KV_FORMATS)}")
    if kv_heads < 1 or head_dim < 1 or head_dim % 16:
        raise OperandError(f"a cache of {kv_heads} heads of {head_dim} (a multiple of 16 is needed)")
    if format != "f16" and head_dim > MAX_BYTE_DIM:
        raise OperandError(f"KV format {format} takes heads of up to {MAX_BYTE_DIM}, not {head_dim}")
    return kv_heads * TILE_POSITIONS * KV_FORMATS[format].pair_bytes(head_dim)
