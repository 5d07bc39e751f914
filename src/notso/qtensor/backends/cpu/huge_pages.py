"""Allocate memory on 2 MiB pages for key-value pools and for packed or unpacked copies of tensors.

A mapped file is read mostly through 4 KiB pages; their page table lookups slow decoding by a quarter to a third.
Packing only reorders a tensor's bytes for the kernels' vector loads (native/packed_weights.h), so results stay
bit-identical.

A key-value pool consists of blocks of 128 positions, which can be read and written as bytes. native/cache_format.h
specifies the layout; this module uses only the number of bytes per head in a block.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.kernel_choice import is_packed, native
from notso.qtensor.errors import OperandError, QTensorError
from notso.qtensor.formats import KV_FORMATS, Format, KVFormat, kv_block_bytes
from notso.qtensor.tensor import QTensor
from notso.system.memory import huge_pages_available, use_huge_pages

PAGE_BYTES = 2 << 20
TENSOR_ALIGNMENT = 4096  # alignment of copied tensors and interleaved groups, so that no two of them share a cache line
COPY_BYTES = 8 << 20  # bytes copied per numpy call; each call releases the interpreter lock
SLAB_ROWS = 64  # rows per slab (native/packed_weights.h); tensors with fewer rows are not packed
SUPER_BLOCK = 256  # values per row in a packed block

LARGE_BYTES = 4 << 20  # minimum size for huge pages; smaller allocations would waste much of the last page


def zeroed(size: int, *, large_pages: bool = True) -> npt.NDArray[np.uint8]:
    """Return `size` zero bytes, in pages that are allocated when first written. Raises QTensorError.

    large_pages: use 2 MiB pages for large sizes; unsuitable for sparsely written memory.
    """
    large = large_pages and size >= LARGE_BYTES and huge_pages_available()
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES * large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if large:
            use_huge_pages(memory)
    except (OSError, ValueError, OverflowError) as error:
        raise QTensorError(f"cannot allocate {size} bytes: {error}") from error
    view = np.frombuffer(memory, np.uint8)
    start = -view.ctypes.data % PAGE_BYTES if large else 0
    return view[start : start + size]


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A tensor stored in slabs of 64 rows, `slab_stride` bytes apart; only the kernels can read it."""

    name: str
    format: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # from the first slab to the end of the last; may include slabs of other tensors
    slab_stride: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]


class HugePageArena:
    """Memory on huge pages for tensors of known total size, allocated page by page as tensors are copied."""

    def __init__(self, tensor_bytes: int, tensor_count: int, *, packs: bool = True) -> None:
        """Reserve address space for `tensor_count` tensors of `tensor_bytes` in total. Raises QTensorError.

        packs: pack tensors where the kernels support it.
        """
        # Packing pads rows, so more address space is reserved than the unpacked data needs. The rest takes no memory.
        size = tensor_bytes + tensor_bytes // 4 + tensor_count * TENSOR_ALIGNMENT + PAGE_BYTES
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            use_huge_pages(memory)
        except (OSError, ValueError) as error:
            raise QTensorError(f"cannot allocate huge pages: {error}") from error
        self._bytes = np.frombuffer(memory, np.uint8)
        self._used = -self._bytes.ctypes.data % PAGE_BYTES
        self._packs, self._packed = packs, False

    @property
    def layout(self) -> str:
        """ "packed" if any tensor is packed, else "hugepages"."""
        return "packed" if self._packed else "hugepages"

    def copy(self, *tensors: QTensor) -> tuple[QTensor | PackedTensor, ...]:
        """Copy tensors into this arena; interleave their slabs if all can be packed and have the same number of rows.

        Raises QTensorError if the arena is full.
        """
        if not self._packs or not all(_can_be_packed(tensor) for tensor in tensors):
            return tuple(self._copy_tensor(tensor) for tensor in tensors)
        if len({tensor.rows for tensor in tensors}) > 1:
            return tuple(each for tensor in tensors for each in self.copy(tensor))
        *starts, stride = accumulate((_packed_bytes(tensor, SLAB_ROWS, 1) for tensor in tensors), initial=0)
        sizes = [_packed_bytes(tensor, tensor.rows, stride) for tensor in tensors]
        memory = self._reserve(tensors[0].name, max(start + size for start, size in zip(starts, sizes, strict=True)))
        packed = []
        for tensor, start, size in zip(tensors, starts, sizes, strict=True):
            data = memory[start : start + size]
            native.pack_weight(tensor.data, tensor.format.ggml_type, tensor.rows, tensor.cols, stride, data)
            data.flags.writeable = False
            packed.append(PackedTensor(tensor.name, tensor.format, tensor.shape, data, stride))
        self._packed = True
        return tuple(packed)

    def _copy_tensor(self, tensor: QTensor) -> QTensor:
        data = self._reserve(tensor.name, tensor.nbytes)
        for at in range(0, tensor.nbytes, COPY_BYTES):
            np.copyto(data[at : at + COPY_BYTES], tensor.data[at : at + COPY_BYTES])
        data.flags.writeable = False
        return QTensor(tensor.name, tensor.format, tensor.shape, data)

    def _reserve(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        start = -(-self._used // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        if start + size > self._bytes.size:
            raise QTensorError(f"tensor {name!r} does not fit in the reserved memory")
        self._used = start + size
        return self._bytes[start : self._used]


def _can_be_packed(tensor: QTensor) -> bool:
    return tensor.rows >= SLAB_ROWS and tensor.cols % SUPER_BLOCK == 0 and is_packed(tensor.format)


def _packed_bytes(tensor: QTensor, rows: int, stride: int) -> int:
    size: int = native.packed_bytes(tensor.format.ggml_type, rows, tensor.cols, stride)
    return size


Bytes = npt.NDArray[np.uint8]
RUN_BLOCKS = 16
"""Maximum number of blocks per run. In a run, each head's data is contiguous. Longer runs are not faster to read."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyValuePool:
    """Blocks of one layer's cache, allocated when first written."""

    # `data` is (runs, KH, blocks per run, bytes of a head in a block) uint8: block b is data[b // n, :, b % n], where n
    # is the number of blocks per run. `data` may be larger than `blocks` requires. With formats of fewer than 8 bits,
    # each sequence's first and current tiles are also stored in a second pool with format k8v8, called the window pool.
    format: KVFormat
    kv_heads: int
    head_dim: int
    blocks: int
    data: Bytes

    @property
    def block_bytes(self) -> int:
        return int(self.data.shape[1] * self.data.shape[3])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def needs_window(self) -> bool:
        return KV_FORMATS[self.format].is_low_bit

    def block(self, number: int) -> Bytes:
        """Return a writable view of a block (KH, bytes of a head). Raises OperandError."""
        if not 0 <= number < self.blocks:
            raise OperandError(f"block {number} is outside the pool of {self.blocks}")
        run, index = divmod(number, self.data.shape[2])
        return self.data[run, :, index]

    def read_block(self, block: int) -> bytes:
        return self.block(block).tobytes()

    def write_block(self, block: int, data: bytes | bytearray | memoryview) -> None:
        if len(data) != self.block_bytes:
            raise OperandError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        self.block(block)[:] = np.frombuffer(data, np.uint8).reshape(self.kv_heads, -1)

    def block_memory(self, block: int) -> list[memoryview]:
        return [memoryview(head) for head in self.block(block)]

    def touch_block(self, block: int) -> None:
        """Make the system allocate a block's huge pages, without changing its content."""
        self.block(block)[:, [0, -1]] |= 0

    def copy_block(self, source: int, target: int) -> None:
        self.block(target)[:] = self.block(source)


def reserved_blocks(blocks: int) -> int:
    """Return `blocks`, rounded up so that all runs of a pool have the same length."""
    return math.prod(_run_layout(blocks))


def _run_layout(blocks: int) -> tuple[int, int]:
    runs = -(-blocks // RUN_BLOCKS)
    return runs, -(-blocks // runs)


def key_value_pool(
    blocks: int, kv_heads: int, head_dim: int, format: KVFormat = "f16", *, large_pages: bool = True
) -> KeyValuePool:
    """Return a zeroed pool. Raises OperandError for invalid arguments, QTensorError if allocation fails."""
    return key_value_pools(1, blocks, kv_heads, head_dim, format, large_pages=large_pages)[0]


def key_value_pools(
    layers: int, blocks: int, kv_heads: int, head_dim: int, format: KVFormat = "f16", *, large_pages: bool = True
) -> list[KeyValuePool]:
    """Return one pool per layer, adjacent in memory to share huge pages. Raises the same errors as `key_value_pool`."""
    if blocks < 1:
        raise OperandError(f"a cache cannot have {blocks} blocks")
    runs, run = _run_layout(blocks)
    shape = layers, runs, kv_heads, run, kv_block_bytes(format, kv_heads, head_dim) // kv_heads
    data = zeroed(math.prod(shape), large_pages=large_pages).reshape(shape)
    return [KeyValuePool(format, kv_heads, head_dim, blocks, data[layer]) for layer in range(layers)]
