"""The GPU's driver as this floor sees it: a device, memory on it, and work captured as graphs, with our errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from notso.qtensor import _native as native
from notso.qtensor.errors import DeviceError, DeviceLostError, DeviceMemoryError

LIBRARY = "libcuda.so.1"
"""The driver's own library, which is opened when a GPU is asked for."""

NO_CODE = np.empty(0, np.uint8)
"""In place of machine code: the build's own is taken."""

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


def architectures() -> tuple[int, ...]:
    """For which this build has machine code; none, where it was made without nvcc."""
    return tuple(int(number) for number in native.cuda_architectures().split())


def laid_bytes(ggml_type: int, rows: int, columns: int) -> int:
    """What a weight of this format takes on a device."""
    return int(native.cuda_laid_bytes(ggml_type, rows, columns))


def bytes_of(values: npt.NDArray[Any]) -> Bytes:
    """A contiguous array's own bytes."""
    return values.reshape(-1).view(np.uint8)


class Device:
    """GPU `number`, as long as anything refers to it.

    Raises DeviceError where there is none that can be used; every method below may raise DeviceMemoryError and
    DeviceLostError.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.native: native.CudaDevice = ask(native.CudaDevice, LIBRARY, number, NO_CODE)
        self.name: str = self.native.name
        self.architecture: int = self.native.architecture

    def free_bytes(self) -> int:
        """Memory that nobody has."""
        return int(ask(self.native.memory)[0])


class DeviceMemory:
    """Some bytes of a device, given back when nobody refers to them."""

    def __init__(self, device: Device, size: int, *, zeroed: bool = False) -> None:
        self.device = device
        self.size = size
        self.address: int = ask(device.native.allocate, size, zeroed)
        weakref.finalize(self, device.native.free, self.address)

    def upload(self, values: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy a contiguous array here."""
        if values.size:
            ask(self.device.native.upload, self.address + offset, bytes_of(values))

    def download(self, values: npt.NDArray[Any], offset: int = 0) -> None:
        """Fill a contiguous array from here, once all work is done."""
        if values.size:
            ask(self.device.native.download, bytes_of(values), self.address + offset)

    def copy(self, target: int, source: int, size: int) -> None:
        """`size` bytes from one offset to another."""
        ask(self.device.native.copy, self.address + target, self.address + source, size)


class Graph:
    """Launches captured as one, given back when nobody refers to them."""

    def __init__(self, device: Device, work: Callable[[], None]) -> None:
        """What `work` launches is captured. Nobody else is served meanwhile."""
        self._device = device
        ask(device.native.capture_begin)
        try:
            work()
        except BaseException:
            device.native.capture_drop()
            raise
        self._handle: int = ask(device.native.capture_end)
        self.scratch_moves: int = device.native.scratch_moves
        weakref.finalize(self, device.native.free_graph, self._handle)

    def launch(self) -> None:
        """Begin what was captured; a download waits for it."""
        ask(self._device.native.run_graph, self._handle)


def ask(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call the native module; its errors as ours."""
    try:
        return call(*arguments, **named)
    except native.CudaUnavailable as error:
        raise DeviceError(str(error)) from None
    except native.CudaOutOfMemory as error:
        raise DeviceMemoryError(str(error)) from None
    except native.CudaLost as error:
        raise DeviceLostError(str(error)) from None
