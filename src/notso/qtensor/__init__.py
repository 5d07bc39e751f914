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
    from notso.qtensor.backends.cuda.driver import architectures as cuda_architectures
    from notso.qtensor.backends.cuda.driver import has_driver as has_cuda_driver
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
    "BF16",
    "CPU",
    "CUDA",
    "F16",
    "F32",
    "FORMATS",
    "FORMATS_BY_NAME",
    "KV_FORMATS",
    "MAX_QUOTED_CHARACTERS",
    "MIB",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "TILE_POSITIONS",
    "Array",
    "Backend",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "Format",
    "GGUFError",
    "GGUFFile",
    "GGUFWriter",
    "HugePageArena",
    "KVFormat",
    "KernelChoiceError",
    "KeyValuePool",
    "MemoryLimit",
    "Metadata",
    "NotsoError",
    "OperandError",
    "ProcessMemory",
    "Program",
    "QTensor",
    "QTensorError",
    "RMSNorm",
    "SafetensorsError",
    "SafetensorsFile",
    "Sentence",
    "UnsupportedFormatError",
    "Weight",
    "WeightArena",
    "available_memory",
    "ceilings",
    "cuda_architectures",
    "differing_operations",
    "has_cuda_driver",
    "kernel_choice",
    "kv_block_bytes",
    "limit_malloc_arenas",
    "matmul_q8k",
    "memory_limits",
    "one_line",
    "process_memory",
    "quoted",
    "random_blocks",
    "release_freed_memory",
    "reserved_blocks",
    "scales_of",
    "set_error_path",
    "zeroed",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("Array", "Backend", "KeyValuePool", "Program", "RMSNorm", "Weight", "WeightArena"):
        from notso.qtensor.backends import protocol

        return getattr(protocol, name)
    if name == "CPU":
        from notso.qtensor.backends.cpu.cpu_backend import CPU

        return CPU
    if name == "CUDA":
        from notso.qtensor.backends.cuda.cuda_backend import CUDA

        return CUDA
    if name == "cuda_architectures":
        from notso.qtensor.backends.cuda.driver import architectures

        return architectures
    if name == "has_cuda_driver":
        from notso.qtensor.backends.cuda.driver import has_driver

        return has_driver
    if name == "differing_operations":
        from notso.qtensor.backends.differences import differing_operations

        return differing_operations
    if name in ("HugePageArena", "zeroed"):
        from notso.qtensor.backends.cpu import huge_pages

        return getattr(huge_pages, name)
    if name in ("ceilings", "kernel_choice"):
        from notso.qtensor.backends import cpu
        from notso.qtensor.backends.cpu import ceilings, kernel_choice  # noqa: F401

        return getattr(cpu, name)
    if name == "reserved_blocks":
        from notso.qtensor.backends.cpu.huge_pages import reserved_blocks

        return reserved_blocks
    if name in ("GGUFFile", "Metadata"):
        from notso.qtensor import gguf

        return getattr(gguf, name)
    if name == "GGUFWriter":
        from notso.qtensor.gguf_writer import GGUFWriter

        return GGUFWriter
    if name == "SafetensorsFile":
        from notso.qtensor.safetensors import SafetensorsFile

        return SafetensorsFile
    if name == "QTensor":
        from notso.qtensor.tensor import QTensor

        return QTensor
    if name == "matmul_q8k":
        from notso.qtensor.reference.ops import matmul_q8k

        return matmul_q8k
    if name == "scales_of":
        from notso.qtensor.reference.blocks import scales_of

        return scales_of
    if name == "random_blocks":
        from notso.qtensor.reference.random_blocks import random_blocks

        return random_blocks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
