"""Call functions of macOS's libSystem that Python's standard library lacks, declared as in macOS's public headers."""

from __future__ import annotations

import ctypes
import os
from functools import cache

LIBRARY = "/usr/lib/libSystem.B.dylib"

QOS_CLASS_UTILITY = 0x11  # sys/qos.h

_HOST_VM_INFO64 = 4  # mach/host_info.h
_RUSAGE_INFO_V0 = 0  # sys/resource.h
_PROC_PIDT_SHORTBSDINFO = 13  # sys/proc_info.h


class VMStatistics(ctypes.Structure):
    """`vm_statistics64` of mach/vm_statistics.h, in pages."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("free_count", "active_count", "inactive_count", "wire_count")),
        *((name, ctypes.c_uint64) for name in ("zero_fill_count", "reactivations", "pageins", "pageouts", "faults")),
        *((name, ctypes.c_uint64) for name in ("cow_faults", "lookups", "hits", "purges")),
        *((name, ctypes.c_uint32) for name in ("purgeable_count", "speculative_count")),
        *((name, ctypes.c_uint64) for name in ("decompressions", "compressions", "swapins", "swapouts")),
        *((name, ctypes.c_uint32) for name in ("compressor_page_count", "throttled_count")),
        *((name, ctypes.c_uint32) for name in ("external_page_count", "internal_page_count")),
        ("total_uncompressed_pages_in_compressor", ctypes.c_uint64),
    )


class ResourceUsage(ctypes.Structure):
    """`rusage_info_v0` of sys/resource.h. Sizes are in bytes."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in ("user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups")),
        *((name, ctypes.c_uint64) for name in ("pageins", "wired_size", "resident_size", "phys_footprint")),
        *((name, ctypes.c_uint64) for name in ("proc_start_abstime", "proc_exit_abstime")),
    )


class ProcessState(ctypes.Structure):
    """`proc_bsdshortinfo` of sys/proc_info.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("pid", "ppid", "pgid", "status")),
        ("comm", ctypes.c_char * 16),
        *((name, ctypes.c_uint32) for name in ("flags", "uid", "gid", "ruid", "rgid", "svuid", "svgid", "reserved")),
    )


@cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(LIBRARY, use_errno=True)
    found.malloc_zone_pressure_relief.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    found.sysctlbyname.argtypes = (
        *(ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p, ctypes.c_size_t),
    )
    return found


def sysctl_bytes(name: str, size: int = 8) -> bytes:
    """Return a sysctl's raw value, or b"" if it does not exist."""
    value, length = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
    if library().sysctlbyname(name.encode(), value, ctypes.byref(length), None, 0) != 0:
        return b""
    return value.raw[: length.value]


def sysctl_number(name: str) -> int:
    """Return a sysctl's integer value, or 0 if it does not exist."""
    return int.from_bytes(sysctl_bytes(name), "little")


def sysctl_text(name: str) -> str:
    """Return a sysctl's text, or "" if it does not exist."""
    return sysctl_bytes(name, 256).split(b"\0")[0].decode("utf-8", "replace")


def page_bytes() -> int:
    """Return the size of the pages that `vm_statistics` counts."""
    # Under Rosetta (x86-64 emulation), the pages of the process itself are smaller.
    return ctypes.c_size_t.in_dll(library(), "vm_kernel_page_size").value


def vm_statistics() -> VMStatistics | None:
    """Return the system's memory statistics, or None if they cannot be read."""
    found = VMStatistics()
    count = ctypes.c_uint32(ctypes.sizeof(found) // 4)
    host = library().mach_host_self()
    error = library().host_statistics64(host, _HOST_VM_INFO64, ctypes.byref(found), ctypes.byref(count))
    return found if error == 0 else None


def resource_usage() -> ResourceUsage:
    """Return this process's resource usage, or zeros if it cannot be read."""
    found = ResourceUsage()
    library().proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(found))
    return found


def process_state(process: int) -> ProcessState | None:
    """Return the state of a process, or None if it does not exist."""
    found = ProcessState()
    size = ctypes.sizeof(found)
    count = library().proc_pidinfo(process, _PROC_PIDT_SHORTBSDINFO, ctypes.c_uint64(0), ctypes.byref(found), size)
    return found if count == size else None
