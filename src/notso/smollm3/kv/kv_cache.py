"""The key-value cache: fixed blocks of 128 positions, each holding every layer, and who reads which of them.

Formats under 8 bits read a sequence's first tile (attention sinks) and the tile a row stands in from a second, finer
cache: the high-precision windows. Which block has one, the block pool decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from notso.qtensor import TILE_POSITIONS, Array, Backend, KeyValuePool
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.formats import KV_FORMATS, WINDOW_FORMAT, KVFormat
from notso.smollm3.scheduling.step_plan import BlockCopy, Chunk

AHEAD_BLOCKS = 4
MOST_LAYERS = 6
"""Fresh memory is asked for so early, and for no more layers than so between two steps: a large page costs
milliseconds, and without this all layers would want theirs in the same step."""

IDLE_BLOCKS = 32
"""While nobody asks, for so many: what the answers to come will want, all at once if they begin together."""

IDLE_LAYERS = 2
"""In so many layers at a time: somebody may ask at any moment."""


class KVCache:
    """Keys and values of `blocks` blocks in every layer, shared by up to `max_num_seqs` sequences at a time.

    `capacity_tokens`: how long one sequence may become. `block_table` (max_num_seqs, tiles) int32: the block that holds
    each tile of each sequence; with one sequence and no `blocks` given, they are its own in order. Memory is reserved
    when made, taken when first used, and never grows beyond. Behind the stored length a block holds whatever was there
    before; the attention never looks there.

    `windows`: the window of each block that has one, of `window_blocks`; the block pool keeps that map. `large_pages`:
    whether its memory asks for them; that of a small cache comes fast enough without, and not before it is needed.
    """

    def __init__(
        self,
        backend: Backend,
        config: SmolLM3Config,
        capacity_tokens: int,
        *,
        max_num_seqs: int = 1,
        blocks: int | None = None,
        kv_format: KVFormat = "f16",
        window_blocks: int = 0,
        windows: Mapping[int, int] = MappingProxyType({}),
        large_pages: bool = True,
    ) -> None:
        tiles = -(-capacity_tokens // TILE_POSITIONS)
        self.backend = backend
        self.capacity_tokens = capacity_tokens
        self.blocks = blocks or tiles
        self.pools = _pools(backend, config, self.blocks, kv_format, large_pages)
        self._is_ready_ahead = large_pages
        is_in_order = blocks is None and max_num_seqs == 1
        in_order = np.arange(tiles, dtype=np.int32).reshape(1, tiles)
        self.block_table: Array = backend.upload(
            in_order.copy() if is_in_order else np.zeros((max_num_seqs, tiles), np.int32)
        )
        self._is_low_bit = KV_FORMATS[kv_format].is_low_bit
        self._window_pools = _window_pools(backend, config, window_blocks or self.blocks) if self._is_low_bit else []
        self._window_table: Array = backend.upload(
            in_order.copy() if is_in_order else np.full((max_num_seqs, tiles), -1, np.int32)
        )
        self._windows = windows
        self._used = -1  # the last block that was
        self._touched = -1  # up to this block there is memory, and for the next in so many layers
        self._touched_layers = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(pool.nbytes for pool in (*self.pools, *self._window_pools))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, without its window."""
        return sum(pool.block_bytes for pool in self.pools)

    def windows(self, layer: int) -> tuple[Array, KeyValuePool] | None:
        """The windows' table and pool in a layer, where the format has any."""
        return (self._window_table, self._window_pools[layer]) if self._is_low_bit else None

    def place(self, chunk: Chunk, batch_index: int) -> None:
        """Make ready for a step to read and write a sequence's blocks, named by row `batch_index` of the tables."""
        blocks = chunk.sequence.blocks
        self.backend.write(self.block_table[batch_index][: len(blocks)], blocks)
        if not self._is_low_bit:
            return
        first, last = chunk.start // TILE_POSITIONS, (chunk.start + chunk.rows - 1) // TILE_POSITIONS
        row = self._window_table[batch_index]
        self.backend.write(row[:1], [self._windows[blocks[0]]])
        self.backend.write(row[first : last + 1], [self._windows[block] for block in blocks[first : last + 1]])

    def touch_ahead(self, block: int, rows: int) -> None:
        """A step of `rows` rows is done, and `block` in use by now: have memory where the next ones will lie, in as
        many layers as keep up with such steps."""
        self._used = max(self._used, block)
        self._touched = max(self._touched, block)
        layers = -(-rows * len(self.pools) // TILE_POSITIONS)
        self._touch(block + AHEAD_BLOCKS, min(layers, MOST_LAYERS))

    def touch_idle(self, blocks: int = 0) -> bool:
        """Nobody asks: have a little more memory, for some blocks beyond those in use, or for the first `blocks` if
        that is more. False if it is all there, or not wanted before it is needed."""
        return self._is_ready_ahead and self._touch(max(self._used + IDLE_BLOCKS, blocks - 1), IDLE_LAYERS)

    def _touch(self, last: int, layers: int) -> bool:
        if self._touched >= min(last, self.blocks - 1):
            return False
        first, following = self._touched_layers, self._touched + 1
        for pool in self.pools[first : first + layers]:
            pool.touch_block(following)
        self._touched_layers += layers
        if self._touched_layers >= len(self.pools):
            self._touched, self._touched_layers = following, 0
        return True

    def copy_block(self, copy: BlockCopy) -> None:
        """Give one block the content of another, and its window likewise."""
        for pool in self.pools:
            pool.copy_block(copy.source, copy.target)
        if copy.source_window is not None and copy.target_window is not None:
            for pool in self._window_pools:
                pool.copy_block(copy.source_window, copy.target_window)

    def read_block(self, block: int) -> bytes:
        """The content of a block, all layers one after another."""
        return b"".join(pool.read_block(block) for pool in self.pools)

    def load_block(self, block: int, read_into: Callable[[list[memoryview]], bool]) -> bool:
        """Have `read_into` write the content of a block, in the order of `read_block`, part by part into the memory it
        is given: that of the block, where the host can reach it. What lies there afterwards counts if it says so."""
        parts = [pool.block_memory(block) for pool in self.pools]
        if all(part is not None for part in parts):
            return read_into([memory for part in parts for memory in part or ()])
        content = memoryview(bytearray(self.block_bytes))
        if not read_into([content]):
            return False
        self._write(self.pools, block, content)
        return True

    @property
    def window_bytes(self) -> int:
        """Bytes of a window over all layers; 0 where the format has none."""
        return sum(pool.block_bytes for pool in self._window_pools)

    def read_window(self, block: int) -> bytes | None:
        """The content of a block's window, if it has one."""
        window = self._windows.get(block)
        return None if window is None else b"".join(pool.read_block(window) for pool in self._window_pools)

    def write_window(self, block: int, content: bytearray | memoryview | bytes) -> None:
        """The reverse of `read_window`, for a block that has one."""
        self._write(self._window_pools, self._windows[block], memoryview(content))

    @staticmethod
    def _write(pools: Sequence[KeyValuePool], block: int, content: memoryview) -> None:
        for pool in pools:
            pool.write_block(block, content[: pool.block_bytes])
            content = content[pool.block_bytes :]


def _pools(
    backend: Backend, config: SmolLM3Config, blocks: int, kv_format: KVFormat, large_pages: bool
) -> Sequence[KeyValuePool]:
    heads, dim = config.num_key_value_heads, config.head_dim
    return backend.key_value_pools(config.num_hidden_layers, blocks, heads, dim, kv_format, large_pages=large_pages)


def _window_pools(backend: Backend, config: SmolLM3Config, blocks: int) -> Sequence[KeyValuePool]:
    """On small pages: few of many are used at a time, and a large page has room for a dozen, in every layer."""
    heads, dim = config.num_key_value_heads, config.head_dim
    return backend.key_value_pools(config.num_hidden_layers, blocks, heads, dim, WINDOW_FORMAT, large_pages=False)
