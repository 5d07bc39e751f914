"""The key-value cache: fixed tiles of 128 positions, taken by sequences one by one from a pool made at start."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from notso.qtensor import ops
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ContextLengthError

BYTES_PER_VALUE = 2  # float16


class KVCache:
    """Keys and values of `capacity_tokens` positions for one sequence, in every layer.

    Memory is reserved when made and never grows. Beyond the stored length a tile holds whatever was there before; the
    attention never looks there.
    """

    def __init__(self, config: SmolLM3Config, capacity_tokens: int) -> None:
        tiles = -(-capacity_tokens // ops.TILE_POSITIONS)
        self.capacity_tokens = capacity_tokens
        self.length = 0
        self.pools = [
            ops.key_value_pool(tiles, config.num_key_value_heads, config.head_dim)
            for _ in range(config.num_hidden_layers)
        ]
        self.block_table: npt.NDArray[np.int32] = np.arange(tiles, dtype=np.int32).reshape(1, tiles)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(pool.nbytes for pool in self.pools)

    def extend(self, tokens: int) -> int:
        """Make room for `tokens` more and return the position of the first. Raises ContextLengthError when full."""
        if self.length + tokens > self.capacity_tokens:
            raise ContextLengthError(self.length + tokens, self.capacity_tokens)
        start = self.length
        self.length += tokens
        return start

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of {self.length} positions to {length}")
        self.length = length


def kv_bytes_per_token(config: SmolLM3Config) -> int:
    """Cache bytes that one token takes over all layers."""
    return config.kv_values_per_token * BYTES_PER_VALUE
