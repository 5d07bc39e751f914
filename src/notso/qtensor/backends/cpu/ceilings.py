"""What no kernel can exceed on this machine: how fast memory is read, and how many bytes are multiplied."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu.kernel_choice import native
from notso.qtensor.errors import OperandError

PRODUCTS = 1 << 32
"""Byte products of one measurement: some ten milliseconds on one core with AVX-512, half a second with neither."""


PLACES = (1, 2, 4)
"""In how many places at a time a thread may read. In order (1) is the usual way; most processors fetch ahead page by
page, and read faster in several."""


def read_bandwidth(memory: npt.NDArray[np.uint8], places: int = 1) -> float:
    """Bytes per second at which the kernels' threads read `memory` (uint8, 1-D, contiguous) once, each in `places`
    places at a time.

    Raises OperandError for another array, one too small to take any time, or another number of places than PLACES has.
    """
    if memory.ndim != 1 or memory.dtype != np.uint8 or not memory.flags.c_contiguous or memory.size < 1 << 20:
        raise OperandError("at least a mebibyte of bytes in a row is needed")
    if places not in PLACES:
        raise OperandError(f"memory is read in {PLACES} places at a time, not {places}")
    started = time.perf_counter()
    native.read_memory(memory, places)
    return memory.size / (time.perf_counter() - started)


def byte_products(at_least: int = PRODUCTS) -> float:
    """Products of bytes per second, added up, with the instructions and threads in force and operands in registers.

    Twice that is the rate in operations, as TF/s count. Raises OperandError unless `at_least` is 1 or more.
    """
    if at_least < 1:
        raise OperandError("there is nothing to multiply")
    started = time.perf_counter()
    made = native.multiply_bytes(at_least)
    return float(made) / (time.perf_counter() - started)
