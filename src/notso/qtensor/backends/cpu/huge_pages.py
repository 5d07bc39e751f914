"""Tensors in anonymous memory on 2 MiB pages, which kernels read at the full memory bandwidth.

A mapped file uses 4 KiB pages (a fifth of them larger on some file systems); page table walks slow decoding down by a
quarter to a third. The copy has the same bytes, so results are identical.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor.errors import QTensorError
from notso.qtensor.tensor import QTensor

PAGE_BYTES = 2 << 20
TENSOR_ALIGNMENT = 4096  # each tensor begins on a page, so that no two share a cache line
COPY_BYTES = 8 << 20  # copied at a time, without the interpreter's lock

LARGE_BYTES = 4 << 20  # minimum size for huge pages, because the last one is only partly used

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def available() -> bool:
    """Return whether the kernel provides 2 MiB pages on request."""
    try:
        return "[never]" not in _POLICY.read_text() and hasattr(mmap, "MADV_HUGEPAGE")
    except OSError:
        return False


def zeroed(size: int, *, large_pages: bool = True) -> npt.NDArray[np.uint8]:
    """Return `size` zero bytes whose pages are allocated when first written.

    Large sizes use 2 MiB pages where available, unless `large_pages` is False, which suits sparsely written memory.
    Raise
    QTensorError if there is not enough address space.
    """
    large = large_pages and size >= LARGE_BYTES and available()
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES * large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if large:
            memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, OverflowError) as error:
        raise QTensorError(f"cannot allocate {size} bytes: {error}") from error
    view = np.frombuffer(memory, np.uint8)
    start = -view.ctypes.data % PAGE_BYTES if large else 0
    return view[start : start + size]


class HugePageArena:
    """Memory for a known amount of tensors, allocated page by page as tensors are copied."""

    def __init__(self, tensor_bytes: int, tensor_count: int) -> None:
        """Reserve address space for `tensor_count` tensors of `tensor_bytes` in total. Raise QTensorError."""
        size = tensor_bytes + tensor_count * TENSOR_ALIGNMENT + PAGE_BYTES
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError, AttributeError) as error:
            raise QTensorError(f"cannot allocate huge pages: {error}") from error
        self._bytes = np.frombuffer(memory, np.uint8)
        self._used = -self._bytes.ctypes.data % PAGE_BYTES

    def copy(self, tensor: QTensor) -> QTensor:
        """Return a copy of the tensor in this arena. Raise QTensorError if it is full."""
        start = -(-self._used // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        if start + tensor.nbytes > self._bytes.size:
            raise QTensorError(f"tensor {tensor.name!r} does not fit in the reserved memory")
        self._used = start + tensor.nbytes
        data = self._bytes[start : self._used]
        for at in range(0, tensor.nbytes, COPY_BYTES):
            np.copyto(data[at : at + COPY_BYTES], tensor.data[at : at + COPY_BYTES])
        data.flags.writeable = False
        return QTensor(tensor.name, tensor.format, tensor.shape, data)


def huge_page_bytes() -> int:
    """Return the anonymous memory of this process on huge pages (0 if unknown)."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
