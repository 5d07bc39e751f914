"""What no kernel can exceed on this machine: how fast memory is read, and how many bytes are multiplied."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.kernel_choice import native
from notso.qtensor.errors import OperandError

WINDOW_BYTES = 1 << 26
"""What is read between two looks at the clock: one to two milliseconds where memory gives 40 to 60 GB/s. A machine's
memory may change its pace between two seconds, and others take the processor: the best window is what it can do."""

WINDOW_SECONDS, WINDOWS = 1.5e-3, 32
"""How long products are made between two looks at the clock, and how many times."""


PLACES = (1, 2, 4)
"""In how many places at a time a thread may read. In order (1) is the usual way; most processors fetch ahead page by
page, and read faster in several."""


def read_bandwidth(memory: npt.NDArray[np.uint8], places: int = 1) -> float:
    """Bytes per second at which the kernels' threads read `memory` (uint8, 1-D, contiguous), each in `places` places at
    a time: the best window of one reading of all.

    Raises OperandError for another array, one too small to take any time, or another number of places than PLACES has.
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
    """Products of bytes per second, added up, with the instructions and threads in force and operands in registers:
    the best of some windows of about a millisecond, or one measurement of `at_least` products.

    Twice that is the rate in operations, as TF/s count. Raises OperandError unless `at_least` is 1 or more.
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
