"""Compiling and running for aarch64 on a machine of another kind: a cross compiler, qemu's user mode, and a Python."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from stub_gpu.native_build import one_at_a_time

ROOT = Path(__file__).parents[1]
PREFIX = "aarch64-linux-gnu-"
COMPILERS = [f"{PREFIX}g++{version}" for version in ("", "-12", "-13", "-14")]
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
PACKAGES = "g++-12-aarch64-linux-gnu qemu-user-static"

# What qemu plays: everything it knows of, a core with dotprod alone, and one with neither.
I8MM, DOTPROD, PLAIN = "max", "cortex-a76", "cortex-a72"


def tool(name: str) -> str | None:
    """A program beside this Python or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@cache
def compiler() -> str | None:
    """The cross compiler, if there is one."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


@cache
def emulator() -> str | None:
    """qemu's user mode for aarch64, if it is there."""
    return next((found for name in EMULATORS if (found := shutil.which(name))), None)


def missing() -> str:
    """Why nothing can be compiled or run for aarch64 here; empty where it can."""
    if platform.machine() in ("aarch64", "arm64"):
        return "this machine is an aarch64: the other tests compare the families that it runs"
    wanted = {"a cross compiler": compiler(), "qemu": emulator(), "cmake": tool("cmake"), "ninja": tool("ninja")}
    lacking = " and ".join(name for name, found in wanted.items() if not found)
    return f"aarch64 needs {lacking} (Debian: apt install {PACKAGES})" if lacking else ""


def run(cpu: str, program: Path | str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """A program of aarch64 on a processor that qemu plays."""
    command: Sequence[str] = [str(emulator()), "-cpu", cpu, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def _make(source: Path, folder: str, target: str, *options: str) -> Path:
    """Where the target of a CMake project was built; what is there already and up to date costs nothing."""
    there, ninja = ROOT / "build" / "native" / folder, str(tool("ninja"))
    configure = [str(tool("cmake")), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options]
    with one_at_a_time(there):
        for command in ([*configure, "-S", str(source), "-B", str(there)], [ninja, "-C", str(there), target]):
            made = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    return there


def _for_aarch64() -> list[str]:
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    return [f"-DCMAKE_CXX_COMPILER={compiler()}", *system]


def build(target: str) -> Path:
    """A program of tests/native for this machine, without sanitizers and with the generic kernels alone."""
    only = ("-DSANITIZE=", "-DQTENSOR_GENERIC_ONLY=ON")
    return _make(ROOT / "tests" / "native", "generic", target, *only) / target


def cross_build(target: str) -> Path:
    """One for aarch64 with all its kernels, linked so that no library of that kind is needed to run it."""
    options = ["-DSANITIZE=", "-DCMAKE_EXE_LINKER_FLAGS=-static", *_for_aarch64()]
    return _make(ROOT / "tests" / "native", "aarch64", target, *options) / target


# ---- Python ----

PYTHON = ROOT / "build" / "aarch64-python"  # made by supply/aarch64_python.py
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def python_missing() -> str:
    """Why no Python of aarch64 can run; empty where it can."""
    return missing() or ("" if (PYTHON / ".done").exists() else "there is no Python of aarch64: make test-arm")


def install(to: Path) -> None:
    """The package with a native module for aarch64, both as they stand in this tree."""
    paths = sysconfig.get_paths()
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={paths['include']}"]
    release = ["-DCMAKE_BUILD_TYPE=Release", "-DQTENSOR_CUDA=OFF"]
    built = _make(ROOT, "aarch64-module", "_native", *options, *release, *_for_aarch64())
    (module,) = built.glob("_native*.so")  # whose name is that of this machine's Python
    shutil.copytree(ROOT / "src" / "notso", to / "notso", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(module, to / "notso" / "qtensor" / "_native.so")


def run_python(cpu: str, package: Path, *arguments: str, timeout: float = 3000) -> subprocess.CompletedProcess[str]:
    """Debian's Python of aarch64 with that package, and with what else lies in build/aarch64-python."""
    root = PYTHON / "root"
    program = [str(emulator()), "-cpu", cpu, "-L", str(root), str(root / "usr" / "bin" / f"python{VERSION}")]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("NOTSO_", "PYTHON"))},
        "PYTHONPATH": os.pathsep.join(map(str, (package, PYTHON / "site", ROOT / "tests"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [*program, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=timeout
    )
