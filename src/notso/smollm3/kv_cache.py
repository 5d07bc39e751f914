"""The key-value cache: fixed blocks of 128 positions, each holding every layer, and who reads which of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from notso.qtensor import ops
from notso.smollm3.config import SmolLM3Config

BYTES_PER_VALUE = 2  # float16


class KVCache:
    """Keys and values of `blocks` blocks in every layer, shared by up to `max_num_seqs` sequences at a time.

    `capacity_tokens`: how long one sequence may become. `block_table` (max_num_seqs, tiles) int32: the block that holds
    each tile of each sequence; with one sequence and no `blocks` given, they are its own in order. Memory is reserved
    when made and never grows. Beyond the stored length a block holds whatever was there before; the attention never
    looks there.
    """

    def __init__(
        self, config: SmolLM3Config, capacity_tokens: int, *, max_num_seqs: int = 1, blocks: int | None = None
    ) -> None:
        tiles = -(-capacity_tokens // ops.TILE_POSITIONS)
        self.capacity_tokens = capacity_tokens
        self.blocks = blocks or tiles
        self.pools = [
            ops.key_value_pool(self.blocks, config.num_key_value_heads, config.head_dim)
            for _ in range(config.num_hidden_layers)
        ]
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_num_seqs, tiles), np.int32)
        if blocks is None and max_num_seqs == 1:
            self.block_table[0] = np.arange(tiles)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.nbytes // self.blocks

    def copy_block(self, source: int, target: int) -> None:
        """Give one block the content of another."""
        for pool in self.pools:
            for part in pool:
                part[target] = part[source]

    def read_block(self, block: int) -> bytes:
        """The content of a block, all layers one after another."""
        return b"".join(part[block].tobytes() for pool in self.pools for part in pool)

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """The reverse of `read_block`. Raises ValueError where the size is another."""
        if len(content) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(content)}")
        at = 0
        for pool in self.pools:
            for part in pool:
                size = part[block].nbytes
                part[block] = np.frombuffer(content[at : at + size], part.dtype).reshape(part.shape[1:])
                at += size


def kv_bytes_per_token(config: SmolLM3Config) -> int:
    """Cache bytes that one token takes over all layers."""
    return config.kv_values_per_token * BYTES_PER_VALUE
