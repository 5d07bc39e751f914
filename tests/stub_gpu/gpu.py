"""The stub driver (tests/native/stub_driver.cpp), its faults, and a CUDA backend that uses it."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from notso.qtensor import CUDA
from notso.qtensor.backends.cuda import driver
from stub_gpu.native_build import built

CODE = np.ones(1, np.uint8)
"""Placeholder for machine code; the stub contains the kernels."""

OUT_OF_MEMORY, LOST = 2, 700
DEFAULTS = {"devices": 1, "version": 13000, "architecture": 90, "memory": 4 << 30, "fail_at": 0, "fail_with": LOST}


def library() -> ctypes.CDLL:
    """Return the stub driver: the same instance for everything in this process that opens its path."""
    found = ctypes.CDLL(str(built("stub_driver")))
    found.stub_set.argtypes = ctypes.c_char_p, ctypes.c_longlong
    for name in ("stub_calls", "stub_live", "stub_graph_launches", "stub_kernels"):
        getattr(found, name).restype = ctypes.c_longlong
    return found


def set_up(**settings: int) -> None:
    """Set the properties that the driver reports, and the call that fails."""
    for name, value in settings.items():
        library().stub_set(name.encode(), value)


def live() -> int:
    """Return the number of objects on the device that were not freed."""
    return int(library().stub_live())


def left(before: int = 0) -> int:
    """Return how many more objects than `before` are live after garbage collection.

    gc.collect() does nothing while another thread is in a collection, whose finalizers free objects. So it is repeated
    until nothing is left, for a few seconds.
    """
    until = time.monotonic() + 10
    gc.collect()
    while live() > before and time.monotonic() < until:
        time.sleep(0)  # lets the other thread run
        gc.collect()
    return live() - before


def calls() -> int:
    """Return the number of driver calls so far."""
    return int(library().stub_calls())


@contextmanager
def installed(**settings: int) -> Iterator[None]:
    """Use the stub with these settings as this machine's driver inside the context."""
    set_up(**{**DEFAULTS, **settings})
    with patch.object(driver, "LIBRARY", str(built("stub_driver"))), patch.object(driver, "NO_CODE", CODE):
        try:
            yield
        finally:
            set_up(**DEFAULTS)


def emulated_gpu(number: int = 0) -> CUDA:
    """Return a backend on the stub, with default settings."""
    with installed():
        return CUDA(number)
