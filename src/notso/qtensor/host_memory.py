"""How much memory there is, counted before anything is allocated (what is needed: engine_plan).

The least of three says what may be used: what the kernel calls available, what the control group still grants, and what
the process limits leave. Sizes in bytes.
"""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
HEAPS = 4
_M_ARENA_MAX = -8  # of glibc's malloc.h
_UNLIMITED = 1 << 60  # control groups of version 1 write a huge number where they mean no limit


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on what this process may still allocate. `source` names it for people."""

    source: str
    available_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What this process occupies now. Of `resident_bytes`, the pages of mapped files can be read again at any time;
    `held_bytes` is what it holds on to, in memory or swapped out."""

    resident_bytes: int
    held_bytes: int


def process_memory(proc: Path = Path("/proc")) -> ProcessMemory:
    """What the kernel counts for this process; zeros where it does not say."""
    fields = _number_lines(proc / "self" / "status")
    held = fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0) + fields.get("VmSwap:", 0)
    return ProcessMemory(fields.get("VmRSS:", 0) * 1024, held * 1024)


def memory_limits(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup"), mapped_bytes: int = 0
) -> list[MemoryLimit]:
    """Every bound that applies to this process. Never empty; a bound that cannot be read is left out.

    mapped_bytes: what of the need is mapped already, and so has its part of the address space.
    """
    limits = [_system_memory(proc)]
    limits += _cgroup_limits(proc, cgroup_root)
    limits += _process_limits(proc, mapped_bytes)
    return limits


def available_memory(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup"), mapped_bytes: int = 0
) -> MemoryLimit:
    """The tightest bound."""
    return min(memory_limits(proc, cgroup_root, mapped_bytes), key=lambda limit: limit.available_bytes)


def _system_memory(proc: Path) -> MemoryLimit:
    fields = _number_lines(proc / "meminfo")
    if "MemAvailable:" in fields:
        return MemoryLimit("the system", fields["MemAvailable:"] * 1024)
    return MemoryLimit("the machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cgroup_limits(proc: Path, root: Path) -> list[MemoryLimit]:
    """Bounds of the control group this process is in and of every group above it: each of them holds."""
    limits = []
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
            granted = _number(folder / limit_file)
            if granted is None or granted >= _UNLIMITED:
                continue
            used = (_number(folder / usage_file) or 0) - _page_cache(folder)
            limits.append(MemoryLimit("the control group", max(0, granted - max(0, used))))
    return limits


def _page_cache(folder: Path) -> int:
    """File pages charged to the group: the kernel drops them when memory is asked for, the model file's among them."""
    fields = _number_lines(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in fields else ""
    return fields.get(f"{prefix}inactive_file", 0) + fields.get(f"{prefix}active_file", 0)


def _process_limits(proc: Path, mapped_bytes: int) -> list[MemoryLimit]:
    fields = _text(proc / "self" / "statm").split()
    page = os.sysconf("SC_PAGE_SIZE")
    used = {"address space": 0, "data": 0}
    if len(fields) >= 6:
        used = {"address space": max(0, int(fields[0]) * page - mapped_bytes), "data": int(fields[5]) * page}
    limits = []
    for name, which in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(f"the {name} limit (ulimit)", max(0, soft - used[name])))
    return limits


def keep_few_heaps() -> None:
    """Have the C library serve all threads from a few heaps, where it is one that makes many (glibc: eight for each
    core), each of which keeps what it had at its peak. For a process of many threads, before they are started."""
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    if options is not None:
        options(_M_ARENA_MAX, HEAPS)


def give_back_freed() -> None:
    """Have the C library return freed memory to the system, where it is one that keeps it (glibc)."""
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
    """`name number` lines, as /proc/meminfo and memory.stat have them; a unit after the number is left out."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}
