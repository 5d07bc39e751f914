"""Which number formats the key-value cache can have, and what each takes. Names say the bits of a key and of a value.

Every format but f16 holds one half-precision scale for each head's vector, so k8v8 takes 8.125 bits a number with heads
of 128. Those under 8 bits are read after a Hadamard rotation and through a codebook; for them the first tile of a
sequence and those still being written are kept in k8v8 beside (performance: attention sinks and the recent window).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from notso.qtensor.backends.cpu.kv_pool import KVFormat as KVFormat

KVChoice: TypeAlias = Literal["auto", "f16", "k8v8", "k8v4", "k4v4", "k4v3"]

KV_CHOICES: tuple[KVChoice, ...] = get_args(KVChoice)
WINDOW_FORMAT: KVFormat = "k8v8"
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVBits:
    """Bits of one number of a key and of a value, without scales."""

    key: int
    value: int

    @property
    def is_low_bit(self) -> bool:
        """Under 8 bits: rotated, and with a pool of k8v8 for sinks and open tiles beside."""
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
