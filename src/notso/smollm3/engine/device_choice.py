"""Which device runs a model: the one that was asked for, or the best that can. Nobody else asks for a GPU."""

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

_lost: dict[str, str] = {}  # the device that failed in this process -> what is said of it: nothing is asked of it again


def on_device(config: EngineConfig, use: Callable[[Backend, str], T]) -> T:
    """What `use(backend, note)` returns for the device of `config`; `note` says why the CPU stands in for a GPU.

    "auto": where the GPU refuses, be it as late as in `use`, the CPU. A GPU that was lost is not asked again, whoever
    wants it. Raises DeviceError or OutOfMemoryError where one that was named refuses, KernelChoiceError, and what `use`
    raises.
    """
    wanted = config.device if config.device != "auto" else "cuda"
    if config.device == "cpu" or (config.device == "auto" and not has_cuda_driver()):
        return use(CPU.configured(config.threads), "")
    number = int(wanted.partition(":")[2] or 0)
    note = _lost.get(f"cuda:{number}", "")
    if not note:
        try:
            return use(CUDA(number), "")
        except (DeviceError, OutOfMemoryError) as error:
            if config.device != "auto":
                raise
            note = str(error)
    return use(CPU.configured(config.threads), note)


def give_up(backend: Backend, error: DeviceError) -> None:
    """Never ask this device again while the process lives."""
    _lost[backend.name.partition(" ")[0]] = str(error)


def weights_bytes(file: GGUFFile, backend: Backend) -> int:
    """What the file's weights take there. Raises DeviceError where the device has no kernels for one of them."""
    return sum(backend.weight_bytes(tensor) for tensor in file.tensors.values())


def require_same_bits(file: GGUFFile, backend: Backend, threads: int | None) -> None:
    """A device that computes this file's formats otherwise than the CPU is not used. Raises DeviceError."""
    if backend.name == "cpu":
        return
    formats = {tensor.format.name: tensor.format for tensor in file.tensors.values()}
    found = differing_operations(backend, CPU.configured(threads), formats.values())
    if found:
        raise DeviceError(f"{backend.name} computes other bits than the CPU: {', '.join(found)}")
