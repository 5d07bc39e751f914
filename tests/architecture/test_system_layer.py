"""Only notso.system depends on the operating system.

Other modules do not read /proc or /sys, check the operating system, use names that macOS lacks, or fork without
executing a program.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from architecture import syntax
from darwin.names import linux_only, names

SOURCE = Path(__file__).parents[2] / "src" / "notso"
SYSTEM = SOURCE / "system"

WHICH_SYSTEM = {("sys", "platform"), ("os", "name"), ("os", "uname")}
FORKS = {
    ("os", "fork"),
    ("os", "forkpty"),
    ("pty", "fork"),
    ("multiprocessing", "Pool"),
    ("multiprocessing", "Process"),
}
FOLDERS = re.compile(r"/(proc|sys)(/|$)")
LIBRARIES = {"src/notso/qtensor/backends/cuda/driver.py"}
"""Modules that may load a library by name: libcuda.so.1, if it exists."""


def faults(nodes: Sequence[ast.AST], name: str = "module.py") -> Iterator[str]:
    """Yield code that modules outside notso.system must not contain."""
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings may contain any words
    modules = {  # name in this module -> module of the standard library
        alias.asname or alias.name: alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    for node in nodes:
        used: list[tuple[str, str]] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = [(modules.get(node.value.id, ""), node.attr)]
        elif isinstance(node, ast.ImportFrom):
            used = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            match node.args[:2]:
                case [ast.Name(module), ast.Constant(str(attribute))]:
                    used = [(modules.get(module, ""), attribute)]
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        for module, attribute in used:
            if (module, attribute) in WHICH_SYSTEM or (module == "platform" and attribute in ("system", "uname")):
                yield f"{place}: asks {module}.{attribute}"
            if attribute in linux_only().get(module, ()):
                yield f"{place}: macOS has no {module}.{attribute}"
            if (module, attribute) in FORKS:
                yield f"{place}: {module}.{attribute} forks without executing a program"
            if module == "ctypes" and attribute in ("CDLL", "PyDLL") and name not in LIBRARIES:
                yield f"{place}: calls a library of the system"
        if isinstance(node, ast.keyword) and node.arg == "preexec_fn":
            yield f"{place}: preexec_fn runs Python between fork and exec"
        if isinstance(node, ast.Constant) and id(node) not in prose and FOLDERS.match(str(node.value)):
            yield f"{place}: reads {node.value}"


def test_only_notso_system_depends_on_the_operating_system() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if SYSTEM not in path.parents]
    assert len(modules) > 300
    wrong = [
        fault for path in modules for fault in faults(syntax.nodes(path), str(path.relative_to(SOURCE.parents[1])))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("import os; os.sched_getaffinity(0)", "macOS has no os.sched_getaffinity"),
        ("import os as system; system.memfd_create('x')", "macOS has no os.memfd_create"),
        ("from os import posix_fadvise", "macOS has no os.posix_fadvise"),
        ("import os; hasattr(os, 'pidfd_open')", "macOS has no os.pidfd_open"),
        ("import mmap; mmap.MADV_HUGEPAGE", "macOS has no mmap.MADV_HUGEPAGE"),
        ("import socket; getattr(socket, 'TCP_USER_TIMEOUT')", "macOS has no socket.TCP_USER_TIMEOUT"),
        ("import select; select.epoll()", "macOS has no select.epoll"),
        ("import sys; sys.platform == 'linux'", "asks sys.platform"),
        ("from sys import platform", "asks sys.platform"),
        ("import platform; platform.system()", "asks platform.system"),
        ("import os; os.name", "asks os.name"),
        ("open('/proc/self/status')", "reads /proc/self/status"),
        ("open(f'/proc/{1}/stat')", "reads /proc/"),
        ("from pathlib import Path; Path('/sys') / 'fs'", "reads /sys"),
        ("import os; os.fork()", "os.fork forks"),
        ("import multiprocessing; multiprocessing.Process()", "multiprocessing.Process forks"),
        ("import subprocess; subprocess.run('x', preexec_fn=print)", "preexec_fn"),
        ("import ctypes; ctypes.CDLL(None).prctl(4, 0)", "calls a library"),
    ],
)
def test_operating_system_dependency_is_found(line: str, fault: str) -> None:
    found = list(faults([*ast.walk(ast.parse(line))]))
    assert len(found) == 1 and fault in found[0]


@pytest.mark.parametrize(
    "line", ["'''Read /proc.'''", "import os; os.cpu_count()", "'/process/x'", "import sys; sys.argv"]
)
def test_portable_code_is_allowed(line: str) -> None:
    assert not list(faults([*ast.walk(ast.parse(line))]))


def test_linux_only_names_are_read_from_the_type_stubs() -> None:
    lacking = linux_only()["os"]
    assert {"sched_getaffinity", "memfd_create", "posix_fadvise"} <= lacking and "fork" not in lacking
    assert "F_FULLFSYNC" in names("fcntl", "darwin") - names("fcntl", "linux")
