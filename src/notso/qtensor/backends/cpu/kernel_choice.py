"""Select kernels and threads. Only this module and cuda/driver.py import the native module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from notso.qtensor import _native
from notso.qtensor.errors import KernelChoiceError
from notso.qtensor.formats import Format
from notso.system.processors import usable_cores

KERNELS_VARIABLE = "NOTSO_KERNELS"
ATTENTION_VARIABLE = "NOTSO_ATTENTION"

native = _native


def cpu_features() -> list[str]:
    """Return the instruction sets that the CPU and the operating system support, such as avx2, avx_vnni or dotprod."""
    return list(native.cpu_features())


def available_kernels() -> list[str]:
    """Return the kernel families for this CPU, best first, always including `generic`."""
    return list(native.available_kernels())


def kernels() -> str:
    """Return the current kernel family."""
    return str(native.kernels())


def use_kernels(name: str) -> None:
    """Select a kernel family. Raises KernelChoiceError, which lists the choices."""
    with _choice_errors():
        native.use_kernels(name)


def is_packed(format: Format) -> bool:
    """Return whether the current kernels support packed weights of a format (native/packed_weights.h)."""
    return bool(native.is_packed(format.ggml_type))


def packs_by_default() -> bool:
    """Return whether the current kernels are never slower with packed weights, which are then the default."""
    return bool(native.packs_by_default())


def attention_variant() -> str:
    """Return the attention method for many queries: `vectors` or `tiles`, which produce identical results."""
    # The method is used only with KV formats of at most 8 bits.
    return str(native.attention_variant())


def use_attention(variant: str) -> None:
    """Select `vectors`, `tiles` or `auto` (the faster one) for attention with many queries.

    Raises KernelChoiceError for other values, and for `tiles` if the current kernels do not support it.
    """
    with _choice_errors():
        native.use_attention(variant)


def threads() -> int:
    """Return the number of threads that share each operation, including the calling one."""
    return int(native.thread_count())


def set_threads(count: int) -> None:
    """Wait for running work and replace the thread pool.

    Raises KernelChoiceError if `count` is outside 1..1024 or exceeds a system limit.
    """
    with _choice_errors():
        native.set_thread_count(count)


@contextmanager
def _choice_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise KernelChoiceError(str(error)) from error  # `is_memory_shortage` examines the cause


def work_shares() -> list[int]:
    """Return how many work items each thread of the current pool has done; the calling thread is first."""
    # Waits for running work.
    return list(native.work_shares())


def configure(thread_count: int | None = None) -> None:
    """Apply NOTSO_KERNELS and NOTSO_ATTENTION; set the thread count (None: one per usable physical core).

    Raises KernelChoiceError for invalid values.
    """
    if family := os.environ.get(KERNELS_VARIABLE, "").strip():
        use_kernels(family)
    if variant := os.environ.get(ATTENTION_VARIABLE, "").strip():
        use_attention(variant)
    set_threads(usable_cores() if thread_count is None else thread_count)


end_on_bus_errors = native.end_on_bus_errors
"""Install a handler for SIGBUS, which the system sends if a mapped file cannot be read. The handler prints `line` (at
most 255 bytes) to stderr and exits."""
# Without the handler, the process would be killed silently. The handler affects the whole process, so libraries should
# not install it.
