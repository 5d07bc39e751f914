"""GPU operations on rows that the engine does not use yet, with the stub driver."""

from __future__ import annotations

import numpy as np
import pytest
from stub_gpu.gpu import emulated_gpu

from notso.qtensor.backends.cpu import ops
from notso.qtensor.backends.cuda.arrays import DeviceArray
from notso.qtensor.reference import ops as reference

pytestmark = pytest.mark.timeout(900)  # the first test builds the stub

RNG = np.random.default_rng(6)
WIDTHS = (1, 31, 32, 33, 255, 256, 257, 1000, 4099)


def rows_of(width: int) -> np.ndarray:
    """Return ordinary values, ties at both ends, zeros of both signs, infinities, and NaN in several places."""
    x = RNG.standard_normal((8, width)).astype(np.float32)
    x[1, [0, -1]] = 9
    x[2] = 0
    x[2, width // 2] = -0.0
    x[3, width // 3] = np.inf
    x[4] = -np.inf
    x[5, width // 2] = np.nan
    x[6, 0] = np.nan
    x[7] = -np.abs(x[7])
    return x


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_matches_the_cpu(width: int) -> None:
    gpu, x = emulated_gpu(), rows_of(width)
    there, out = gpu.upload(x), gpu.upload(np.full(len(x), -1, np.int32))
    gpu.device.native.argmax(there.address, len(x), width, out.address)
    found = np.empty(len(x), np.int32)
    out.memory.download(found)
    ours = np.empty(len(x), np.int32)
    ops.argmax(x, ours)
    np.testing.assert_array_equal(found, ours)
    ordinary = [0, 1, 2, 3, 4, 7]
    np.testing.assert_array_equal(found[ordinary], reference.argmax(x[ordinary]))


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_matches_the_cpu_bit_for_bit(width: int) -> None:
    gpu, x = emulated_gpu(), rows_of(width)[[0, 1, 2, 3, 7]]
    there: DeviceArray = gpu.upload(x)
    gpu.device.native.softmax(there.address, len(x), width)
    ours = x.copy()
    ops.softmax(ours)
    np.testing.assert_array_equal(gpu.download(there).view(np.uint32), ours.view(np.uint32))
