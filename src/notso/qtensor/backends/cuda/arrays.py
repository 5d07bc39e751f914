"""Arrays and weights in device memory.

Only the host writes integer arrays (row numbers, positions, block tables), so host copies are always current. Before
each step, the copies are checked, as on the CPU, and changes are uploaded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cuda.driver import Device, DeviceMemory, call_native, weight_bytes
from notso.qtensor.errors import OperandError
from notso.qtensor.tensor import QTensor


class HostMirror:
    """Host copy of an integer array."""

    def __init__(self, values: npt.NDArray[np.int32], memory: DeviceMemory) -> None:
        self.values = values
        self._memory = memory
        self._begin, self._end = 0, 0

    def mark_changed(self, begin: int, end: int) -> None:
        """Mark values begin..end-1 as changed."""
        self._begin, self._end = (
            (min(begin, self._begin), max(end, self._end)) if self._end > self._begin else (begin, end)
        )

    def flush(self) -> None:
        self._memory.upload(self.values[self._begin : self._end], 4 * self._begin)
        self._begin = self._end = 0


class DeviceArray:
    """Row-major array in device memory; slices share the memory."""

    def __init__(
        self,
        memory: DeviceMemory,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        offset: int = 0,
        mirror: HostMirror | None = None,
    ) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.offset = offset
        self.mirror = mirror

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def key(self) -> tuple[object, ...]:
        return self.address, self.shape

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """Values of an integer array. Raises OperandError for other arrays."""
        if self.mirror is None:
            raise OperandError("an integer array is required")
        begin = self.offset // 4
        return self.mirror.values[begin : begin + self.size].reshape(self.shape)

    def __getitem__(self, index: int | slice) -> DeviceArray:
        rows, *rest = self.shape
        row_bytes = math.prod(rest) * self.dtype.itemsize
        if isinstance(index, slice):
            begin, end, step = index.indices(rows)
            if step != 1:
                raise OperandError("only contiguous rows of an array can be selected")
            shape = max(end - begin, 0), *rest
        else:
            begin, shape = range(rows)[index], tuple(rest)
        return DeviceArray(self.memory, shape, self.dtype, self.offset + begin * row_bytes, self.mirror)

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        sizes = shape[0] if isinstance(shape[0], tuple) else shape
        sides = tuple(int(side) for side in sizes if not isinstance(side, tuple))
        if math.prod(sides) != self.size:
            raise OperandError(f"{self.size} values cannot be reshaped to {sides}")
        return DeviceArray(self.memory, sides, self.dtype, self.offset, self.mirror)


class DeviceWeight:
    """A weight in the CUDA kernels' layout. The constructor raises DeviceError."""

    def __init__(self, device: Device, tensor: QTensor) -> None:
        self.memory = DeviceMemory(device, weight_bytes(tensor))
        self.name = tensor.name
        self.rows, self.columns = tensor.rows, tensor.cols
        kind = tensor.format.ggml_type
        self.facts = kind, self.memory.address, self.rows, self.columns
        call_native(device.native.upload_weight, kind, tensor.data, self.rows, self.columns, self.memory.address)
