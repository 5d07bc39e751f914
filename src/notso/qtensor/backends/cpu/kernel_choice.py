"""Selection of kernels and threads. The only module that imports the native module."""

from __future__ import annotations

import os

from notso.qtensor import _native as native
from notso.qtensor.errors import KernelChoiceError
from notso.qtensor.formats import Format
from notso.system.processors import usable_cores

KERNELS_VARIABLE = "NOTSO_KERNELS"
ATTENTION_VARIABLE = "NOTSO_ATTENTION"

__all__ = [
    "ATTENTION_VARIABLE",
    "KERNELS_VARIABLE",
    "attention_variant",
    "available_kernels",
    "configure",
    "cpu_features",
    "end_on_bus_errors",
    "is_packed",
    "kernels",
    "native",
    "packs_by_default",
    "set_threads",
    "threads",
    "use_attention",
    "use_kernels",
    "work_shares",
]


def cpu_features() -> list[str]:
    """Return the instruction sets that the CPU and the operating system provide, such as avx2, avx_vnni or dotprod."""
    return list(native.cpu_features())


def available_kernels() -> list[str]:
    """Return the kernel families of this CPU, best first, always including `generic`. Their results are
    bit-identical."""
    return list(native.available_kernels())


def kernels() -> str:
    """Return the current kernel family."""
    return str(native.kernels())


def use_kernels(name: str) -> None:
    """Select a kernel family. Raise KernelChoiceError, which lists the choices."""
    try:
        native.use_kernels(name)
    except ValueError as error:
        raise KernelChoiceError(str(error)) from None


def is_packed(format: Format) -> bool:
    """Whether the family in force multiplies packed weights of a format (native/packed_weights.h)."""
    return bool(native.is_packed(format.ggml_type))


def packs_by_default() -> bool:
    """Whether packed weights are slower nowhere in the family in force; where some are, they are packed on request."""
    return bool(native.packs_by_default())


def attention_variant() -> str:
    """Return how many queries read a cache of at most 8 bits: by `vectors` or `tiles`, with identical results."""
    return str(native.attention_variant())


def use_attention(variant: str) -> None:
    """Select `vectors`, `tiles` or `auto` (the faster one) for many queries.

    Raise KernelChoiceError for other values, and for tiles if the current kernels have none.
    """
    try:
        native.use_attention(variant)
    except ValueError as error:
        raise KernelChoiceError(str(error)) from None


def threads() -> int:
    """Return the number of threads that share each operation, including the calling one."""
    return int(native.thread_count())


def set_threads(count: int) -> None:
    """Replace the thread pool after running work has ended. Raise KernelChoiceError outside 1..1024 or system
    limits."""
    try:
        native.set_thread_count(count)
    except (ValueError, RuntimeError) as error:
        raise KernelChoiceError(str(error)) from None


def work_shares() -> list[int]:
    """Return the work items done by each thread since `set_threads`, the calling thread first. Waits for running
    work."""
    return list(native.work_shares())


def configure(thread_count: int | None = None) -> None:
    """Apply NOTSO_KERNELS and NOTSO_ATTENTION and set the threads (None: one per usable physical core).

    Raise KernelChoiceError for an unknown or unavailable family, and for tiles if there are none.
    """
    wanted = os.environ.get(KERNELS_VARIABLE, "").strip()
    if wanted:
        use_kernels(wanted)
    variant = os.environ.get(ATTENTION_VARIABLE, "").strip()
    if variant:
        use_attention(variant)
    set_threads(usable_cores() if thread_count is None else thread_count)


def end_on_bus_errors(exit_code: int, line: str) -> None:
    """Exit with that code and line (at most 255 bytes) on stderr if a mapped file is truncated or becomes unreadable.

    Without this, the system kills the process silently. Applies to the whole process, so only programs should call it.
    """
    native.end_on_bus_errors(exit_code, line)
