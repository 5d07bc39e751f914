"""KV cache in device memory; blocks have the same bytes as on the CPU, contiguously."""

from __future__ import annotations

import numpy as np

from notso.qtensor.backends.cuda.driver import Device, DeviceMemory
from notso.qtensor.errors import OperandError
from notso.qtensor.kv_formats import KV_FORMAT_NUMBERS, KV_FORMATS, KVFormat, kv_block_bytes


class DevicePool:
    """Zeroed blocks of one layer, accessible to the host by copies only."""

    def __init__(self, device: Device, blocks: int, kv_heads: int, head_dim: int, format: KVFormat) -> None:
        if blocks < 1:
            raise OperandError(f"a cache cannot have {blocks} blocks")
        self.format = format
        self.blocks = blocks
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.block_bytes = kv_block_bytes(format, kv_heads, head_dim)
        self.nbytes = blocks * self.block_bytes
        self._memory = DeviceMemory(device, self.nbytes, zeroed=True)
        self.facts = self._memory.address, kv_heads, head_dim, KV_FORMAT_NUMBERS[format]

    @property
    def needs_window(self) -> bool:
        """Whether attention needs a k8v8 pool as well."""
        return KV_FORMATS[self.format].is_low_bit

    def read_block(self, block: int) -> bytes:
        content = np.empty(self.block_bytes, np.uint8)
        self._memory.download(content, self._offset(block))
        return content.tobytes()

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        if len(data) != self.block_bytes:
            raise OperandError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        self._memory.upload(np.frombuffer(data, np.uint8), self._offset(block))

    def block_memory(self, block: int) -> None:
        """Return None: the host cannot access the memory."""

    def copy_block(self, source: int, target: int) -> None:
        self._memory.copy(self._offset(target), self._offset(source), self.block_bytes)

    def touch_block(self, block: int) -> None:
        """Do nothing: all memory is allocated at construction."""

    def _offset(self, block: int) -> int:
        if not 0 <= block < self.blocks:
            raise OperandError(f"block {block} is outside the pool of {self.blocks}")
        return block * self.block_bytes
