"""KV cache: blocks of 128 positions, each covering all layers.

Formats with fewer than 8 bits for keys or values are less precise. With these formats, the first block of a sequence
(with its attention sinks) and the blocks being written are read from a second, more precise cache (k8v8) instead. The
blocks of this second cache are called windows. The block pool decides which blocks have a window.

The KV format chosen for a model file is stored in the cache folder, so that the next engine chooses the same format and
can use the blocks on disk.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from notso.qtensor import KV_FORMATS as KV_FORMATS
from notso.qtensor import TILE_POSITIONS, Array, Backend, GGUFFile, KeyValuePool, QTensor
from notso.qtensor import KVFormat as KVFormat
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.scheduling.sequence import BlockCopy, Chunk
from notso.system.files import write_private
from notso.text_file import read_regular

WINDOW_FORMAT: KVFormat = "k8v8"

FILE = "formats.json"
MAX_BYTES = 1 << 16
MAX_ENTRIES = 64
FINE_FORMATS = ("F32", "F16", "BF16", "Q8_0")

_log = logging.getLogger(__name__)
_writing = threading.Lock()  # several engines in one process can share the folder


def has_fine_weights(tensors: Iterable[QTensor]) -> bool:
    """Return whether most weights are floats or have 8 bits."""
    # For such weights, an 8-bit cache would cause larger errors than their quantization (docs/kernels/attention.md).
    values = [(tensor.format.name in FINE_FORMATS, tensor.rows * tensor.cols) for tensor in tensors if tensor.rows > 1]
    return 2 * sum(count for is_fine, count in values if is_fine) > sum(count for _, count in values)


def load_kv_format(folder: Path, file: GGUFFile, context_tokens: int | None) -> KVFormat | None:
    """Return a file's stored KV format, or None."""
    found = _read(folder).get(_key(file, context_tokens))
    return next((each for each in KV_FORMATS if each == found), None)


def store_kv_format(folder: Path, file: GGUFFile, context_tokens: int | None, kv_format: KVFormat) -> None:
    """Store a file's KV format; keep only the newest entries."""
    key = _key(file, context_tokens)
    with _writing:
        entries = _read(folder)
        if entries.get(key) == kv_format:
            return
        entries.pop(key, None)
        newest = dict([*entries.items(), (key, kv_format)][-MAX_ENTRIES:])
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(folder / FILE, json.dumps(newest, indent=1), replace=True)
        except OSError as error:
            # This error is only logged, because even without a stored choice, the same format is usually selected.
            _log.warning("the selected cache format cannot be stored in %s: %s", folder, error.strerror)


def _read(folder: Path) -> dict[str, str]:
    try:
        content = json.loads(read_regular(folder / FILE, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str)} if isinstance(content, dict) else {}


def _key(file: GGUFFile, context_tokens: int | None) -> str:
    return f"{file.path.name} {file.size_bytes} {context_tokens or 'any'}"


# The system allocates memory when it is first touched, which takes milliseconds for a large page. If blocks were not
# touched before they are used, one step could need a new page in every layer. Therefore, memory is touched AHEAD_BLOCKS
# blocks ahead, in at most MOST_LAYERS layers between two steps.
AHEAD_BLOCKS = 4
MOST_LAYERS = 6

# Blocks touched ahead while idle, for answers that start at the same time.
IDLE_BLOCKS = 32

# Layers touched at a time while idle; only a few, because a request may arrive at any moment.
IDLE_LAYERS = 2


class KVCache:
    """Keys and values in blocks, shared by up to `max_num_seqs` sequences of up to `capacity_tokens`.

    blocks: number of blocks; None: as many as one sequence needs. windows: block -> window, maintained by the block
    pool. Memory is reserved at construction and committed on first use.
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
        layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.pools = backend.key_value_pools(layers, self.blocks, heads, dim, kv_format, large_pages=large_pages)
        # A small cache is fast enough without large pages or idle-time touching.
        self._touches_while_idle = large_pages
        # Without a block pool, the only sequence uses the blocks in ascending order.
        is_in_order = blocks is None and max_num_seqs == 1
        in_order = np.arange(tiles, dtype=np.int32).reshape(1, tiles)
        # int32 (max_num_seqs, tiles). Entries beyond the end of a sequence are stale; attention never reads them.
        self.block_table: Array = backend.upload(
            in_order.copy() if is_in_order else np.zeros((max_num_seqs, tiles), np.int32)
        )
        self._is_low_bit = KV_FORMATS[kv_format].is_low_bit
        self._window_pools: Sequence[KeyValuePool] = ()
        if self._is_low_bit:
            # Windows use small pages: few windows are in use at a time, but every layer would need at least one large
            # page.
            count = window_blocks or self.blocks
            self._window_pools = backend.key_value_pools(layers, count, heads, dim, WINDOW_FORMAT, large_pages=False)
        self._window_table: Array = backend.upload(
            in_order.copy() if is_in_order else np.full((max_num_seqs, tiles), -1, np.int32)
        )
        self._windows = windows
        self._used = -1  # highest block used so far
        self._touched = -1  # all blocks up to this one have been touched
        self._touched_layers = 0  # number of layers in which the next block has been touched

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.pools, *self._window_pools))

    @property
    def block_bytes(self) -> int:
        return sum(pool.block_bytes for pool in self.pools)

    def windows(self, layer: int) -> tuple[Array, KeyValuePool] | None:
        return (self._window_table, self._window_pools[layer]) if self._is_low_bit else None

    def place(self, chunk: Chunk, batch_index: int) -> None:
        blocks = chunk.sequence.blocks
        self.backend.write(self.block_table[batch_index][: len(blocks)], blocks)
        if not self._is_low_bit:
            return
        first, last = chunk.start // TILE_POSITIONS, (chunk.start + chunk.rows - 1) // TILE_POSITIONS
        row = self._window_table[batch_index]
        self.backend.write(row[:1], [self._windows[blocks[0]]])
        self.backend.write(row[first : last + 1], [self._windows[block] for block in blocks[first : last + 1]])

    def touch_ahead(self, block: int, rows: int) -> None:
        self._used = max(self._used, block)
        self._touched = max(self._touched, block)
        layers = -(-rows * len(self.pools) // TILE_POSITIONS)
        self._touch(block + AHEAD_BLOCKS, min(layers, MOST_LAYERS))

    def touch_idle(self, blocks: int = 0) -> bool:
        """Touch a few layers of the next block. Return False if enough blocks (at least `blocks`) have been touched."""
        return self._touches_while_idle and self._touch(max(self._used + IDLE_BLOCKS, blocks - 1), IDLE_LAYERS)

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
        for pool in self.pools:
            pool.copy_block(copy.source, copy.target)
        if copy.source_window is not None and copy.target_window is not None:
            for pool in self._window_pools:
                pool.copy_block(copy.source_window, copy.target_window)

    def read_block(self, block: int) -> bytes:
        return b"".join(pool.read_block(block) for pool in self.pools)

    def load_block(self, block: int, read_into: Callable[[list[memoryview]], bool]) -> bool:
        """Fill a block: call `read_into` with its buffers, ordered as in `read_block`, and return the result."""
        # If the result is False, the content of the block is invalid.
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
        return sum(pool.block_bytes for pool in self._window_pools)

    def read_window(self, block: int) -> bytes | None:
        window = self._windows.get(block)
        return None if window is None else b"".join(pool.read_block(window) for pool in self._window_pools)

    def write_window(self, block: int, content: bytearray | memoryview | bytes) -> None:
        self._write(self._window_pools, self._windows[block], memoryview(content))

    @staticmethod
    def _write(pools: Sequence[KeyValuePool], block: int, content: memoryview) -> None:
        for pool in pools:
            pool.write_block(block, content[: pool.block_bytes])
            content = content[pool.block_bytes :]
