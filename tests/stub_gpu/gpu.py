"""Settings and counters of the stub driver (tests/native/stub_driver.cpp), and a CUDA backend that uses it."""

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
"""Machine code to load. The stub driver ignores it, because it contains the kernels itself."""

OUT_OF_MEMORY, LOST = 2, 700
DEFAULTS = {"devices": 1, "version": 13000, "architecture": 90, "memory": 4 << 30, "fail_at": 0, "fail_with": LOST}


def library() -> ctypes.CDLL:
    """Load the stub driver. A library that is loaded twice from the same path has the same state."""
    found = ctypes.CDLL(str(built("stub_driver")))
    found.stub_set.argtypes = ctypes.c_char_p, ctypes.c_longlong
    for name in ("stub_calls", "stub_live", "stub_graph_launches", "stub_kernels"):
        getattr(found, name).restype = ctypes.c_longlong
    return found


def set_up(**settings: int) -> None:
    """Change settings of the driver: the devices that it reports, and the call that fails."""
    for name, value in settings.items():
        library().stub_set(name.encode(), value)


def live() -> int:
    """Return the number of objects on the device that have not been freed."""
    return int(library().stub_live())


def left(before: int = 0) -> int:
    """Return by how many objects `live` exceeds `before` after a garbage collection.

    While another thread collects garbage and runs finalizers, gc.collect() does nothing. Therefore, it is repeated
    until no object is left, for ten seconds at most.
    """
    until = time.monotonic() + 10
    gc.collect()
    while live() > before and time.monotonic() < until:
        time.sleep(0)  # lets the other thread run
        gc.collect()
    return live() - before


def calls() -> int:
    """Return the number of calls of the driver."""
    return int(library().stub_calls())


@contextmanager
def installed(**settings: int) -> Iterator[None]:
    """Make the stub this machine's driver, with these settings. Restore its default settings at the end."""
    set_up(**{**DEFAULTS, **settings})
    with patch.object(driver, "LIBRARY", str(built("stub_driver"))), patch.object(driver, "NO_CODE", CODE):
        try:
            yield
        finally:
            set_up(**DEFAULTS)


def emulated_gpu(number: int = 0) -> CUDA:
    """Return a CUDA backend that uses the stub with its default settings."""
    with installed():
        return CUDA(number)
