"""Tensors copied to anonymous memory on 2 MiB pages, where the kernels read them at the full speed of the memory.

A mapped file lies on 4 KiB pages (a fifth of them larger, on file systems that can), and walking their table costs
decoding a quarter to a third of its speed. The copy has the same bytes, so results are the same bit for bit.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor.errors import QTensorError
from notso.qtensor.tensor import QTensor

PAGE_BYTES = 2 << 20
TENSOR_ALIGNMENT = 4096  # each tensor begins on a small page, so that none shares a cache line with another
COPY_BYTES = 8 << 20  # one piece of a copy; the interpreter's lock is free while it lasts

LARGE_BYTES = 4 << 20  # from here on zeroed memory asks for large pages: the last one is only partly used

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def available() -> bool:
    """Whether the kernel gives 2 MiB pages to memory that asks for them."""
    try:
        return "[never]" not in _POLICY.read_text() and hasattr(mmap, "MADV_HUGEPAGE")
    except OSError:
        return False


def zeroed(size: int, *, large_pages: bool = True) -> npt.NDArray[np.uint8]:
    """`size` bytes of zeros that take memory page by page as they are first written.

    Large ones lie on 2 MiB pages where the system has them and unless `large_pages` is False: for what is written here
    and there, and mostly never. Raises QTensorError when there is no room for them.
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
    """Room for a known amount of tensors. Memory is taken page by page as tensors are copied in."""

    def __init__(self, tensor_bytes: int, tensor_count: int) -> None:
        """Reserve address space for `tensor_count` tensors of `tensor_bytes` together. Raises QTensorError."""
        size = tensor_bytes + tensor_count * TENSOR_ALIGNMENT + PAGE_BYTES
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError, AttributeError) as error:
            raise QTensorError(f"cannot allocate huge pages: {error}") from error
        self._bytes = np.frombuffer(memory, np.uint8)
        self._used = -self._bytes.ctypes.data % PAGE_BYTES

    def copy(self, tensor: QTensor) -> QTensor:
        """The same tensor, its bytes in this arena. Raises QTensorError when the arena is full."""
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
    """Anonymous memory of this process that lies on huge pages (0 where the system does not say)."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))
