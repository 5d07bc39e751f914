"""Quantized tensors and the devices that compute with them, independent of any model.

The names below form the public interface of this layer. Errors, formats and memory limits are imported eagerly; names
that need arrays or kernels are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notso.qtensor.errors import (
    MAX_QUOTED_CHARACTERS,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    GGUFError,
    KernelChoiceError,
    NotsoError,
    OperandError,
    QTensorError,
    SafetensorsError,
    Sentence,
    UnsupportedFormatError,
    one_line,
    quoted,
    set_error_path,
)
from notso.qtensor.formats import (
    BF16,
    F16,
    F32,
    FORMATS,
    FORMATS_BY_NAME,
    KV_FORMATS,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    TILE_POSITIONS,
    Format,
    KVFormat,
    kv_block_bytes,
)
from notso.system.memory import (
    MIB,
    MemoryLimit,
    ProcessMemory,
    available_memory,
    limit_malloc_arenas,
    memory_limits,
    process_memory,
    release_freed_memory,
)

if TYPE_CHECKING:
    from notso.qtensor.backends.cpu import ceilings, kernel_choice
    from notso.qtensor.backends.cpu.cpu_backend import CPU
    from notso.qtensor.backends.cpu.huge_pages import HugePageArena, reserved_blocks, zeroed
    from notso.qtensor.backends.cuda.cuda_backend import CUDA
    from notso.qtensor.backends.cuda.driver import cuda_architectures, has_cuda_driver
    from notso.qtensor.backends.differences import differing_operations
    from notso.qtensor.backends.protocol import Array, Backend, KeyValuePool, Program, RMSNorm, Weight, WeightArena
    from notso.qtensor.gguf import GGUFFile, Metadata
    from notso.qtensor.gguf_writer import GGUFWriter
    from notso.qtensor.reference.blocks import scales_of
    from notso.qtensor.reference.ops import matmul_q8k
    from notso.qtensor.reference.random_blocks import random_blocks
    from notso.qtensor.safetensors import SafetensorsFile
    from notso.qtensor.tensor import QTensor

__all__ = [
    "BF16", "CPU", "CUDA", "F16", "F32", "FORMATS", "FORMATS_BY_NAME", "KV_FORMATS", "MAX_QUOTED_CHARACTERS", "MIB",
    "Q4_K", "Q5_K", "Q6_K", "Q8_0", "TILE_POSITIONS", "Array", "Backend", "DeviceError", "DeviceLostError",
    "DeviceMemoryError", "Format", "GGUFError", "GGUFFile", "GGUFWriter", "HugePageArena", "KVFormat",
    "KernelChoiceError", "KeyValuePool", "MemoryLimit", "Metadata", "NotsoError", "OperandError", "ProcessMemory",
    "Program", "QTensor", "QTensorError", "RMSNorm", "SafetensorsError", "SafetensorsFile", "Sentence",
    "UnsupportedFormatError", "Weight", "WeightArena", "available_memory", "ceilings", "cuda_architectures",
    "differing_operations", "has_cuda_driver", "kernel_choice", "kv_block_bytes", "limit_malloc_arenas", "matmul_q8k",
    "memory_limits", "one_line", "process_memory", "quoted", "random_blocks", "release_freed_memory", "reserved_blocks",
    "scales_of", "set_error_path", "zeroed",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module: Any
    match name:
        case "Array" | "Backend" | "KeyValuePool" | "Program" | "RMSNorm" | "Weight" | "WeightArena":
            from notso.qtensor.backends import protocol as module
        case "CPU":
            from notso.qtensor.backends.cpu import cpu_backend as module
        case "CUDA":
            from notso.qtensor.backends.cuda import cuda_backend as module
        case "cuda_architectures" | "has_cuda_driver":
            from notso.qtensor.backends.cuda import driver as module
        case "differing_operations":
            from notso.qtensor.backends import differences as module
        case "HugePageArena" | "reserved_blocks" | "zeroed":
            from notso.qtensor.backends.cpu import huge_pages as module
        case "ceilings" | "kernel_choice":
            from notso.qtensor.backends import cpu as module
            from notso.qtensor.backends.cpu import ceilings, kernel_choice  # noqa: F401
        case "GGUFFile" | "Metadata":
            from notso.qtensor import gguf as module
        case "GGUFWriter":
            from notso.qtensor import gguf_writer as module
        case "SafetensorsFile":
            from notso.qtensor import safetensors as module
        case "QTensor":
            from notso.qtensor import tensor as module
        case "matmul_q8k":
            from notso.qtensor.reference import ops as module
        case "scales_of":
            from notso.qtensor.reference import blocks as module
        case "random_blocks":
            from notso.qtensor.reference import random_blocks as module
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
