"""Operations fused into a matmul (norm, gate, addition) give the bits of separate operations, in every family."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import F32, Q4_K, Q6_K, Q8_0, Format
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.tensor import QTensor

EPS = 1e-6
COLUMNS = (1, 2, 7, 8, 9, 16, 23, 130)


@pytest.fixture(params=kernel_choice.available_kernels())
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernel_choice.kernels()
    kernel_choice.use_kernels(request.param)
    yield request.param
    kernel_choice.use_kernels(before)


def weight(format: Format, rows: int, cols: int, seed: int) -> QTensor:
    rng = np.random.default_rng(seed)
    if format == F32:
        return QTensor.quantize(rng.standard_normal((rows, cols)).astype(np.float32) / 30, F32)
    blocks = random_blocks(format, rows * cols // format.block_values, rng, 0.03)
    return QTensor("w", format, (rows, cols), np.ascontiguousarray(blocks).reshape(-1))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("format", [Q4_K, Q6_K, Q8_0, F32], ids=str)
@pytest.mark.parametrize("rows", [48, 150])
def test_fused_matmul_matches_separate_operations(family: str, format: Format, rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((columns, 512)).astype(np.float32)
    norm = ops.RMSNorm(rng.standard_normal(512).astype(np.float32), EPS)
    gate, up = weight(format, rows, 512, 1), weight(format, rows, 512, 2)
    normed, a, b = np.empty_like(x), ops.empty(columns, rows), ops.empty(columns, rows)

    ops.rms_norm(x, norm.weight, EPS, normed)
    ops.matmul_many(normed, [(gate, a), (up, b)])
    fused_a, fused_b = np.empty_like(a), np.empty_like(b)
    ops.matmul_many(x, [(gate, fused_a), (up, fused_b)], norm=norm)
    assert np.array_equal(bits(fused_a), bits(a)) and np.array_equal(bits(fused_b), bits(b))

    expected, gated = np.empty_like(a), np.empty_like(a)
    ops.silu_mul(a, b, expected)
    ops.matmul_gated(x, gate, up, gated, norm=norm)
    assert np.array_equal(bits(gated), bits(expected))

    residual = rng.standard_normal((columns, rows)).astype(np.float32)
    ops.matmul(normed, up, b)
    ops.add(residual, b, expected)
    ops.matmul_add(normed, up, residual)
    assert np.array_equal(bits(residual), bits(expected))


def test_gate_and_up_of_different_shape_are_rejected() -> None:
    with pytest.raises(ops.OperandError):
        ops.matmul_gated(
            np.ones((1, 512), np.float32), weight(Q4_K, 8, 512, 1), weight(Q4_K, 9, 512, 2), ops.empty(1, 8)
        )


def test_norm_of_another_width_is_rejected() -> None:
    norm = ops.RMSNorm(np.ones(256, np.float32), EPS)
    with pytest.raises(ops.OperandError, match="norm"):
        ops.matmul(np.ones((1, 512), np.float32), weight(Q4_K, 8, 512, 1), ops.empty(1, 8), norm=norm)
