"""The macOS part of notso.system, in Python processes that imitate macOS (tests/darwin): one case of each kind."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from darwin.environment import disguised_python
from darwin.places import FAULTS, LIBSYSTEM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> Path:
    return disguised_python()


def said(python: Path, code: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run this code as a module of notso in the imitation of macOS."""
    program = folder / "program.py"
    program.write_text(f"exec(compile({code!r}, {str(ROOT / 'src/notso/planted.py')!r}, 'exec'))")
    return subprocess.run([python, *options, program], capture_output=True, text=True)


def answer(python: Path, code: str, folder: Path, *options: str) -> Any:
    done = said(python, f"import json\n{code}", folder, *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_macos_memory_limits_and_process_memory_are_read(python: Path, tmp_path: Path) -> None:
    code = (
        "from notso.system import memory\n"
        "limits = [[each.source, each.available_bytes] for each in memory.memory_limits()]\n"
        "own = memory.process_memory()\n"
        "memory.limit_malloc_arenas(), memory.release_freed_memory()\n"
        "print(json.dumps([limits, own.resident_bytes, own.held_bytes, memory.physical_memory()]))"
    )
    limits, resident, held, physical = answer(python, code, tmp_path)
    assert limits[0] == ["the system", 500_000 * 16384] and len(limits) <= 3
    assert (resident, held, physical) == (300 << 20, 200 << 20, 16 << 30)


def test_macos_usable_cores_are_the_performance_cores(python: Path, tmp_path: Path) -> None:
    code = (
        "from notso.smollm3.diagnostics.benchmark import describe_machine\n"
        "from notso.system import processors\n"
        "print(json.dumps([processors.usable_cores(), processors.times(), describe_machine()]))"
    )
    cores, times, machine = answer(python, code, tmp_path)
    assert (cores, times) == (2, []) and (machine["cpu"], machine["memory_gb"]) == ("Apple M2", 17.2)
    assert machine["system"].startswith("macOS")


def test_macos_process_and_file_functions_work(python: Path, tmp_path: Path) -> None:
    code = (
        "import fcntl, mmap, os, resource, socket\n"
        "from pathlib import Path\n"
        "from notso.system import confinement, files, memory, processes\n"
        "processes.lower_thread_priority(), processes.make_undumpable()\n"
        "descriptor = files.anonymous_file()\n"
        "os.write(descriptor, bytes(100)), files.sync(descriptor)\n"
        "files.read_ahead(descriptor), files.lock(descriptor)\n"
        "files.sync_folder(Path('/tmp'))\n"
        "with socket.socket() as tcp: processes.limit_unsent(tcp, 1 << 16, 20)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "most = processes.raise_descriptor_limit(100_000)\n"
        "confinement.confine(confinement.Rights.FILES_AND_NETWORK)\n"
        "confinement.confine(confinement.Rights.COMPUTE, confinement.Limits(5, 1 << 20, 10, 100))\n"
        "print(json.dumps([memory.huge_pages_available(), mmap.PAGESIZE, str(files.cache_folder(Path('/home/me'))),\n"
        "  most,\n"
        "  [processes.is_stopped(each) for each in (4, 5)], resource.getrlimit(resource.RLIMIT_AS)[0] == 1 << 20]))"
    )
    huge, page, folder, most, stopped, limited = answer(python, code, tmp_path)
    assert (huge, page, folder, stopped) == (False, 16384, "/home/me/Library/Caches", [True, False])
    assert most <= 10240 and not limited


def test_doctor_reports_missing_confinement_on_macos(python: Path) -> None:
    done = subprocess.run([python, "-m", "notso", "doctor", "--json"], capture_output=True, text=True)
    found = {each["subject"]: each for each in json.loads(done.stdout)}
    assert all(word in found["confinement"]["message"] for word in ("RLIMIT_AS", "seccomp", "Landlock", "environment"))
    assert not [each for each in found.values() if each["status"] == "fail"], done.stdout


def test_template_is_rendered_in_a_child_on_macos(python: Path, tmp_path: Path) -> None:
    code = (
        "from datetime import date\n"
        "from notso.smollm3.text.template_sandbox import render_in_child\n"
        "print(json.dumps(render_in_child('{{ n + 1 }}', [{'n': 1}], date(2026, 1, 1))))"
    )
    assert answer(python, code, tmp_path) == ["2"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import os; os.sched_getaffinity(0)", "no attribute 'sched_getaffinity' on macOS"),
        ("from os import memfd_create", "cannot import name 'memfd_create'"),
        ("import mmap; mmap.MADV_HUGEPAGE", "no attribute 'MADV_HUGEPAGE' on macOS"),
        ("open('/proc/self/status')", "opens /proc/self/status, which macOS lacks"),
        ("from pathlib import Path\ntry:\n  Path('/sys/x').read_text()\nexcept OSError: pass", "opens /sys/x"),
        ("import sys, os; assert sys.platform == 'linux'", "AssertionError"),
        ("import ctypes; ctypes.CDLL(None).prctl", "undefined symbol: prctl"),
    ],
)
@pytest.mark.parametrize("options", [(), ("-I",)])
def test_linux_only_features_fail_in_the_macos_imitation(
    python: Path, tmp_path: Path, code: str, fault: str, options: tuple[str, ...]
) -> None:
    done = said(python, code, tmp_path, *options)
    assert done.returncode != 0 and fault in done.stderr
    if "opens" in fault:  # the run fails at the end even if the fault is caught
        kept = FAULTS.read_text().splitlines()
        assert fault.partition(",")[0] in kept[-1]
        FAULTS.write_text("".join(f"{line}\n" for line in kept if "planted.py" not in line))


def test_code_outside_notso_still_sees_linux(python: Path) -> None:
    code = "import os, sys, mmap; print(sys.platform, len(os.sched_getaffinity(0)) > 0, mmap.PAGESIZE)"
    assert subprocess.check_output([python, "-c", code], text=True).split()[:2] == ["linux", "True"]


def test_stub_library_implements_every_called_function() -> None:
    layer = (ROOT / "src/notso/system/libsystem.py").read_text() + (ROOT / "src/notso/system/processes.py").read_text()
    stand_in = (ROOT / "tests/darwin/libsystem.c").read_text()
    called = set(re.findall(r"library\(\)\.(\w+)\(", layer)) | set(re.findall(r"found\.(\w+)\.argtypes", layer))
    assert len(called) >= 6 and LIBSYSTEM in layer
    assert all(re.search(rf"\b{name}\(", stand_in) for name in called)
