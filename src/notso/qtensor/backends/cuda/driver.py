"""Devices, memory and graphs of the CUDA driver. Its errors are converted to the classes in qtensor/errors.py."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from notso.qtensor import _native as native
from notso.qtensor.errors import DeviceError, DeviceLostError, DeviceMemoryError
from notso.qtensor.tensor import QTensor

# The CUDA driver's library, loaded only when a GPU is requested or when `has_cuda_driver` checks for it.
LIBRARY = "libcuda.so.1"

# An empty array tells the native module to use the machine code compiled into this build.
NO_CODE = np.empty(0, np.uint8)

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


def has_cuda_driver() -> bool:
    """Return whether the driver is installed."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def cuda_architectures() -> tuple[int, ...]:
    """Return the GPU architectures for which this build contains machine code."""
    return tuple(int(number) for number in native.cuda_architectures().split())


def weight_bytes(tensor: QTensor) -> int:
    """Return the size of a weight in device memory."""
    return int(native.cuda_laid_bytes(tensor.format.ggml_type, tensor.rows, tensor.cols))


def as_byte_array(values: npt.NDArray[Any]) -> Bytes:
    """Return a contiguous array's memory as a uint8 view."""
    return values.reshape(-1).view(np.uint8)


class Device:
    """The GPU with index `number`. Raises DeviceError if it is unusable."""

    # Every method may raise DeviceMemoryError and DeviceLostError.
    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.native: native.CudaDevice = call_native(native.CudaDevice, LIBRARY, number, NO_CODE)
        self.name: str = self.native.name
        self.architecture: int = self.native.architecture

    def free_bytes(self) -> int:
        return int(call_native(self.native.memory)[0])


class DeviceMemory:
    """Device memory, freed with the last reference to it."""

    def __init__(self, device: Device, size: int, *, zeroed: bool = False) -> None:
        self.device = device
        self.size = size
        self.address: int = call_native(device.native.allocate, size, zeroed)
        weakref.finalize(self, device.native.free, self.address)

    def upload(self, values: npt.NDArray[Any], offset: int = 0) -> None:
        if values.size:
            call_native(self.device.native.upload, self.address + offset, as_byte_array(values))

    def download(self, values: npt.NDArray[Any], offset: int = 0) -> None:
        if values.size:
            call_native(self.device.native.download, as_byte_array(values), self.address + offset)

    def copy(self, target: int, source: int, size: int) -> None:
        call_native(self.device.native.copy, self.address + target, self.address + source, size)


class Graph:
    """Captured kernel launches, freed with the last reference to them."""

    def __init__(self, device: Device, work: Callable[[], None]) -> None:
        self._device = device
        call_native(device.native.capture_begin)
        try:
            work()
        except BaseException:
            device.native.capture_drop()
            raise
        self._handle: int = call_native(device.native.capture_end)
        self.scratch_moves: int = device.native.scratch_moves
        weakref.finalize(self, device.native.free_graph, self._handle)

    def launch(self) -> None:
        call_native(self._device.native.run_graph, self._handle)


def call_native(call: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Call a native function and convert its errors."""
    try:
        return call(*arguments, **keywords)
    except native.CudaUnavailable as error:
        raise DeviceError(str(error)) from None
    except native.CudaOutOfMemory as error:
        raise DeviceMemoryError(str(error)) from None
    except native.CudaLost as error:
        raise DeviceLostError(str(error)) from None
