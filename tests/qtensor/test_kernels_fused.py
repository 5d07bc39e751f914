"""Norm, addition and gate fused into a matrix product give the bits of separate operations, in every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import FORMATS, Format
from notso.qtensor.tensor import QTensor

EPS = 1e-5

Floats = npt.NDArray[np.float32]
Make = Callable[..., QTensor]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)

# (columns, rows, inputs): vectors and tiles, remainders of rows, and more rows than a panel of tiles
SIZES = ((1, 5, 256), (1, 37, 768), (4, 16, 512), (9, 33, 256), (23, 70, 512), (64, 130, 256), (130, 48, 256))


def product(x: Floats, weight: QTensor) -> Floats:
    out = np.full((len(x), weight.rows), np.nan, np.float32)
    ops.matmul(x, weight, out)
    return out


def normed(x: Floats, norm: Floats) -> Floats:
    out = np.empty_like(x)
    ops.rms_norm(x, norm, EPS, out)
    return out


@each_format
def test_fused_norm_matches_separate_operations(format: Format, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng([1, format.ggml_type])
    for columns, rows, cols in SIZES:
        x, norm = rng.standard_normal((columns, cols), np.float32), rng.uniform(0.5, 2, cols).astype(np.float32)
        weights = [make_weight(format, rows, cols, rng), make_weight(format, 3, cols, rng)]

        def fused(x: Floats = x, norm: Floats = norm, weights: list[QTensor] = weights) -> Floats:
            outs = [np.full((len(x), w.rows), np.nan, np.float32) for w in weights]
            ops.matmul_many(x, list(zip(weights, outs, strict=True)), norm=ops.RMSNorm(norm, EPS))
            return np.concatenate(outs, axis=1)

        expected = np.concatenate([product(normed(x, norm), w) for w in weights], axis=1)
        np.testing.assert_array_equal(every_family(fused), expected)


@each_format
def test_fused_addition_matches_separate_operations(format: Format, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng([2, format.ggml_type])
    for columns, rows, cols in SIZES:
        weight, x = make_weight(format, rows, cols, rng), rng.standard_normal((columns, cols), np.float32)
        before = rng.standard_normal((columns, rows), np.float32)

        def fused(x: Floats = x, weight: QTensor = weight, before: Floats = before) -> Floats:
            out = before.copy()
            ops.matmul_add(x, weight, out)
            return out

        np.testing.assert_array_equal(every_family(fused), before + product(x, weight))


@each_format
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
def test_fused_gate_matches_separate_operations(
    format: Format, with_norm: bool, make_weight: Make, every_family: Every
) -> None:
    rng = np.random.default_rng([3, format.ggml_type])
    for columns, rows, cols in SIZES:
        gate, up = make_weight(format, rows, cols, rng), make_weight(format, rows, cols, rng)
        x, norm = rng.standard_normal((columns, cols), np.float32), rng.uniform(0.5, 2, cols).astype(np.float32)

        def fused(x: Floats = x, norm: Floats = norm, gate: QTensor = gate, up: QTensor = up) -> Floats:
            out = np.full((len(x), gate.rows), np.nan, np.float32)
            ops.matmul_gated(x, gate, up, out, norm=ops.RMSNorm(norm, EPS) if with_norm else None)
            return out

        inner = normed(x, norm) if with_norm else x
        expected = np.empty((columns, rows), np.float32)
        ops.silu_mul(product(inner, gate), product(inner, up), expected)
        np.testing.assert_array_equal(every_family(fused), expected)


def test_gate_and_up_may_have_different_formats(make_weight: Make, every_family: Every) -> None:
    """Q4_K together with Q6_K, as in the official file, and float weights with both."""
    rng = np.random.default_rng(4)
    gates = [make_weight(f, 40, 512, rng) for f in FORMATS.values()]
    ups = gates[1:] + gates[:1]
    for columns in (1, 20):
        x = rng.standard_normal((columns, 512), np.float32)
        for gate, up in zip(gates, ups, strict=True):

            def fused(x: Floats = x, gate: QTensor = gate, up: QTensor = up) -> Floats:
                out = np.full((len(x), 40), np.nan, np.float32)
                ops.matmul_gated(x, gate, up, out)
                return out

            expected = np.empty((columns, 40), np.float32)
            ops.silu_mul(product(x, gate), product(x, up), expected)
            np.testing.assert_array_equal(every_family(fused), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_count_does_not_change_gated_matmul(threads: int, make_weight: Make, every_family: Every) -> None:
    rng = np.random.default_rng(5)
    gate, up = (make_weight(FORMATS[12], 1000, 1024, rng) for _ in range(2))
    norm = rng.uniform(0.5, 2, 1024).astype(np.float32)
    for columns in (1, 6, 40):
        x = rng.standard_normal((columns, 1024), np.float32)
        kernel_choice.set_threads(1)
        expected = np.empty((columns, 1000), np.float32)
        ops.silu_mul(product(normed(x, norm), gate), product(normed(x, norm), up), expected)
        kernel_choice.set_threads(threads)

        def fused(x: Floats = x) -> Floats:
            out = np.full((len(x), 1000), np.nan, np.float32)
            ops.matmul_gated(x, gate, up, out, norm=ops.RMSNorm(norm, EPS))
            return out

        np.testing.assert_array_equal(every_family(fused), expected)
