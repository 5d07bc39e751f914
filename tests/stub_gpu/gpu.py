"""The stub driver (tests/native/stub_driver.cpp), its faults, and the backend over it."""

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
"""Machine code as the stub takes it, which has its own."""

OUT_OF_MEMORY, LOST = 2, 700
DEFAULTS = {"devices": 1, "version": 13000, "architecture": 90, "memory": 4 << 30, "fail_at": 0, "fail_with": LOST}


def library() -> ctypes.CDLL:
    """The stub driver itself; whoever opens it by its path gets the same."""
    found = ctypes.CDLL(str(built("stub_driver")))
    found.stub_set.argtypes = ctypes.c_char_p, ctypes.c_longlong
    for name in ("stub_calls", "stub_live", "stub_graph_launches", "stub_kernels"):
        getattr(found, name).restype = ctypes.c_longlong
    return found


def set_up(**settings: int) -> None:
    """What the driver says it has and which call fails, from now on."""
    for name, value in settings.items():
        library().stub_set(name.encode(), value)


def live() -> int:
    """What was made on the device and not given back."""
    return int(library().stub_live())


def left(before: int = 0) -> int:
    """What is live beyond `before` when all that nobody refers to is collected.

    gc.collect() does nothing while another thread is in the midst of a collection, whose finalizers give things back:
    so it is asked again until nothing is left, for some seconds at most.
    """
    until = time.monotonic() + 10
    gc.collect()
    while live() > before and time.monotonic() < until:
        time.sleep(0)  # the other thread's turn
        gc.collect()
    return live() - before


def calls() -> int:
    """Calls of the driver so far."""
    return int(library().stub_calls())


@contextmanager
def installed(**settings: int) -> Iterator[None]:
    """The stub is this machine's driver, with these settings, until the end."""
    set_up(**{**DEFAULTS, **settings})
    with patch.object(driver, "LIBRARY", str(built("stub_driver"))), patch.object(driver, "NO_CODE", CODE):
        try:
            yield
        finally:
            set_up(**DEFAULTS)


def emulated_gpu(number: int = 0) -> CUDA:
    """The backend over it, and nothing wrong with it."""
    with installed():
        return CUDA(number)
