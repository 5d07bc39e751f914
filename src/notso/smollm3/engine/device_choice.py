"""Select the device that runs a model: the requested device, or the best available one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from notso.qtensor import (
    CPU,
    CUDA,
    Backend,
    DeviceError,
    GGUFFile,
    differing_operations,
    has_cuda_driver,
)
from notso.smollm3.errors import OutOfMemoryError
from notso.smollm3.values.engine_config import EngineConfig

T = TypeVar("T")

_excluded: dict[str, str] = {}  # devices that failed in this process and are not used again -> reason


def run_on_selected_device(config: EngineConfig, use: Callable[[Backend, str], T]) -> T:
    """Call `use(backend, note)` with the selected device and return the result.

    The CPU replaces a GPU that failed earlier in this process. With "auto", it also replaces a GPU that raises
    DeviceError or OutOfMemoryError. `note` is the replaced GPU's error, or "". Raises KernelChoiceError, DeviceError,
    and the errors of `use`.
    """
    name = config.device if config.device != "auto" else "cuda"
    if config.device == "cpu" or (config.device == "auto" and not has_cuda_driver()):
        return use(CPU.configured(config.threads), "")
    number = int(name.partition(":")[2] or 0)
    note = _excluded.get(f"cuda:{number}", "")
    if not note:
        try:
            return use(CUDA(number), "")
        except (DeviceError, OutOfMemoryError) as error:
            if config.device != "auto":
                raise
            note = str(error)
    return use(CPU.configured(config.threads), note)


def exclude_device(backend: Backend, error: DeviceError) -> None:
    """Exclude a device for the lifetime of the process."""
    _excluded[backend.name.partition(" ")[0]] = str(error)


def weights_bytes(file: GGUFFile, backend: Backend) -> int:
    """Return the weights' size in bytes on a device. Raises DeviceError for an unsupported format."""
    return sum(backend.weight_bytes(tensor) for tensor in file.tensors.values())


def require_equal_results(file: GGUFFile, backend: Backend, threads: int | None) -> None:
    """Raise DeviceError if a device's results differ from the CPU's."""
    if backend.name == "cpu":
        return
    formats = {tensor.format.name: tensor.format for tensor in file.tensors.values()}
    found = differing_operations(backend, CPU.configured(threads), formats.values())
    if found:
        raise DeviceError(f"{backend.name} differs from the CPU in: {', '.join(found)}")
