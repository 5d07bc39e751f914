"""Limits and priorities of processes, and what ends them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def limit_this_process(cpu_s: int, memory_bytes: int) -> None:
    """Permit so much more CPU time, so much address space (not on macOS), and neither new descriptors nor files."""
    import resource

    spent = int(sum(os.times()[:2]))
    limits = {
        resource.RLIMIT_CPU: spent + cpu_s,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform != "darwin":  # which does not enforce it, and rejects less than what libraries have mapped
        limits[resource.RLIMIT_AS] = memory_bytes
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def unenforced_limits() -> list[str]:
    """Return what this system does not limit, for the operator: phrases."""
    if sys.platform == "darwin":
        return [
            "the memory of templates, parsers and plugins (RLIMIT_AS)",
            "which system calls and files child processes use (no seccomp, no Landlock)",
            "who of the same user reads the server's environment",
        ]
    return []


def descriptor_limit(wanted: int) -> int | None:
    """Return the limit of open descriptors, raised to `wanted` as far as allowed; None: unlimited."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if sys.platform == "darwin":
            from notso.system import libsystem

            soft = min(soft, libsystem.number("kern.maxfilesperproc") or soft)  # more is rejected, whatever `hard` says
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft


def lower_thread_priority() -> None:
    """Give the calling thread the lowest priority. Raises OSError."""
    if sys.platform == "darwin":
        from notso.system import libsystem

        error = libsystem.library().pthread_set_qos_class_self_np(libsystem.QOS_CLASS_UTILITY, 0)
        if error:
            raise OSError(error, os.strerror(error))
    else:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux threads have their own


def keep_memory_private() -> None:
    """Make the process non-dumpable (Linux)."""
    # Only root can then read its memory and environment, which hold keys: neither children (MCP servers, plugins) by
    # /proc/PPID/environ nor debuggers. Also disables core dumps. Executed programs are not affected.
    _process_control(4, 0)  # PR_SET_DUMPABLE


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    _process_control(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def end_first_out_of_memory() -> None:
    """Let the system kill this process before others when memory runs out (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - see is_stopped
            file.write("1000")


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    if sys.platform == "darwin":
        from notso.system import libsystem

        state = libsystem.process_state(process)
        return state is not None and state.status == 4  # SSTOP
    try:
        with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123 - Path() is slower to load
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
