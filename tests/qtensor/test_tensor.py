"""Tensors validate their size, and give access to rows without copying."""

from __future__ import annotations

import numpy as np
import pytest

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import F32, Q4_K, Q8_0
from notso.qtensor.tensor import QTensor


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_tensor_reports_rows_columns_and_bytes() -> None:
    tensor = QTensor.quantize(numbers(2, 3, 512), Q4_K, "w")
    assert (tensor.rows, tensor.cols, tensor.row_bytes, tensor.nbytes) == (6, 512, 288, 1728)
    one = QTensor.quantize(numbers(64), Q8_0)
    assert (one.rows, one.cols) == (1, 64)


def test_row_data_is_a_view() -> None:
    tensor = QTensor.quantize(numbers(4, 256), Q4_K)
    assert np.shares_memory(tensor.row_data(1, 3), tensor.data)
    assert tensor.row_data(1, 3).shape == (2, 144)
    assert tensor.row_data(4, 4).shape == (0, 144)


def test_dequantize_accepts_a_range_of_rows() -> None:
    tensor = QTensor.quantize(numbers(5, 256), Q8_0)
    np.testing.assert_array_equal(tensor.dequantize(2, 4), tensor.dequantize()[2:4])
    np.testing.assert_allclose(tensor.dequantize(), numbers(5, 256), atol=0.02)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6), (6, 6)])
def test_rows_out_of_range_are_rejected(start: int, stop: int) -> None:
    tensor = QTensor.quantize(numbers(5, 256), Q8_0)
    with pytest.raises(OperandError):
        tensor.row_data(start, stop)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((), np.zeros(4, np.uint8)),
        ((0, 256), np.zeros(0, np.uint8)),
        ((1, 255), np.zeros(144, np.uint8)),
        ((1, 256), np.zeros(143, np.uint8)),
        ((1, 256), np.zeros(145, np.uint8)),
        ((1, 256), np.zeros(144, np.int8)),
        ((1, 256), np.zeros((1, 144), np.uint8)),
        ((1, 256), np.zeros(288, np.uint8)[::2]),
    ],
)
def test_mismatched_shape_and_data_are_rejected(shape: tuple[int, ...], data: np.ndarray) -> None:
    with pytest.raises(OperandError):
        QTensor("w", Q4_K, shape, data)


def test_as_float32_copies_only_unaligned_data() -> None:
    values = numbers(3, 5)
    raw = np.frombuffer(values.tobytes(), np.uint8)
    tensor = QTensor("w", F32, (3, 5), raw)
    np.testing.assert_array_equal(tensor.as_float32(), values)
    assert np.shares_memory(tensor.as_float32(), raw)
    shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    apart = QTensor("w", F32, (3, 5), shifted).as_float32()
    np.testing.assert_array_equal(apart, values)
    assert apart.flags.aligned
    with pytest.raises(OperandError):
        QTensor.quantize(numbers(256), Q8_0).as_float32()


def test_quantize_rejects_empty_arrays_and_scalars() -> None:
    for empty in (np.zeros(0, np.float32), np.zeros((0, 256), np.float32), np.float32(1)):
        with pytest.raises(OperandError):
            QTensor.quantize(empty, Q8_0)
