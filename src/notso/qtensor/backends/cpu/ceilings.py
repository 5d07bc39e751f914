"""Ceilings for kernels on this machine: memory bandwidth and byte products."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.kernel_choice import native
from notso.qtensor.errors import OperandError

WINDOW_BYTES = 1 << 26
"""Bytes per measurement: one to two milliseconds at 40 to 60 GB/s. The best window counts, because the speed of the
memory may change within seconds and other programs take the processor."""

WINDOW_SECONDS, WINDOWS = 1.5e-3, 32
"""Length of a measurement of products, and their number."""


PLACES = (1, 2, 4)
"""Positions at which a thread reads at a time; 1 is sequential. Most processors prefetch page by page, and read faster
at several."""


def read_bandwidth(memory: npt.NDArray[np.uint8], places: int = 1) -> float:
    """Return the bytes per second at which the kernels' threads read `memory` (uint8, 1-D, contiguous), each at
    `places`
    positions at a time: the best window of one pass.

    Raise OperandError for another array, one that is too small, or a number of places not in PLACES.
    """
    if memory.ndim != 1 or memory.dtype != np.uint8 or not memory.flags.c_contiguous or memory.size < 1 << 20:
        raise OperandError("the data must be a contiguous array of at least 1 MiB")
    if places not in PLACES:
        raise OperandError(f"places must be one of {PLACES}, not {places}")
    size = min(memory.size, WINDOW_BYTES)
    best = 0.0
    for start in range(0, memory.size - size + 1, size):
        started = time.perf_counter()
        native.read_memory(memory[start : start + size], places)
        best = max(best, size / (time.perf_counter() - started))
    return best


def byte_products(at_least: int | None = None) -> float:
    """Return the total products of bytes per second with the current kernels and threads and operands in registers: the
    best of several windows of about a millisecond, or one measurement of `at_least` products.

    The rate in operations (TF/s) is twice that. Raise OperandError unless `at_least` is 1 or more.
    """
    if at_least is not None and at_least < 1:
        raise OperandError("there are no operands to multiply")
    if at_least is not None:
        return _products_rate(at_least)
    rate = _products_rate(1)
    for _ in range(WINDOWS):
        rate = max(rate, _products_rate(int(rate * WINDOW_SECONDS) + 1))
    return rate


def _products_rate(at_least: int) -> float:
    started = time.perf_counter()
    made = native.multiply_bytes(at_least)
    return float(made) / (time.perf_counter() - started)
