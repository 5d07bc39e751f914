"""Control limits, priorities and termination of processes, limit connections, and detect public addresses."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

if sys.platform == "darwin":
    _TCP_RXT_CONNDROPTIME = 0x80  # netinet/tcp.h
    _TCP_NOTSENT_LOWAT = 0x201


def raise_descriptor_limit(target: int) -> int | None:
    """Raise the limit on open descriptors as far as allowed, up to `target`, and return it (None: unlimited)."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < target:
        soft = target if hard == resource.RLIM_INFINITY else min(hard, target)
        if sys.platform == "darwin":
            from notso.system import libsystem

            # macOS rejects a limit above this sysctl, even if `hard` is higher.
            soft = min(soft, libsystem.sysctl_number("kern.maxfilesperproc") or soft)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft


def limit_unsent(connection: socket.socket, unsent_bytes: int, seconds: int) -> None:
    """Limit the unsent data that the kernel buffers. Reset the connection after `seconds` without acknowledgment."""
    # By default, the kernel buffers megabytes for a slow reader, and tries for a quarter of an hour to deliver data to
    # a client that has disappeared.
    import socket

    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, seconds)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def is_public_address(address: str) -> bool:
    """Return whether an IP address, or the IPv4 address embedded in it, is globally reachable."""
    import ipaddress

    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
        # `is_global` is also true for addresses that are not public: site-local addresses, and the prefixes
        # 64:ff9b:1::/48 (local NAT64) and ::/96, which contain IPv4 addresses.
        return ip in ipaddress.ip_network("2000::/3") and ip.is_global
    return ip.is_global and not ip.is_multicast


def lower_thread_priority() -> None:
    """Give the calling thread a low priority. Raises OSError."""
    if sys.platform == "darwin":
        from notso.system import libsystem

        error = libsystem.library().pthread_set_qos_class_self_np(libsystem.QOS_CLASS_UTILITY, 0)
        if error:
            raise OSError(error, os.strerror(error))
    else:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux, each thread has its own priority


def make_undumpable() -> None:
    """Make the process non-dumpable (Linux)."""
    # Otherwise, children (MCP servers, plugins) could read keys in /proc/PPID/environ, and debuggers could attach. This
    # also disables core dumps. Programs that the process executes are dumpable again.
    _process_control(4, 0)  # PR_SET_DUMPABLE


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    _process_control(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(0)


def is_stopped(process: int) -> bool:
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
