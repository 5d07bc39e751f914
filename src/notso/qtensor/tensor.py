"""Tensors in block formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import F32, Format, row_bytes
from notso.qtensor.reference import blocks


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A tensor whose rows consist of blocks. Raises OperandError for inconsistent arguments."""

    # `shape` is in numpy order, row length last (the reverse of GGUF). `data` is contiguous uint8 of size `nbytes`; for
    # a tensor from a file, it is a read-only view of the memory-mapped file.
    name: str
    format: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    slab_stride: ClassVar[int] = 0  # 0: rows are stored one after another, as in a file

    def __post_init__(self) -> None:
        if not self.shape or any(n < 1 for n in self.shape):
            raise OperandError(f"tensor {self.name!r}: shape {self.shape} has no dimension, or one of size 0")
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise OperandError(f"tensor {self.name!r}: data must be contiguous one-dimensional uint8")
        if self.data.size != self.rows * row_bytes(self.format, self.cols):
            raise OperandError(
                f"tensor {self.name!r}: {self.data.size} bytes given, but "
                f"shape {self.shape} in {self.format.name} takes {self.rows * self.row_bytes}"
            )

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.format, self.cols)

    @property
    def nbytes(self) -> int:
        return self.data.size

    def row_data(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Return rows start..stop-1 as a (rows, row_bytes) uint8 view. Raises OperandError."""
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise OperandError(f"rows {start}..{stop - 1} are outside the {self.rows} rows of tensor {self.name!r}")
        return self.data[start * self.row_bytes : stop * self.row_bytes].reshape(stop - start, self.row_bytes)

    def dequantize(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Return rows start..stop-1 as (rows, cols) float32. Raises OperandError."""
        return blocks.dequantize(self.format, self.row_data(start, stop))

    def as_float32(self) -> npt.NDArray[np.float32]:
        """Return an F32 tensor's array, copied only if unaligned. Raises OperandError for other formats."""
        if self.format != F32:
            raise OperandError(f"tensor {self.name!r} must be F32, not {self.format.name}")
        values = self.data.view(np.dtype("<f4"))
        return np.require(values, np.float32, ["C", "A"]).reshape(self.shape)

    @classmethod
    def quantize(
        cls,
        values: npt.NDArray[np.float32],
        format: Format,
        name: str = "",
        importance: npt.NDArray[np.float32] | None = None,
    ) -> QTensor:
        """Quantize float32 `values`. Raises OperandError like `blocks.quantize`."""
        array = np.asarray(values, np.float32)
        if array.ndim < 1 or array.size == 0:
            raise OperandError(f"tensor {name!r}: shape {array.shape} has no dimension, or one of size 0")
        try:
            packed = blocks.quantize(format, array.reshape(-1, array.shape[-1]), importance)
        except OperandError as error:
            if not name:
                raise
            raise OperandError(f"tensor {name!r}: {error}") from error
        return cls(name, format, array.shape, packed.reshape(-1))
