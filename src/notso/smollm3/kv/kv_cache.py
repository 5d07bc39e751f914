"""The key-value cache: fixed blocks of 128 positions, each holding every layer, and who reads which of them.

Formats under 8 bits read a sequence's first tile (attention sinks) and the tile a row stands in from a second, finer
cache. So some blocks have a companion there: the first of a sequence, and those that are not full.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from notso.qtensor import ops
from notso.qtensor.kv_pool import KeyValuePool
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.formats import KV_FORMATS, RECENT_FORMAT, KVFormat
from notso.smollm3.scheduling.block_pool import OutOfBlocksError
from notso.smollm3.scheduling.step_plan import Chunk

AHEAD_BLOCKS = 4
MOST_LAYERS = 6
"""Fresh memory is asked for so early, and for no more layers than so between two steps: a large page costs
milliseconds, and without this all layers would want theirs in the same step."""

IDLE_BLOCKS = 32
"""While nobody asks, for so many: what the answers to come will want, all at once if they begin together."""

IDLE_LAYERS = 2
"""In so many layers at a time: somebody may ask at any moment."""

Table = npt.NDArray[np.int32]


class KVCache:
    """Keys and values of `blocks` blocks in every layer, shared by up to `max_num_seqs` sequences at a time.

    `capacity_tokens`: how long one sequence may become. `block_table` (max_num_seqs, tiles) int32: the block that holds
    each tile of each sequence; with one sequence and no `blocks` given, they are its own in order. Memory is reserved
    when made, taken when first used, and never grows beyond. Behind the stored length a block holds whatever was there
    before; the attention never looks there.

    `recent_blocks`: of companions. When they run out, `make_room` is asked to forget something that has one.
    """

    def __init__(
        self,
        config: SmolLM3Config,
        capacity_tokens: int,
        *,
        max_num_seqs: int = 1,
        blocks: int | None = None,
        kv_format: KVFormat = "f16",
        recent_blocks: int = 0,
    ) -> None:
        tiles = -(-capacity_tokens // ops.TILE_POSITIONS)
        self.capacity_tokens = capacity_tokens
        self.blocks = blocks or tiles
        self.pools = _pools(config, self.blocks, kv_format)
        self.block_table: Table = np.zeros((max_num_seqs, tiles), np.int32)
        if blocks is None and max_num_seqs == 1:
            self.block_table[0] = np.arange(tiles)
        self.make_room: Callable[[Callable[[int], bool]], bool] = lambda _: False
        self._is_small = KV_FORMATS[kv_format].is_small
        self._recent_pools = _companion_pools(config, recent_blocks or self.blocks) if self._is_small else []
        self._recent_table: Table = np.full((max_num_seqs, tiles), -1, np.int32)
        self._companions: dict[int, int] = {}
        self._used = -1  # the last block that was
        self._touched = -1  # up to this block there is memory, and for the next in so many layers
        self._touched_layers = 0
        self._free = list(range(recent_blocks or self.blocks)) if self._is_small else []
        if self._is_small and blocks is None and max_num_seqs == 1:
            self._recent_table[0] = np.arange(tiles)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(pool.nbytes for pool in (*self.pools, *self._recent_pools))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, without its companion."""
        return sum(pool.block_bytes for pool in self.pools)

    def recent(self, layer: int) -> tuple[Table, KeyValuePool] | None:
        """The companions' table and pool in a layer, where the format has any."""
        return (self._recent_table, self._recent_pools[layer]) if self._is_small else None

    def place(self, chunk: Chunk, slot: int) -> None:
        """Make ready for a step to read and write a sequence's blocks, named by row `slot` of the tables."""
        blocks = chunk.sequence.blocks
        self.block_table[slot, : len(blocks)] = blocks
        if not self._is_small:
            return
        first, last = chunk.start // ops.TILE_POSITIONS, (chunk.start + chunk.rows - 1) // ops.TILE_POSITIONS
        for block in blocks[1:first]:
            self.forget(block)
        for tile in {0, *range(first, last + 1)}:
            self._recent_table[slot, tile] = self._companion(blocks[tile])

    def settle(self, chunk: Chunk) -> None:
        """A chunk was computed: of what is full by now, only the first block needs its companion."""
        first, end = chunk.start // ops.TILE_POSITIONS, (chunk.start + chunk.count) // ops.TILE_POSITIONS
        for block in chunk.sequence.blocks[max(first, 1) : end]:
            self.forget(block)

    def touch_ahead(self, block: int, rows: int) -> None:
        """A step of `rows` rows is done, and `block` in use by now: have memory where the next ones will lie, in as
        many layers as keep up with such steps."""
        self._used = max(self._used, block)
        self._touched = max(self._touched, block)
        layers = -(-rows * len(self.pools) // ops.TILE_POSITIONS)
        self._touch(block + AHEAD_BLOCKS, min(layers, MOST_LAYERS))

    def touch_idle(self, blocks: int = 0) -> bool:
        """Nobody asks: have a little more memory, for some blocks beyond those in use, or for the first `blocks` if
        that is more. False if it is all there."""
        return self._touch(max(self._used + IDLE_BLOCKS, blocks - 1), IDLE_LAYERS)

    def _touch(self, last: int, layers: int) -> bool:
        if self._touched >= min(last, self.blocks - 1):
            return False
        first, following = self._touched_layers, self._touched + 1
        for pool in self.pools[first : first + layers]:
            pool.block(following)[:, [0, -1]] |= 0  # written, though with what is there
        self._touched_layers += layers
        if self._touched_layers >= len(self.pools):
            self._touched, self._touched_layers = following, 0
        return True

    def can_be_cut(self, block: int) -> bool:
        """Whether a part of the block's content can be used without the rest."""
        return not self._is_small or block in self._companions

    def forget(self, block: int) -> None:
        """The block's companion, if it has one, is not needed any more."""
        companion = self._companions.pop(block, None)
        if companion is not None:
            self._free.append(companion)

    def copy_block(self, source: int, target: int) -> None:
        """Give one block the content of another."""
        for pool in self.pools:
            pool.copy_block(source, target)
        if source in self._companions:
            place = self._companion(target, but=source)
            for pool in self._recent_pools:
                pool.copy_block(self._companions[source], place)

    def read_block(self, block: int) -> bytes:
        """The content of a block, all layers one after another."""
        return b"".join(pool.read_block(block) for pool in self.pools)

    def block_memory(self, block: int) -> list[memoryview]:
        """Where the content of a block lies, part by part, to be written to in the order of `read_block`."""
        return [part for pool in self.pools for part in pool.block_memory(block)]

    @property
    def companion_bytes(self) -> int:
        """Bytes of a companion over all layers; 0 where the format has none."""
        return sum(pool.block_bytes for pool in self._recent_pools)

    def read_companion(self, block: int) -> bytes | None:
        """The content of a block's companion, if it has one."""
        companion = self._companions.get(block)
        return None if companion is None else b"".join(pool.read_block(companion) for pool in self._recent_pools)

    def write_companion(self, block: int, content: bytearray | memoryview | bytes) -> None:
        """The reverse of `read_companion`."""
        place, left = self._companion(block), memoryview(content)
        for pool in self._recent_pools:
            pool.write_block(place, left[: pool.block_bytes])
            left = left[pool.block_bytes :]

    def _companion(self, block: int, but: int = -1) -> int:
        """The block's companion, made if need be, at the cost of another block than `but`."""
        found = self._companions.get(block)
        if found is None:
            if not self._free and not self.make_room(lambda other: other in self._companions and other != but):
                raise OutOfBlocksError
            found = self._companions[block] = self._free.pop()
        return found


def _pools(config: SmolLM3Config, blocks: int, kv_format: KVFormat) -> list[KeyValuePool]:
    return ops.key_value_pools(config.num_hidden_layers, blocks, config.num_key_value_heads, config.head_dim, kv_format)


def _companion_pools(config: SmolLM3Config, blocks: int) -> list[KeyValuePool]:
    """On small pages: few of many are used at a time, and a large page has room for a dozen, in every layer."""
    return ops.key_value_pools(
        config.num_hidden_layers,
        blocks,
        config.num_key_value_heads,
        config.head_dim,
        RECENT_FORMAT,
        large_pages=False,
    )
