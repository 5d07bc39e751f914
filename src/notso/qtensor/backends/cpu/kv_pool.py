"""The memory of a key-value cache: blocks of 128 positions, each readable and writable as bytes.

How blocks lie is written down in native/cache_format.h; here a head of a block is a row of bytes of known length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.huge_pages import zeroed
from notso.qtensor.errors import OperandError
from notso.qtensor.kv_formats import KV_FORMATS, KVFormat, kv_block_bytes

Bytes = npt.NDArray[np.uint8]
RUN_BLOCKS = 16
"""Blocks whose heads lie together, at the most. More are no quicker to read; these fill a large page of the 3B."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyValuePool:
    """Blocks of one layer's cache; memory is taken when a block is first written.

    `data` (runs, KH, blocks of a run, bytes of a head in a block) uint8: block b is data[b // n, :, b % n], where n is
    the length of a run. It may have room for more than `blocks`. Formats below 8 bits go with a second pool in k8v8 for
    each sequence's first and last tile.
    """

    format: KVFormat
    kv_heads: int
    head_dim: int
    blocks: int
    data: Bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return int(self.data.shape[1] * self.data.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of address space; what was never written takes no memory."""
        return self.data.nbytes

    @property
    def needs_window(self) -> bool:
        """Whether attention over this pool needs a second one, in k8v8, for first and last tiles."""
        return KV_FORMATS[self.format].is_low_bit

    def block(self, number: int) -> Bytes:
        """A block where it lies, writable: (KH, bytes of a head). Raises OperandError if there is none."""
        if not 0 <= number < self.blocks:
            raise OperandError(f"block {number} is outside the pool of {self.blocks}")
        run, place = divmod(number, self.data.shape[2])
        return self.data[run, :, place]

    def read_block(self, block: int) -> bytes:
        """A copy of block number `block`, head after head."""
        return self.block(block).tobytes()

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Put back what `read_block` gave. Raises OperandError unless it has block_bytes bytes."""
        if len(data) != self.block_bytes:
            raise OperandError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        self.block(block)[:] = np.frombuffer(data, np.uint8).reshape(self.kv_heads, -1)

    def block_memory(self, block: int) -> list[memoryview]:
        """The bytes of block number `block` where they lie, writable, in the order of `read_block`."""
        return [memoryview(head) for head in self.block(block)]

    def touch_block(self, block: int) -> None:
        """Have memory for block number `block`: its ends are written, though with what is there."""
        self.block(block)[:, [0, -1]] |= 0

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` equal to block `source`."""
        self.block(target)[:] = self.block(source)


def reserved_blocks(blocks: int) -> int:
    """For how many blocks a pool has room that was made for so many: runs are of one length."""
    return math.prod(_runs(blocks))


def _runs(blocks: int) -> tuple[int, int]:
    """How many runs, and of how many blocks each: as few too many as can be."""
    runs = -(-blocks // RUN_BLOCKS)
    return runs, -(-blocks // runs)


def key_value_pool(
    blocks: int, kv_heads: int, head_dim: int, format: KVFormat = "f16", *, large_pages: bool = True
) -> KeyValuePool:
    """A pool of zeros, in memory from `huge_pages.zeroed`.

    Raises OperandError for sizes that cannot be, and QTensorError when the address space cannot be had.
    """
    return key_value_pools(1, blocks, kv_heads, head_dim, format, large_pages=large_pages)[0]


def key_value_pools(
    layers: int, blocks: int, kv_heads: int, head_dim: int, format: KVFormat = "f16", *, large_pages: bool = True
) -> list[KeyValuePool]:
    """One for each of `layers` layers, lying one behind the other: apart, each would fill its last large page in part
    only. As `key_value_pool`."""
    if blocks < 1:
        raise OperandError(f"a cache cannot have {blocks} blocks")
    runs, run = _runs(blocks)
    shape = layers, runs, kv_heads, run, kv_block_bytes(format, kv_heads, head_dim) // kv_heads
    data = zeroed(math.prod(shape), large_pages=large_pages).reshape(shape)
    return [KeyValuePool(format, kv_heads, head_dim, blocks, data[layer]) for layer in range(layers)]
