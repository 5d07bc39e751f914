"""The measured upper limits for kernels are valid: all bytes are read, and all products are computed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from notso.qtensor.backends.cpu import ceilings, kernel_choice, ops
from notso.qtensor.backends.cpu.kernel_choice import native
from notso.qtensor.errors import OperandError
from notso.qtensor.formats import Q4_K
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.tensor import QTensor


@pytest.mark.parametrize("family", kernel_choice.available_kernels())
@pytest.mark.parametrize("places", ceilings.PLACES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [64, 7 * 64, (1 << 20) + 64, 5 << 20])
def test_read_memory_reads_every_word_once(size: int, threads: int, places: int, family: str) -> None:
    memory = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before = kernel_choice.threads(), kernel_choice.kernels()
    kernel_choice.set_threads(threads)
    kernel_choice.use_kernels(family)
    try:
        assert native.read_memory(memory, places) == np.bitwise_xor.reduce(memory.view(np.uint64))
    finally:
        kernel_choice.set_threads(before[0])
        kernel_choice.use_kernels(before[1])


def test_read_bandwidth_rejects_invalid_number_of_places() -> None:
    with pytest.raises(OperandError):
        ceilings.read_bandwidth(np.zeros(1 << 20, np.uint8), 3)


@pytest.mark.parametrize("family", kernel_choice.available_kernels())
def test_multiply_bytes_makes_at_least_the_requested_products(family: str) -> None:
    before = kernel_choice.kernels()
    kernel_choice.use_kernels(family)
    try:
        least = native.multiply_bytes(1)  # one round by every thread
        assert 10_000_000 <= native.multiply_bytes(10_000_000) < 10_000_000 + least
        assert ceilings.byte_product_rate() > 1e6
    finally:
        kernel_choice.use_kernels(before)


def test_better_kernel_family_multiplies_faster() -> None:
    """Otherwise, the loop would not measure the families' instructions."""
    before = kernel_choice.kernels()
    families = [name for name in kernel_choice.available_kernels() if name in ("avx2", "avxvnni", "avx512", "amx")]
    best = dict.fromkeys(families, 0.0)
    for _ in range(30):  # repeated until other load does not affect the better family
        for family in families:
            kernel_choice.use_kernels(family)
            best[family] = max(best[family], ceilings.byte_product_rate())
        if list(best.values()) == sorted(best.values(), reverse=True):
            break
    kernel_choice.use_kernels(before)
    assert list(best.values()) == sorted(best.values(), reverse=True), best


def test_matmul_does_not_exceed_the_measured_ceiling() -> None:
    rows, width, columns = 2048, 2048, 256
    blocks = random_blocks(Q4_K, rows * width // 256, np.random.default_rng(1)).reshape(-1)
    weight = QTensor("w", Q4_K, (rows, width), blocks)
    x, out = np.random.default_rng(2).standard_normal((columns, width), np.float32), ops.empty(columns, rows)
    fastest = ceiling = 0.0
    for _ in range(20):  # repeated until other load does not affect the loop
        started = time.perf_counter()
        ops.matmul(x, weight, out)
        fastest = max(fastest, rows * width * columns / (time.perf_counter() - started))
        ceiling = max(ceiling, ceilings.byte_product_rate())
        if fastest < ceiling:
            break
    assert fastest < ceiling


@pytest.mark.parametrize("memory", [np.zeros(100, np.uint8), np.zeros((2, 1 << 20), np.uint8), np.zeros(1 << 20)])
def test_read_bandwidth_rejects_invalid_arrays(memory: np.ndarray) -> None:
    with pytest.raises(OperandError):
        ceilings.read_bandwidth(memory)
