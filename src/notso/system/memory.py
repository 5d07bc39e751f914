"""Report this process's memory and its limits, and use huge pages. Sizes are in bytes.

The lowest of these limits applies: memory that the kernel reports as available, limits of control groups (Linux), and
process limits (ulimit).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from notso.system import libsystem

HUGE_PAGE_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def huge_page_policy() -> str:
    """Return the huge page policy: "always", "madvise" or "never", or "" if the system has none."""
    if sys.platform == "darwin":
        return ""
    try:
        setting = Path(HUGE_PAGE_SETTING).read_text()
        return setting[setting.index("[") + 1 : setting.index("]")]
    except (OSError, ValueError):
        return ""


def huge_pages_available() -> bool:
    """Return whether `use_huge_pages` can have an effect."""
    return huge_page_policy() not in ("", "never")


def use_huge_pages(memory: mmap.mmap) -> None:
    """Ask the system to back `memory` with huge pages. Raises OSError if there are none."""
    if sys.platform == "darwin":
        raise OSError("macOS has no huge pages")
    memory.madvise(mmap.MADV_HUGEPAGE)


def huge_page_bytes() -> int:
    """Return how many bytes of this process's anonymous memory are in huge pages (0 if unknown)."""
    if sys.platform == "darwin":
        return 0
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


MIB = 1 << 20
HEAPS = 4
_M_ARENA_MAX = -8  # glibc's malloc.h
_UNLIMITED = 1 << 60  # for "no limit", cgroup v1 reports a number above this
_CRITICAL = 4  # macOS's level for critical memory pressure (sys/event.h)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on further allocations; `source` is its display name."""

    source: str
    available_bytes: int
    own_bytes: int = 0  # resident memory of this process, if `available_bytes` excludes it


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of this process; `held_bytes` includes swapped memory but not mapped files."""

    resident_bytes: int
    held_bytes: int
    swapped_bytes: int = 0


def process_memory(proc: Path = Path("/proc")) -> ProcessMemory:
    """Return this process's memory, with 0 for unknown sizes."""
    if sys.platform == "darwin":
        usage = libsystem.resource_usage()
        return ProcessMemory(usage.resident_size, usage.phys_footprint)
    fields = _number_lines(proc / "self" / "status")
    swapped_kib = fields.get("VmSwap:", 0)
    held_kib = fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0) + swapped_kib
    return ProcessMemory(fields.get("VmRSS:", 0) * 1024, held_kib * 1024, swapped_kib * 1024)


def memory_limits(
    mapped_bytes: int = 0, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> list[MemoryLimit]:
    """Return all limits that can be read (at least one)."""
    # mapped_bytes: size of the mapped files that the caller's memory plan already counts; this size is subtracted from
    # the address space in use.
    if sys.platform == "darwin":
        return [_macos_memory(), *_process_limits({}, 0)]  # macOS does not report how much address space is in use
    limits = [_system_memory(proc)]
    limits += _cgroup_limits(proc, cgroup_root)
    limits += _process_limits(_process_sizes(proc), mapped_bytes)
    return limits


def available_memory(mapped_bytes: int = 0, proc: Path = Path("/proc")) -> MemoryLimit:
    return min(memory_limits(mapped_bytes, proc), key=lambda limit: limit.available_bytes)


def is_memory_shortage(error: BaseException) -> bool:
    """Return whether `error` was raised because the system did not provide memory, a file mapping, or a thread."""
    # The last of these messages comes from std::thread.
    thread_errors = ("can't start new thread", "unable to start watchdog thread", os.strerror(errno.EAGAIN))
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, ImportError) and "failed to map segment" in str(error))
        or (type(error) is RuntimeError and any(each in str(error) for each in thread_errors))
        or (error.__cause__ is not None and is_memory_shortage(error.__cause__))
    )


def _own_bytes(proc: Path = Path("/proc")) -> int:
    # Swapped-out memory does not reduce the available memory. For process limits, `own_bytes` is 0, because
    # they count address space, which need not be resident.
    memory = process_memory(proc)
    return min(memory.held_bytes - memory.swapped_bytes, memory.resident_bytes)


def physical_memory() -> int:
    if sys.platform == "darwin":
        return libsystem.sysctl_number("hw.memsize")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _macos_memory() -> MemoryLimit:
    pages = libsystem.vm_statistics()
    if pages is None:
        return MemoryLimit("the machine", physical_memory())
    # macOS counts speculative pages (read-ahead data) as free. Under critical memory pressure, inactive pages are
    # already compressed, so they do not count as available.
    is_critical = libsystem.sysctl_number("kern.memorystatus_vm_pressure_level") >= _CRITICAL
    available = pages.free_count + (0 if is_critical else pages.inactive_count)
    return MemoryLimit("the system", available * libsystem.page_bytes(), _own_bytes())


def _system_memory(proc: Path) -> MemoryLimit:
    fields = _number_lines(proc / "meminfo")
    if "MemAvailable:" in fields:
        return MemoryLimit("the system", fields["MemAvailable:"] * 1024, _own_bytes(proc))
    return MemoryLimit("the machine", physical_memory())


def _cgroup_limits(proc: Path, root: Path) -> list[MemoryLimit]:
    # The limits of the control group and all of its ancestors apply.
    limits, own_bytes = [], _own_bytes(proc)
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, usage_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, usage_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            limit = _number(folder / limit_file)
            if limit is None or limit >= _UNLIMITED:
                continue
            used = (_number(folder / usage_file) or 0) - _page_cache(folder)
            limits.append(MemoryLimit("the control group", max(0, limit - max(0, used)), own_bytes))
    return limits


def _page_cache(folder: Path) -> int:
    # Cached file pages, such as those of the model, count as available: the kernel drops them under memory pressure.
    fields = _number_lines(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in fields else ""
    return fields.get(f"{prefix}inactive_file", 0) + fields.get(f"{prefix}active_file", 0)


def _process_sizes(proc: Path) -> dict[str, int]:
    fields = _text(proc / "self" / "statm").split()
    page = os.sysconf("SC_PAGE_SIZE")
    return {"address space": int(fields[0]) * page, "data": int(fields[5]) * page} if len(fields) >= 6 else {}


def _process_limits(sizes: dict[str, int], mapped_bytes: int) -> list[MemoryLimit]:
    used = {"address space": max(0, sizes.get("address space", 0) - mapped_bytes), "data": sizes.get("data", 0)}
    limits = []
    for name, which in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(f"the {name} limit (ulimit)", max(0, soft - used[name])))
    return limits


def limit_malloc_arenas() -> None:
    """Limit the number of glibc's malloc arenas. Call this before starting threads."""
    # By default, glibc creates up to eight arenas (heaps) per core, and each of them keeps its peak size.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, HEAPS)


def release_freed_memory() -> None:
    """Return freed memory to the system (glibc, macOS)."""
    if sys.platform == "darwin":
        libsystem.library().malloc_zone_pressure_relief(None, 0)
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _number_lines(path: Path) -> dict[str, int]:
    # A line of /proc/meminfo or memory.stat has a name, a number and an optional unit.
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}
