"""Which kernels run and on how many threads. The one place that imports the native module."""

from __future__ import annotations

import os
from pathlib import Path

from notso.qtensor import _native as native
from notso.qtensor.errors import KernelChoiceError
from notso.qtensor.formats import Format

KERNELS_VARIABLE = "NOTSO_KERNELS"
ATTENTION_VARIABLE = "NOTSO_ATTENTION"

__all__ = [
    "ATTENTION_VARIABLE",
    "KERNELS_VARIABLE",
    "attention_variant",
    "available_kernels",
    "configure",
    "cpu_features",
    "default_threads",
    "end_on_bus_errors",
    "is_packed",
    "kernels",
    "native",
    "set_threads",
    "threads",
    "use_attention",
    "use_kernels",
    "work_shares",
]


def cpu_features() -> list[str]:
    """Instruction sets that this CPU has and the operating system lets us use, such as avx2, amx_int8 or dotprod."""
    return list(native.cpu_features())


def available_kernels() -> list[str]:
    """Kernel families this CPU runs, best first; `generic` is always among them. All of them give the same bits."""
    return list(native.available_kernels())


def kernels() -> str:
    """The kernel family in force."""
    return str(native.kernels())


def use_kernels(name: str) -> None:
    """Put a kernel family in force. Raises KernelChoiceError, which lists the choices."""
    try:
        native.use_kernels(name)
    except ValueError as error:
        raise KernelChoiceError(str(error)) from None


def is_packed(format: Format) -> bool:
    """Whether the family in force multiplies packed weights of a format (native/packed_weights.h)."""
    return bool(native.is_packed(format.ggml_type))


def attention_variant() -> str:
    """How many queries read a cache of 8 bits and less: by `vectors` or by `tiles`. Both give the same bits."""
    return str(native.attention_variant())


def use_attention(variant: str) -> None:
    """Take `vectors` or `tiles` for many queries, or what should be faster (`auto`).

    Raises KernelChoiceError for anything else, and for tiles where the kernels in force have none.
    """
    try:
        native.use_attention(variant)
    except ValueError as error:
        raise KernelChoiceError(str(error)) from None


def threads() -> int:
    """Threads that share each operation; the calling thread is one of them."""
    return int(native.thread_count())


def set_threads(count: int) -> None:
    """Replace the thread pool. Waits for running work. Raises KernelChoiceError outside 1..1024 or our means."""
    try:
        native.set_thread_count(count)
    except (ValueError, RuntimeError) as error:
        raise KernelChoiceError(str(error)) from None


def work_shares() -> list[int]:
    """Work items that each thread has done since `set_threads`, the calling thread first. Waits for running work."""
    return list(native.work_shares())


def configure(thread_count: int | None = None) -> None:
    """Obey NOTSO_KERNELS and NOTSO_ATTENTION and set the threads (None: one for each physical core we may use).

    Raises KernelChoiceError for a family that is unknown or that this CPU lacks, and for tiles where there are none.
    """
    wanted = os.environ.get(KERNELS_VARIABLE, "").strip()
    if wanted:
        use_kernels(wanted)
    variant = os.environ.get(ATTENTION_VARIABLE, "").strip()
    if variant:
        use_attention(variant)
    set_threads(default_threads() if thread_count is None else thread_count)


def end_on_bus_errors(exit_code: int, line: str) -> None:
    """End the process with that code, and that line (of up to 255 bytes) on stderr, when a mapped file is cut short or
    becomes unreadable. The system would kill it without a word. For programs: it holds for the whole process.
    """
    native.end_on_bus_errors(exit_code, line)


def default_threads() -> int:
    """Physical cores within our affinity, but no more than a container's CPU quota allows."""
    cores = {_core_of(cpu) for cpu in usable_cpus()}
    quota = _cpu_quota()
    return max(1, min(len(cores), int(quota) if quota is not None else len(cores)))


def usable_cpus() -> set[int]:
    """Return the CPUs within our affinity, or all where the system has none (macOS)."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> tuple[str, str] | int:
    """What two hyper-threads of one core have in common: package and core number."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return cpu


def _cpu_quota() -> float | None:
    """CPUs worth of time a cgroup grants (version 2, then 1), or None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        return None if limit <= 0 else limit / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
