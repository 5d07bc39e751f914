"""Confine (sandbox) child processes.

Each child permanently gives up all rights except its `Rights`, as far as the system can enforce this. Its `Limits`, if
any, apply to its time and, on Linux, its memory. On Linux, the child also cannot gain privileges, it is the first
process that the kernel kills when memory runs out, and Landlock and seccomp confine it if the kernel supports them.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import re
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

NICE = 10
_PIECE = 1 << 16


class Rights(enum.Enum):
    COMPUTE = "compute on the given input: no files, network, programs, threads or signals"
    FILES_AND_NETWORK = "use files, programs and the network as its user, but not the server's keys or processes"


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_s: int  # CPU seconds, counted from the end of the child's imports
    memory_bytes: int  # maximum size of the address space
    wall_s: float  # seconds of wall-clock time after which the child is killed
    answer_bytes: int
    more_cpu_s: int = 0  # seconds that `ConfinedProcess.extend_limits` may add to `cpu_s` and `wall_s` in total


class ConfinedWorkError(Exception):
    """The child exceeded a limit, failed, or could not be started."""


# The following functions run in the child.


def confine(rights: Rights, limits: Limits | None = None) -> None:
    """Give up all rights except `rights`, permanently. Raises OSError if a mechanism that the kernel supports fails."""
    _prefer_oom_kill()
    if rights is Rights.COMPUTE and limits is None:
        raise ValueError("Rights.COMPUTE requires limits")
    ruleset = _landlock_ruleset(rights)  # opens a descriptor, which may be impossible once the limits below apply
    if limits is not None:
        _set_resource_limits(limits)
    if sys.platform == "linux":
        _check_result(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        if ruleset is not None:
            try:
                result = _system_call("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
                _check_result(result, "Landlock")
            finally:
                os.close(ruleset)
        if _has_seccomp():
            _install_filter(system_call_filter(rights, os.uname().machine))


def serve_confined(work: Callable[[bytes], bytes], limits: Limits) -> None:
    """Confine this process, pass stdin to `work`, and write the result to stdout. Must be called after all imports."""
    request = sys.stdin.buffer
    confine(Rights.COMPUTE, limits)
    answer = work(request.read())
    if len(answer) > limits.answer_bytes:
        raise SystemExit(1)
    sys.stdout.buffer.write(answer)


def _set_resource_limits(limits: Limits) -> None:
    import resource

    spent = int(sum(os.times()[:2]))
    cpu = spent + limits.cpu_s
    bounds = {
        resource.RLIMIT_CPU: (cpu, cpu + limits.more_cpu_s),
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_NOFILE: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    if sys.platform == "darwin":  # macOS does not enforce RLIMIT_AS, and rejects it if more is already mapped
        del bounds[resource.RLIMIT_AS]
    for which, bound in bounds.items():
        resource.setrlimit(which, bound)
    os.nice(NICE)


def _prefer_oom_kill() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - Path is slower
            file.write("1000")


# The following class and functions, up to `unenforced_limits`, are used in the parent.


class ConfinedProcess:
    """A confined process that reads one request and writes one answer. Raises ConfinedWorkError."""

    # `arguments` are passed to the Python interpreter. The program that they name must call `confine` or
    # `serve_confined` with the same limits.
    def __init__(self, arguments: Sequence[str], request: bytes, limits: Limits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.wall_s
        self._granted = 0
        try:
            request_file = read_only_file(request)
            try:
                # With -I, neither the environment nor the working directory can inject code.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-X", "utf8", *arguments],
                    stdin=request_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment(Rights.COMPUTE),
                    start_new_session=True,  # so that the child does not receive the terminal's signals, such as Ctrl-C
                )
            finally:
                os.close(request_file)
        except OSError as error:
            raise ConfinedWorkError(f"no process can be started: {error.strerror}") from error
        self._output = cast(IO[bytes], self._process.stdout)

    def pieces(self) -> Iterator[bytes]:
        """Yield pieces of the answer as they arrive, then end the child. Raises ConfinedWorkError."""
        output = self._output
        left = self._limits.answer_bytes
        try:
            with selectors.DefaultSelector() as readable:
                readable.register(output, selectors.EVENT_READ)
                while True:
                    if not readable.select(max(0.0, self._deadline - time.monotonic())):
                        raise ConfinedWorkError(self._too_slow)
                    piece = os.read(output.fileno(), _PIECE)
                    if not piece:
                        break
                    left -= len(piece)
                    if left < 0:
                        raise ConfinedWorkError(f"its result is larger than {self._limits.answer_bytes >> 20} MiB")
                    yield piece
            try:
                status = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ConfinedWorkError(self._too_slow) from None
        finally:
            self.kill()
            self._process.wait()
            output.close()
        if status != 0:
            cpu_s = self._limits.cpu_s + self._granted
            raise ConfinedWorkError(
                f"it failed, or exceeded {cpu_s} s of CPU time or {self._limits.memory_bytes >> 20} MiB of memory"
            )

    def answer(self) -> bytes:
        """Return the answer. Raises ConfinedWorkError."""
        return b"".join(self.pieces())

    def extend_limits(self, seconds: int) -> None:
        """Extend the CPU and wall time limits by `seconds`, at most `more_cpu_s` in total. No effect on macOS."""
        seconds = min(seconds, self._limits.more_cpu_s - self._granted)
        if seconds > 0 and sys.platform == "linux":
            import resource

            self._granted += seconds
            self._deadline += seconds
            with contextlib.suppress(OSError):  # raised if the child has already ended
                soft, hard = resource.prlimit(self._process.pid, resource.RLIMIT_CPU)
                resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (min(soft + seconds, hard), hard))

    @property
    def _too_slow(self) -> str:
        return f"it took more than {self._limits.wall_s + self._granted:g} s"

    def kill(self) -> None:
        """Kill the child; `pieces` then raises ConfinedWorkError."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def environment(rights: Rights, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the `variables` (default: os.environ) that a child with these rights may have."""
    variables = os.environ if variables is None else variables
    if rights is Rights.COMPUTE:
        return {name: variables[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in variables}
    return {
        name: value
        for name, value in variables.items()
        if name.startswith("NOTSO_PLUGIN_") or not (name.startswith("NOTSO_") or _SECRET_NAME.search(name))
    }


_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|PGPASS\w*)(_|$)|^(DATABASE_URL|VALKEY_URL|PGPASSWORD)$",
    re.IGNORECASE,
)


def read_only_file(data: bytes) -> int:
    """Return a read-only descriptor of an anonymous file that contains `data`. Raises OSError."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("notso")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)
    import tempfile

    with tempfile.NamedTemporaryFile() as temporary:
        temporary.write(data)
        temporary.flush()
        return os.open(temporary.name, os.O_RDONLY | os.O_CLOEXEC)


def lacking() -> list[str]:
    """Return which of "Landlock" and "seccomp" this system lacks."""
    mechanisms = {"Landlock": _landlock_version() > 0, "seccomp": _has_seccomp()}
    return [name for name, is_present in mechanisms.items() if not is_present]


def unenforced_limits() -> list[str]:
    """Return phrases for messages that name what this system does not limit."""
    found = []
    if missing := lacking():
        found.append(f"the system calls and files that child processes use (no {', no '.join(missing)})")
    if sys.platform == "darwin":
        found.append("the memory of templates, parsers and plugins (RLIMIT_AS)")
        found.append("access to the server's environment by other programs of the same user")
    return found


_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_SECCOMP_MODE_FILTER, _SECCOMP_GET_ACTION_AVAIL = 2, 2
_LANDLOCK_CREATE_RULESET_VERSION = 1
# Constants of include/uapi/linux/landlock.h: file rights by ABI version, TCP rights, and scopes.
_LANDLOCK_FILES = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_LANDLOCK_TCP, _LANDLOCK_TCP_SINCE = 0x3, 4
_LANDLOCK_ABSTRACT_SOCKETS, _LANDLOCK_SIGNALS, _LANDLOCK_SCOPES_SINCE = 0x1, 0x2, 6

_MACHINES = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCHES = (0xC000003E, 0xC00000B7)  # include/uapi/linux/audit.h

# System call numbers on x86-64 and on AArch64.
_SYSTEM_CALLS: Mapping[str, tuple[int, int]] = {
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
}

# Calls that are needed to compute, allocate memory and exit. None of them can open a descriptor. A number is None if
# the architecture lacks the call.
_COMPUTING: Mapping[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "readv": (19, 65),
    "pread64": (17, 67),
    "write": (1, 64),
    "writev": (20, 66),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "sched_getaffinity": (204, 123),
    "sysinfo": (99, 179),
    "membarrier": (324, 283),
    "rseq": (334, 293),
    "set_robust_list": (273, 99),
}

# No child needs these calls. They give access to other processes, keys, the kernel or devices.
_FORBIDDEN: Mapping[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "fsconfig": (431, 431),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
_WITH_PROTECTION = ("mmap", "mprotect")

# include/uapi/linux/{bpf_common,seccomp,filter}.h
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # _REFUSE: the call fails with EPERM
_NUMBER_AT, _ARCH_AT, _PROTECTION_AT = 0, 4, 16 + 8 * 2  # struct seccomp_data: nr, arch, low half of args[2]
_PROT_EXEC = 4
_X32_BIT = 0x40000000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def system_call_filter(rights: Rights, machine: str) -> list[Instruction]:
    """Return the BPF program for a machine, `x86_64` or `aarch64`."""
    index = _MACHINES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCHES[index]),
        (_RETURN, 0, 0, _KILL),  # kill callers that use another architecture, for which the numbers mean other calls
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if index == 0:
        program += [(_IF_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _REFUSE)]
    if rights is Rights.FILES_AND_NETWORK:
        for numbers in _FORBIDDEN.values():
            if (number := numbers[index]) is not None:
                program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
        return [*program, (_RETURN, 0, 0, _ALLOW)]
    for name, numbers in _COMPUTING.items():
        if (number := numbers[index]) is None:
            continue
        if name in _WITH_PROTECTION:  # refuse executable memory, which many exploits need
            program += [
                (_IF_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, _PROTECTION_AT),
                (_IF_ANY_BIT, 0, 1, _PROT_EXEC),
                (_RETURN, 0, 0, _REFUSE),
                (_RETURN, 0, 0, _ALLOW),
            ]
        else:
            program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _REFUSE)]


class _FilterProgram(ctypes.Structure):
    # Defined at module level, because Python 3.14 imports a module when a structure is defined, and by the time the
    # child needs this structure, it can no longer open files.
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _install_filter(program: Sequence[Instruction]) -> None:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_program = _FilterProgram(len(program), ctypes.addressof(buffer))
    _check_result(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0), "seccomp")


def _landlock_ruleset(rights: Rights) -> int | None:
    version = _landlock_version()
    if version < 1:
        return None
    if rights is Rights.COMPUTE:
        files, tcp = _LANDLOCK_FILES[min(version, 5)], _LANDLOCK_TCP
        scopes = _LANDLOCK_ABSTRACT_SOCKETS | _LANDLOCK_SIGNALS
    elif version >= _LANDLOCK_SCOPES_SINCE:
        files, tcp, scopes = 0, 0, _LANDLOCK_SIGNALS
    else:
        return None
    fields = [files]
    if version >= _LANDLOCK_TCP_SINCE:
        fields.append(tcp)
    if version >= _LANDLOCK_SCOPES_SINCE:
        fields.append(scopes)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    arguments = (ctypes.byref(buffer), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    return _check_result(_system_call("landlock_create_ruleset", *arguments), "Landlock")


def _landlock_version() -> int:
    if _machine() is None:
        return 0
    version = ctypes.c_uint32(_LANDLOCK_CREATE_RULESET_VERSION)
    return _system_call("landlock_create_ruleset", None, ctypes.c_size_t(0), version)


def _has_seccomp() -> bool:
    if _machine() is None:
        return False
    action = ctypes.c_uint32(_REFUSE & 0x7FFF0000)
    operation = ctypes.c_uint32(_SECCOMP_GET_ACTION_AVAIL)
    return _system_call("seccomp", operation, ctypes.c_uint32(0), ctypes.byref(action)) == 0


def _machine() -> int | None:
    is_known = sys.platform == "linux" and sys.maxsize > 2**32
    return _MACHINES.get(os.uname().machine) if is_known else None


def _system_call(name: str, *arguments: Any) -> int:
    number = _SYSTEM_CALLS[name][_machine() or 0]
    return int(_libc().syscall(ctypes.c_long(number), *arguments))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
