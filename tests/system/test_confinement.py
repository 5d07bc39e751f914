"""Permissions of a confined child process, and its end when no process waits for it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from notso.cli import doctor
from notso.system import confinement
from notso.system.confinement import ConfinedProcess, ConfinedWorkError, Limits, Rights, environment, system_call_filter
from notso.web.values.child_work import run_confined

LIMITS = Limits(cpu_s=1, memory_bytes=512 << 20, wall_s=60, answer_bytes=1000)
PROGRAM = (
    "from notso.system.confinement import Limits, serve_confined; import {imports}\nserve_confined({work}, {limits!r})"
)


def run(work: str, limits: Limits = LIMITS, imports: str = "os", request: bytes = b"a" * 100_000) -> bytes:
    return ConfinedProcess(("-c", PROGRAM.format(work=work, limits=limits, imports=imports)), request, limits).answer()


def test_confined_child_answers_one_request() -> None:
    assert run("lambda asked: asked[:3].upper()") == b"AAA"


@pytest.mark.parametrize(
    "work",
    [
        "lambda asked: re.fullmatch(b'(a|a)*', asked[:60] + b'!')",  # CPU time in a single call
        "lambda asked: b'x' * (1 << 30)",
        "lambda asked: asked",  # exceeds the maximum length of an answer
        "lambda asked: open('/etc/passwd', 'rb').read(9)",
        "lambda asked: 1 // 0",
    ],
)
def test_exceeded_limit_or_failure_raises_confined_work_error(work: str) -> None:
    with pytest.raises(ConfinedWorkError, match="exceeded 1 s of CPU time or 512 MiB of memory"):
        run(work, imports="os, re")


def children() -> set[str]:
    found = set[str]()
    for each in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= set(each.read_text().split())
    return found


def test_child_is_killed_at_the_deadline_or_on_cancellation() -> None:
    work, before = "lambda asked: time.sleep(1000) or b''", children()
    with pytest.raises(ConfinedWorkError, match=r"took more than 0\.01 s"):
        run(work, Limits(1, 512 << 20, 0.01, 1000), "time")

    async def leave() -> None:
        program = PROGRAM.format(work=work, limits=LIMITS, imports="time")
        asked = asyncio.create_task(run_confined(program, b"", LIMITS))
        while not children() - before:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave())
    assert not children() - before


def test_failed_process_start_raises_confined_work_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfinedWorkError, match="no process can be started"):
        run("bytes")


needs_linux = pytest.mark.skipif(bool(confinement.lacking()), reason="this kernel lacks Landlock or seccomp")

# Statements that a child process without permissions tries. `call` makes a system call by its number.
ACTS = {
    "read a file": "open('/etc/passwd')",
    "write a file": "open('/tmp/notso-planted', 'w')",
    "open a folder": "os.open('/', os.O_PATH)",
    "look at a file": "os.stat('/etc/passwd')",
    "remove a file": "os.unlink('/tmp/notso-planted')",
    "make a file in memory": "os.memfd_create('x')",
    "internet socket": "socket.socket()",
    "local socket": "socket.socket(socket.AF_UNIX)",
    "kernel socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "pair of sockets": "socket.socketpair()",
    "execute": "os.execv('/bin/true', ['true'])",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "subprocess.run(['/bin/true'])",
    "fork": "os.fork() or os._exit(3)",
    "thread": "_thread.start_new_thread(print, ())",
    "signal": "os.kill(os.getppid(), 0)",
    "limits": "call(302 if os.uname().machine == 'x86_64' else 261, os.getppid(), 7, 0, 0)",
    "executable memory": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "trace": "call(101 if os.uname().machine == 'x86_64' else 117, 0, 0, 0, 0)",
    "io_uring": "call(425, 1, 0)",
}
PLANTED = """
import _thread, ctypes, json, mmap, os, socket, subprocess
from notso.system.confinement import Limits, serve_confined
libc = ctypes.CDLL(None, use_errno=True)

def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno(), "")

def tried(act):
    try:
        exec(act)
    except OSError as error:
        return error.errno
    except RuntimeError:
        return 1  # how Python reports a thread that the system refuses
    return 0

serve_confined(lambda asked: json.dumps([tried(act) for act in json.loads(asked)]).encode(), {limits!r})
"""


@needs_linux
def test_confined_child_cannot_use_forbidden_operations() -> None:
    program = PLANTED.replace("{limits!r}", repr(LIMITS))
    found = json.loads(ConfinedProcess(("-c", program), json.dumps(list(ACTS.values())).encode(), LIMITS).answer())
    stopped = {errno.EPERM, errno.EACCES, errno.EMFILE}
    assert {name: error for name, error in zip(ACTS, found, strict=True) if error not in stopped} == {}
    assert len(ACTS) == 20


@needs_linux
def test_confinement_defines_no_structures_once_files_are_closed() -> None:
    # For a definition, Python 3.14 imports a module, which fails then. This test fails with all versions.
    before = "import ctypes\nfrom notso.system import confinement\nctypes.Structure = None\n"
    program = before + PROGRAM.format(work="bytes.upper", limits=LIMITS, imports="os")
    assert ConfinedProcess(("-c", program), b"abc", LIMITS).answer() == b"ABC"


@needs_linux
def test_plugin_confinement_allows_files_programs_and_network() -> None:
    program = """
import ctypes, json, os, signal, socket, subprocess, sys
from notso.system.confinement import Rights, confine
confine(Rights.FILES_AND_NETWORK)
libc = ctypes.CDLL(None, use_errno=True)
keyctl = 250 if os.uname().machine == "x86_64" else 219
refused = libc.syscall(ctypes.c_long(keyctl), 0, -3, 0) < 0 and ctypes.get_errno()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    open("/etc/passwd").close()
    ran = subprocess.run(["/bin/true"]).returncode
with open("/proc/self/status") as status:
    privileges = "NoNewPrivs:\\t1" in status.read()
with open("/proc/self/oom_score_adj") as score:
    print(json.dumps([refused, ran, privileges, score.read().strip()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [errno.EPERM, 0, True, "1000"]


def test_doctor_reports_missing_confinement_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "lacking", list)
    assert [each.status for each in doctor._confinement()] == ["ok"]
    monkeypatch.setattr(confinement, "lacking", lambda: ["Landlock"])
    (found,) = doctor._confinement()
    assert found.status == "warn" and "no Landlock" in found.message and "PDF files" in found.fix


def test_child_environment_contains_no_secrets() -> None:
    given = {
        **{"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib", "NOTSO_API_KEY": "1", "NOTSO_PLUGIN_KEY": "2"},
        **{"DATABASE_URL": "3", "HF_TOKEN": "4", "AWS_SECRET_ACCESS_KEY": "5", "PGPASSWORD": "6", "KEYBOARD": "de"},
    }
    assert environment(Rights.COMPUTE, given) == {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib"}
    assert set(environment(Rights.FILES_AND_NETWORK, given)) == {
        *("PATH", "HOME", "LD_LIBRARY_PATH", "NOTSO_PLUGIN_KEY", "KEYBOARD")
    }


def judged(program: list[confinement.Instruction], arch: int, number: int, protection: int = 0) -> int:
    """Return a filter's result according to the rules of BPF."""
    held, at, data = 0, 0, {0: number, 4: arch, 32: protection}
    while True:
        code, if_true, if_false, operand = program[at]
        if code == 0x06:
            return operand
        if code == 0x20:
            held, at = data[operand], at + 1
            continue
        holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]
        at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize(
    ("machine", "arch", "header"),
    [
        ("x86_64", 0xC000003E, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", 0xC00000B7, "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_system_call_filters_match_kernel_numbers(machine: str, arch: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header}")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", Path(header).read_text("utf-8"))
    }
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    computing = system_call_filter(Rights.COMPUTE, machine)
    for name in ("read", "write", "munmap", "exit_group", "futex", "getrandom"):
        assert judged(computing, arch, numbers[name]) == allow, name
    for name in (
        "openat",
        "socket",
        "clone",
        "execve",
        "ptrace",
        "prlimit64",
        "io_uring_setup",
        "kill",
        "bpf",
        "clone3",
    ):
        assert judged(computing, arch, numbers[name]) == refuse, name
    for name in ("mmap", "mprotect"):
        assert [judged(computing, arch, numbers[name], each) for each in (3, 4, 7)] == [allow, refuse, refuse]
    plugin = system_call_filter(Rights.FILES_AND_NETWORK, machine)
    for name in ("openat", "socket", "clone", "execve", "mmap", "prlimit64", "clone3"):
        assert judged(plugin, arch, numbers[name], 4) == allow, name
    for name in ("ptrace", "keyctl", "process_vm_readv", "bpf", "mount", "io_uring_setup"):
        assert judged(plugin, arch, numbers[name]) == refuse, name
    for program in (computing, plugin):
        assert judged(program, 0x40000003, numbers["read"]) == kill  # system calls of 32-bit programs
    if machine == "x86_64":
        assert judged(plugin, arch, 0x40000000 | numbers["read"]) == refuse  # x32


def test_read_only_file_can_be_read_but_not_written() -> None:
    descriptor = confinement.read_only_file(b"given")
    try:
        assert os.read(descriptor, 100) == b"given"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


def test_cpu_time_is_granted_up_to_the_limit() -> None:
    limits = Limits(cpu_s=1, more_cpu_s=5, memory_bytes=512 << 20, wall_s=60, answer_bytes=1000)
    program = (
        "import os, resource; from notso.system.confinement import Limits, Rights, confine\n"
        f"confine(Rights.COMPUTE, {limits!r}); os.write(1, b'ready'); os.read(0, 1)\n"
        "while True: pass"
    )
    child = confinement.ConfinedProcess(("-c", program), b"a", limits)
    pieces = child.pieces()
    assert next(pieces) == b"ready"
    if sys.platform == "linux":
        import resource

        before = resource.prlimit(child._process.pid, resource.RLIMIT_CPU)
        child.extend_limits(3)
        child.extend_limits(1000)
        after = resource.prlimit(child._process.pid, resource.RLIMIT_CPU)
        assert (after[0] - before[0], after[0]) == (5, after[1])
    child.kill()
    with pytest.raises(ConfinedWorkError):
        list(pieces)
