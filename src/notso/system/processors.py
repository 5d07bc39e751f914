"""Report the system's name, whether it has a display, and the processors that this process may use."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

if sys.platform == "darwin":
    from notso.system import libsystem


def system_name() -> str:
    """Return the system's name and version, such as "Linux 6.1.0" or "macOS 14.5"."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}".strip()
    return f"{platform.system()} {platform.release()}"


def has_display() -> bool:
    """Return whether the user can see a browser opened by this process."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def usable_processors() -> int:
    """Return the number of logical processors that the CPU affinity allows (on macOS, all)."""
    if sys.platform == "darwin":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def usable_cores() -> int:
    """Return the number of physical cores that the CPU affinity and the container's CPU quota allow."""
    # On macOS, efficiency cores do not count, because each step of the engine takes as long as its slowest thread.
    if sys.platform == "darwin":
        return libsystem.sysctl_number("hw.perflevel0.physicalcpu") or libsystem.sysctl_number("hw.physicalcpu") or 1
    cores = {_core_id(cpu) for cpu in os.sched_getaffinity(0)}
    quota = _cpu_quota()
    return max(1, min(len(cores), int(quota) if quota is not None else len(cores)))


def name() -> str:
    """Return the processor's model name, or "" if unknown."""
    if sys.platform == "darwin":
        return libsystem.sysctl_text("machdep.cpu.brand_string")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def times() -> list[int]:
    """Return the clock ticks since boot (user, nice, system, idle, iowait, irq, softirq, steal), or [] if unknown."""
    if sys.platform == "darwin":
        return []
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []


def _core_id(cpu: int) -> tuple[str, str] | int:
    # All hyper-threads of a core have the same package id and core id.
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return cpu


def _cpu_quota() -> float | None:
    # Returns the number of CPUs granted by the control group (version 2, or else version 1).
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
