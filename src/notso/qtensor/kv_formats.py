"""KV cache formats and their sizes; the only list of them in Python.

native/cache_format.h defines the byte layout, and a test compares it with this table. Names state the bits of keys and
values. Every format but f16 has a half-precision scale per head vector, so k8v8 takes 8.125 bits per value for heads of
128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from notso.qtensor.errors import OperandError

KVFormat: TypeAlias = Literal["f16", "k8v8", "k8v4", "k4v4", "k4v3"]

TILE_POSITIONS = 128  # positions per block

# Integer sums below f16 are exact up to this head dimension.
MAX_BYTE_DIM = 1024

SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVBits:
    """Bits per key and value, without scales."""

    key: int
    value: int

    @property
    def is_low_bit(self) -> bool:
        """Whether first and last tiles need a k8v8 pool."""
        return min(self.key, self.value) < 8

    def pair_bytes(self, head_dim: int) -> int:
        """Bytes of a head's key and value, with scales."""
        scales = 0 if self.key == 16 else 2 * SCALE_BYTES
        return (self.key + self.value) * head_dim // 8 + scales


# Largest first, numbered as in native/cache_format.h.
KV_FORMATS: dict[KVFormat, KVBits] = {
    "f16": KVBits(16, 16),
    "k8v8": KVBits(8, 8),
    "k8v4": KVBits(8, 4),
    "k4v4": KVBits(4, 4),
    "k4v3": KVBits(4, 3),
}

KV_FORMAT_NUMBERS: dict[KVFormat, int] = {name: number for number, name in enumerate(KV_FORMATS)}


def kv_block_bytes(format: KVFormat, kv_heads: int, head_dim: int) -> int:
    """Return a block's bytes. Raises OperandError for an unknown format or unsupported heads."""
    if format not in KV_FORMATS:
        raise OperandError(f"unknown KV format {format!r}; choices: {', '.join(KV_FORMATS)}")
    if kv_heads < 1 or head_dim < 1 or head_dim % 16:
        raise OperandError(f"a cache cannot have {kv_heads} heads of size {head_dim} (must be a multiple of 16)")
    if format != "f16" and head_dim > MAX_BYTE_DIM:
        raise OperandError(f"KV format {format} supports head sizes up to {MAX_BYTE_DIM}, not {head_dim}")
    return kv_heads * TILE_POSITIONS * KV_FORMATS[format].pair_bytes(head_dim)
