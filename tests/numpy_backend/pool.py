"""Cache blocks that the host can only copy, as on a device with its own memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from notso.qtensor import KV_FORMATS, KVFormat, kv_block_bytes
from notso.qtensor.reference import kv_cache
from notso.qtensor.reference.kv_cache import TILE, RoundedVectors
from notso.qtensor.reference.ops import Floats

Integers = npt.NDArray[np.int32]


class NumpyPool:
    """Blocks of one layer: (blocks, KH, 1, bytes of a head) uint8."""

    def __init__(self, blocks: int, kv_heads: int, head_dim: int, format: KVFormat) -> None:
        self.format: KVFormat = format
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.block_bytes = kv_block_bytes(format, kv_heads, head_dim)
        self._data = np.zeros((blocks, kv_heads, 1, self.block_bytes // kv_heads), np.uint8)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @property
    def is_low_bit(self) -> bool:
        return KV_FORMATS[self.format].is_low_bit

    def read_block(self, block: int) -> bytes:
        return self._data[block].tobytes()

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        self._data[block] = np.frombuffer(data, np.uint8).reshape(self._data.shape[1:])

    def block_memory(self, block: int) -> None:
        return None

    def copy_block(self, source: int, target: int) -> None:
        self._data[target] = self._data[source]

    def touch_block(self, block: int) -> None:
        pass

    # used only by the backend

    def put(self, k: Floats, v: Floats, positions: Integers, tables: Integers) -> None:
        """Store row i of k and v (L, KH, D) at positions[i] of the table tables[i]; skip rows without a block."""
        at = tables[np.arange(len(positions)), positions // TILE] >= 0
        with np.errstate(over="ignore"):
            kv_cache.put(self._data, self.format, k[at], v[at], positions[at], tables[at])

    def halves(self, table: Integers, count: int) -> tuple[Floats, Floats]:
        """Return keys and values (count, KH, D) of the first positions of a sequence."""
        tiles = [
            kv_cache.unpack_half_block(self._data[b, :, 0], self.kv_heads, self.head_dim) for b in _blocks(table, count)
        ]
        k, v = (np.concatenate(part)[:count] for part in zip(*tiles, strict=True))
        return k, v

    def rounded(self, table: Integers, count: int, windows: tuple[Integers, NumpyPool] | None) -> list[RoundedVectors]:
        """Return the same for other formats. The first and the last tile are read from `windows`, if given."""
        numbers = _blocks(table, count)
        taken = []
        for tile, block in enumerate(numbers):
            if windows is not None and tile in (0, len(numbers) - 1):
                taken.append(windows[1]._take(windows[0][tile]))
            else:
                taken.append(self._take(block))
        return [
            RoundedVectors(*(np.concatenate(part)[:count] for part in zip(*both, strict=True)))
            for both in zip(*taken, strict=True)
        ]

    def _take(self, block: int) -> tuple[RoundedVectors, RoundedVectors]:
        return kv_cache.unpack_block(self._data[block, :, 0], self.format, self.kv_heads, self.head_dim)


def _blocks(table: Integers, count: int) -> Integers:
    return table[: -(-count // TILE)]
