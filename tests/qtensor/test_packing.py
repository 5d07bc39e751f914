"""Packed weights give the results of unpacked ones: unpacking, products, interleaved gate weights, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from twins import PACKED, packed_twin, same_bits

from notso.qtensor import HugePageArena, QTensorError
from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.backends.cpu.huge_pages import PackedTensor
from notso.qtensor.formats import F32, FORMATS_BY_NAME, Q4_K, Q6_K, Format
from notso.qtensor.tensor import QTensor

Make = Callable[..., QTensor]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]
each_packed = pytest.mark.parametrize("format", [FORMATS_BY_NAME[name] for name in PACKED], ids=str)


@each_packed
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 96, 128, 150])
def test_packed_rows_equal_the_original_rows(format: Format, rows: int, make_weight: Make) -> None:
    for cols in (256, 768):
        weight = make_weight(format, rows, cols, np.random.default_rng([rows, cols]), "wild")
        for gap in (0, 64, 4096):
            ids = np.arange(rows, dtype=np.int32)[::-1].copy()
            expected, out = np.empty((rows, cols), np.float32), np.empty((rows, cols), np.float32)
            ops.embed_rows(weight, ids, expected)
            ops.embed_rows(packed_twin(weight, gap), ids, out)
            assert same_bits(out, expected)


@each_packed
def test_packed_padding_rows_are_zero(format: Format, make_weight: Make) -> None:
    """Padding rows are zero, whatever the memory contained before."""
    weight = make_weight(format, 17, 512, np.random.default_rng(1))
    data = packed_twin(weight).data
    lines = data.reshape(-1, 32, 4)  # 32-bit words of 32 rows
    assert not lines[-1, 17:].any() and lines[-1, :17].any()


@each_packed
@pytest.mark.parametrize("columns", [1, 3, 5, 33])
def test_interleaved_gate_and_up_match_unpacked_weights(
    format: Format, columns: int, make_weight: Make, every_family: Every
) -> None:
    rng = np.random.default_rng(columns)
    gate, up = make_weight(format, 208, 768, rng), make_weight(Q6_K, 208, 768, rng)
    x = rng.standard_normal((columns, 768), np.float32)

    def compute() -> npt.NDArray[Any]:
        expected, gated = np.empty((columns, 208), np.float32), np.empty((columns, 208), np.float32)
        ops.matmul_gated(x, gate, up, expected)
        for pair in (in_turns(gate, up), (packed_twin(gate), packed_twin(up)), (packed_twin(gate), up)):
            ops.matmul_gated(x, *pair, gated)
            assert same_bits(gated, expected)
        outs = [np.empty_like(expected) for _ in range(4)]
        one, other = in_turns(gate, up)
        ops.matmul_many(x, [(one, outs[0]), (gate, outs[1]), (other, outs[2]), (up, outs[3])])
        assert same_bits(outs[0], outs[1]) and same_bits(outs[2], outs[3])
        return gated

    every_family(compute)


def in_turns(*weights: QTensor) -> list[PackedTensor]:
    """Interleave packed weights as an arena does, with any kernels selected."""
    alone = [packed_twin(weight) for weight in weights]
    stride = sum(each.slab_stride for each in alone)
    room = np.full(-(-weights[0].rows // 64) * stride, 0xA5, np.uint8)
    found, begin = [], 0
    for weight, each in zip(weights, alone, strict=True):
        size = kernel_choice.native.packed_bytes(weight.format.ggml_type, weight.rows, weight.cols, stride)
        data = room[begin : begin + size]
        kernel_choice.native.pack_weight(weight.data, weight.format.ggml_type, weight.rows, weight.cols, stride, data)
        found.append(PackedTensor(weight.name, weight.format, weight.shape, data, stride))
        begin += each.slab_stride
    return found


def test_arena_packs_formats_supported_by_the_kernels(make_weight: Make) -> None:
    rng = np.random.default_rng(3)
    gate, up, low = (make_weight(Q4_K, rows, 512, rng) for rows in (160, 160, 40))
    norm = QTensor.quantize(rng.standard_normal((1, 512)).astype(np.float32), F32)
    for family in kernel_choice.available_kernels():
        kernel_choice.use_kernels(family)
        arena = HugePageArena(4 * gate.nbytes, 5)
        assert arena.layout == "hugepages"
        (alone,) = arena.copy(low)
        assert isinstance(alone, QTensor) and np.array_equal(alone.data, low.data)
        pair, takes = arena.copy(gate, up), kernel_choice.is_packed(Q4_K)
        assert arena.layout == ("packed" if takes else "hugepages")
        x, ids = rng.standard_normal((2, 512), np.float32), np.array([0, 159, 64], np.int32)
        for weight, copy in zip((gate, up), pair, strict=True):
            assert isinstance(copy, PackedTensor) == takes and not copy.data.flags.writeable
            outs = np.empty((2, 2, 160), np.float32)
            rows = np.empty((2, 3, 512), np.float32)
            for each, out, row in zip((weight, copy), outs, rows, strict=True):
                ops.matmul(x, each, out)
                ops.embed_rows(each, ids, row)
            assert same_bits(*outs) and same_bits(*rows)
        assert isinstance(arena.copy(norm)[0], QTensor)
        unlike = arena.copy(gate, make_weight(Q4_K, 64, 512, rng))
        assert [copy.rows for copy in unlike] == [160, 64]
        with pytest.raises(QTensorError, match="reserved"):
            for _ in range(100):
                arena.copy(gate)


def test_invalid_packed_tensor_is_rejected(make_weight: Make) -> None:
    weight = make_weight(Q4_K, 70, 512, np.random.default_rng(4))
    x, out = np.ones((1, 512), np.float32), np.empty((1, 70), np.float32)
    twin = packed_twin(weight)
    for data, stride in (
        (twin.data[:-64], twin.slab_stride),
        (twin.data, twin.slab_stride - 64),
        (twin.data, -twin.slab_stride),
        (twin.data, 1 << 62),
        (weight.data, twin.slab_stride),
    ):
        with pytest.raises(ops.OperandError):
            ops.matmul(x, PackedTensor("w", Q4_K, (70, 512), data, stride), out)
    plain = QTensor.quantize(np.ones((70, 512), np.float32), F32)
    with pytest.raises(ops.OperandError, match="cannot be packed"):
        ops.matmul(x, PackedTensor("w", F32, (70, 512), plain.data, 1 << 20), out)
