"""Tensors copied to anonymous memory on 2 MiB pages, packed if the processor's kernels support it.

A mapped file uses 4 KiB pages (a fifth of them larger on some file systems); page table walks slow decoding down by a
quarter to a third. A packed tensor has the same bytes in the order in which vectors are loaded
(native/packed_weights.h), so results are bit-identical.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.kernel_choice import is_packed, native
from notso.qtensor.errors import QTensorError
from notso.qtensor.formats import Format
from notso.qtensor.tensor import QTensor
from notso.system.pages import have_huge_pages, use_huge_pages

PAGE_BYTES = 2 << 20
TENSOR_ALIGNMENT = 4096  # each tensor begins on a page, so that no two share a cache line
COPY_BYTES = 8 << 20  # copied at a time, without the interpreter's lock
SLAB_ROWS = 64  # native/packed_weights.h; smaller tensors are not packed, as the last 32 rows are padded
SUPER_BLOCK = 256  # values of a packed block

LARGE_BYTES = 4 << 20  # minimum size for huge pages, because the last one is only partly used


def zeroed(size: int, *, large_pages: bool = True) -> npt.NDArray[np.uint8]:
    """Return `size` zero bytes whose pages are allocated when first written.

    Large sizes use 2 MiB pages where available, unless `large_pages` is False, which suits sparsely written memory.
    Raise
    QTensorError if there is not enough address space.
    """
    large = large_pages and size >= LARGE_BYTES and have_huge_pages()
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
    """A tensor in slabs of 64 rows, `slab_stride` bytes apart; an operand of the operations alone."""

    name: str
    format: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # from its first slab to its end; other tensors' slabs may lie between
    slab_stride: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]


class HugePageArena:
    """Memory for a known amount of tensors, allocated page by page as tensors are copied."""

    def __init__(self, tensor_bytes: int, tensor_count: int) -> None:
        """Reserve address space for `tensor_count` tensors of `tensor_bytes` in total. Raise QTensorError."""
        # Packing pads the last 32 rows; address space that is not used takes no memory.
        size = tensor_bytes + tensor_bytes // 4 + tensor_count * TENSOR_ALIGNMENT + PAGE_BYTES
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            use_huge_pages(memory)
        except (OSError, ValueError) as error:
            raise QTensorError(f"cannot allocate huge pages: {error}") from error
        self._bytes = np.frombuffer(memory, np.uint8)
        self._used = -self._bytes.ctypes.data % PAGE_BYTES
        self._packed = False

    @property
    def layout(self) -> str:
        """ "packed", or "hugepages" if rows are as in the file."""
        return "packed" if self._packed else "hugepages"

    def copy(self, *tensors: QTensor) -> tuple[QTensor | PackedTensor, ...]:
        """Return copies of the tensors in this arena; slabs of tensors with equal rows are interleaved.

        Raises QTensorError if it is full.
        """
        if not all(_can_be_packed(tensor) for tensor in tensors):
            return tuple(self._copied(tensor) for tensor in tensors)
        if len({tensor.rows for tensor in tensors}) > 1:
            return tuple(each for tensor in tensors for each in self.copy(tensor))
        slabs = [_packed_bytes(tensor, SLAB_ROWS, 1) for tensor in tensors]
        stride = sum(slabs)
        sizes = [_packed_bytes(tensor, tensor.rows, stride) for tensor in tensors]
        begins = [sum(slabs[:i]) for i in range(len(slabs))]
        room = self._room(tensors[0].name, max(begin + size for begin, size in zip(begins, sizes, strict=True)))
        places = [room[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        for tensor, data in zip(tensors, places, strict=True):
            native.pack_weight(tensor.data, tensor.format.ggml_type, tensor.rows, tensor.cols, stride, data)
            data.flags.writeable = False
        self._packed = True
        return tuple(
            PackedTensor(tensor.name, tensor.format, tensor.shape, data, stride)
            for tensor, data in zip(tensors, places, strict=True)
        )

    def _copied(self, tensor: QTensor) -> QTensor:
        data = self._room(tensor.name, tensor.nbytes)
        for at in range(0, tensor.nbytes, COPY_BYTES):
            np.copyto(data[at : at + COPY_BYTES], tensor.data[at : at + COPY_BYTES])
        data.flags.writeable = False
        return QTensor(tensor.name, tensor.format, tensor.shape, data)

    def _room(self, name: str, size: int) -> npt.NDArray[np.uint8]:
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
