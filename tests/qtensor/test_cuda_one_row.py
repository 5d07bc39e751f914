"""Products of one row (decoding) on the GPU, fused with neighboring operations, give the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from stub_gpu.gpu import emulated_gpu

from notso.qtensor import CPU, FORMATS_BY_NAME, Backend, RMSNorm
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.tensor import QTensor

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub

BLOCKS_OF_256, BLOCKS_OF_32 = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ3_XXS"), ("Q8_0", "Q4_0", "Q4_1", "Q5_1")
ROWS = 50, 17, 16  # the last tile of sixteen rows is partial or complete
FAULTS = {"ordinary": 1.0, "not a number": np.nan, "infinite": np.inf, "zero": 0.0}


def weight(backend: Backend, name: str, rows: int, columns: int) -> object:
    format = FORMATS_BY_NAME[name]
    blocks = random_blocks(format, rows * columns // format.block_values, np.random.default_rng(rows))
    return backend.weight(QTensor(name, format, (rows, columns), blocks.reshape(-1)))


def assert_equal(work: Callable[[Backend], list[np.ndarray]]) -> None:
    ours, theirs = work(emulated_gpu()), work(CPU.configured())
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("formats", "columns"),
    [
        *(((name,) * 3, 2816) for name in BLOCKS_OF_256),
        *(((name,) * 3, 2848) for name in BLOCKS_OF_32),
        *((("Q4_K", name, "Q4_K"), 512) for name in ("Q6_K", "Q8_0", "F32")),
    ],
)
def test_one_row_products_match_the_cpu(formats: tuple[str, str, str], columns: int, normed: bool) -> None:
    def work(backend: Backend) -> list[np.ndarray]:
        rng = np.random.default_rng(3)
        x = backend.upload(rng.standard_normal((1, columns), np.float32))
        norm = RMSNorm(backend.upload(rng.standard_normal(columns, np.float32)), 1e-6) if normed else None
        weights = [weight(backend, *facts, columns) for facts in zip(formats, ROWS, strict=True)]
        outs = [backend.empty(1, rows) for rows in (*ROWS, ROWS[0])]
        backend.matmul_many(x, list(zip(weights, outs, strict=False)), norm=norm)
        backend.matmul_gated(x, weights[0], weight(backend, formats[1], ROWS[0], columns), outs[3], norm=norm)
        backend.matmul_add(x, weights[0], outs[3])
        return [backend.download(out) for out in outs]

    assert_equal(work)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_row_products_of_special_values_match_the_cpu(fault: str) -> None:
    def work(backend: Backend) -> list[np.ndarray]:
        values = np.random.default_rng(3).standard_normal((1, 512), np.float32)
        values[0, 300] = FAULTS[fault]
        values[0, :256] *= FAULTS[fault] == 1
        outs = [backend.empty(1, 50) for _ in range(2)]
        weights = [weight(backend, name, 50, 512) for name in ("Q4_K", "Q8_0")]
        backend.matmul_many(backend.upload(values), list(zip(weights, outs, strict=True)))
        return [backend.download(out) for out in outs]

    assert_equal(work)


def test_one_row_product_with_many_outputs_matches_the_cpu() -> None:
    def work(backend: Backend) -> list[np.ndarray]:
        x, out = backend.upload(np.random.default_rng(3).standard_normal((1, 256), np.float32)), backend.empty(1, 33000)
        backend.matmul(x, weight(backend, "Q4_K", 33000, 256), out)
        return [backend.download(out)]

    assert_equal(work)
