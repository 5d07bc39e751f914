"""Measure upper limits of kernel speed on this machine: memory bandwidth and byte multiplications per second."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.kernel_choice import native
from notso.qtensor.errors import OperandError

WINDOW_BYTES = 1 << 26
"""Bytes per measurement (window). At 40 to 60 GB/s, a window takes one to two milliseconds. Only the fastest window
counts, because memory speed may change within seconds, and other programs may slow a window down."""

WINDOW_SECONDS, WINDOWS = 1.5e-3, 32
"""Seconds per measurement of byte products, and the number of measurements."""


PLACES = (1, 2, 4)
"""Allowed values of `places`, the number of positions from which a thread reads alternately. With 1, it reads
sequentially. Most processors prefetch only within a page, so they are faster when they read from several positions."""


def read_bandwidth(memory: npt.NDArray[np.uint8], places: int = 1) -> float:
    """Return the combined read bandwidth of the kernels' threads in bytes per second.

    `memory` is a contiguous 1-D uint8 array of at least 1 MiB; each thread reads from `places` positions alternately.
    Raises OperandError for other arguments.
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


def byte_product_rate() -> float:
    """Return the byte products per second that all threads compute in registers (best of several runs)."""
    rate = _products_rate(1)
    for _ in range(WINDOWS):
        rate = max(rate, _products_rate(int(rate * WINDOW_SECONDS) + 1))
    return rate


def _products_rate(at_least: int) -> float:
    started = time.perf_counter()
    count: int = native.multiply_bytes(at_least)
    return count / (time.perf_counter() - started)
