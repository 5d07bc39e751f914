"""Memory of a key-value cache: blocks of 128 positions, readable and writable as bytes.

native/cache_format.h specifies the layout; here a head of a block is a row of bytes of known length.
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
"""Maximum blocks whose heads are adjacent. More are not faster to read; these fill a huge page of the 3B."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyValuePool:
    """Blocks of one layer's cache, allocated when first written.

    `data` (runs, KH, blocks of a run, bytes of a head in a block) uint8: block b is data[b // n, :, b % n], where n is
    the length of a run. There may be room for more than `blocks`. Formats below 8 bits need a second pool in k8v8 for
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
        """Bytes of address space, not all of which is allocated."""
        return self.data.nbytes

    @property
    def needs_window(self) -> bool:
        """Whether attention needs a second pool, in k8v8, for first and last tiles."""
        return KV_FORMATS[self.format].is_low_bit

    def block(self, number: int) -> Bytes:
        """Return a writable view of a block (KH, bytes of a head). Raise OperandError if there is none."""
        if not 0 <= number < self.blocks:
            raise OperandError(f"block {number} is outside the pool of {self.blocks}")
        run, place = divmod(number, self.data.shape[2])
        return self.data[run, :, place]

    def read_block(self, block: int) -> bytes:
        """Return a copy of a block, head by head."""
        return self.block(block).tobytes()

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Write the result of `read_block`. Raise OperandError unless it has block_bytes bytes."""
        if len(data) != self.block_bytes:
            raise OperandError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        self.block(block)[:] = np.frombuffer(data, np.uint8).reshape(self.kv_heads, -1)

    def block_memory(self, block: int) -> list[memoryview]:
        """Return writable views of the bytes of a block, in the order of `read_block`."""
        return [memoryview(head) for head in self.block(block)]

    def touch_block(self, block: int) -> None:
        """Allocate the memory of a block without changing its content."""
        self.block(block)[:, [0, -1]] |= 0

    def copy_block(self, source: int, target: int) -> None:
        """Copy block `source` to block `target`."""
        self.block(target)[:] = self.block(source)


def reserved_blocks(blocks: int) -> int:
    """Return the number of blocks for which a pool of this many has room; all runs have the same length."""
    return math.prod(_runs(blocks))


def _runs(blocks: int) -> tuple[int, int]:
    """Return the number and the length of runs with the least excess."""
    runs = -(-blocks // RUN_BLOCKS)
    return runs, -(-blocks // runs)


def key_value_pool(
    blocks: int, kv_heads: int, head_dim: int, format: KVFormat = "f16", *, large_pages: bool = True
) -> KeyValuePool:
    """Return a pool of zeros, in memory from `huge_pages.zeroed`.

    Raise OperandError for invalid sizes, and QTensorError if there is not enough address space.
    """
    return key_value_pools(1, blocks, kv_heads, head_dim, format, large_pages=large_pages)[0]


def key_value_pools(
    layers: int, blocks: int, kv_heads: int, head_dim: int, format: KVFormat = "f16", *, large_pages: bool = True
) -> list[KeyValuePool]:
    """Return one pool for each of `layers` layers, adjacent so that they share huge pages. Raise as
    `key_value_pool`."""
    if blocks < 1:
        raise OperandError(f"a cache cannot have {blocks} blocks")
    runs, run = _runs(blocks)
    shape = layers, runs, kv_heads, run, kv_block_bytes(format, kv_heads, head_dim) // kv_heads
    data = zeroed(math.prod(shape), large_pages=large_pages).reshape(shape)
    return [KeyValuePool(format, kv_heads, head_dim, blocks, data[layer]) for layer in range(layers)]
