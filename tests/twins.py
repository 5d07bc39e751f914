"""Comparison of bits for kernel tests, and packing of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu import kernel_choice
from notso.qtensor.backends.cpu.huge_pages import SLAB_ROWS, PackedTensor
from notso.qtensor.tensor import QTensor


def same_bits(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Return whether arrays are equal bit for bit, including signs of zero; NaN equals any NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype != np.float32:
        return bool(np.array_equal(one, other))
    nan = np.isnan(one)
    return bool(np.array_equal(nan, np.isnan(other)) and np.array_equal(one[~nan].view("u4"), other[~nan].view("u4")))


PACKED = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")


def packed_twin(weight: QTensor, gap: int = 0) -> PackedTensor:
    """Return the weight in slabs with `gap` bytes between them, even if the current kernels do not support packing."""
    native, number = kernel_choice.native, weight.format.ggml_type
    stride = native.packed_bytes(number, SLAB_ROWS, weight.cols, 1 << 30) + gap
    data = np.full(native.packed_bytes(number, weight.rows, weight.cols, stride), 0xA5, np.uint8)
    native.pack_weight(weight.data, number, weight.rows, weight.cols, stride, data)
    return PackedTensor(weight.name, weight.format, weight.shape, data, stride)
