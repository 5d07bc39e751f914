"""Compile and run programs for AArch64 on other machines, with a cross compiler, qemu's user mode and a Python."""

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

# CPUs that qemu emulates: one with all extensions, one with dotprod but no i8mm, and one with neither.
I8MM, DOTPROD, PLAIN = "max", "cortex-a76", "cortex-a72"


def tool(name: str) -> str | None:
    """Return the path of a program next to this Python or on PATH, or None."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@cache
def compiler() -> str | None:
    """Return the path of a cross compiler, or None."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


@cache
def emulator() -> str | None:
    """Return the path of qemu's user-mode emulator for AArch64, or None."""
    return next((found for name in EMULATORS if (found := shutil.which(name))), None)


def missing() -> str:
    """Return why programs for AArch64 cannot be compiled or run here, or "" if they can."""
    if platform.machine() in ("aarch64", "arm64"):
        return "this machine is an aarch64: the other tests compare the families that it runs"
    wanted = {"a cross compiler": compiler(), "qemu": emulator(), "cmake": tool("cmake"), "ninja": tool("ninja")}
    lacking = " and ".join(name for name, found in wanted.items() if not found)
    return f"aarch64 needs {lacking} (Debian: apt install {PACKAGES})" if lacking else ""


def run(cpu: str, program: Path | str, *arguments: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
    """Run an AArch64 program on an emulated CPU."""
    command: Sequence[str] = [str(emulator()), "-cpu", cpu, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def _make(source: Path, folder: str, target: str, *options: str) -> Path:
    """Build a target of a CMake project and return the build folder. Existing build output is reused."""
    there, ninja = ROOT / "build" / "native" / folder, str(tool("ninja"))
    configure = [str(tool("cmake")), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options]
    with one_at_a_time(there):
        for command in ([*configure, "-S", str(source), "-B", str(there)], [ninja, "-C", str(there), target]):
            made = subprocess.run(command, capture_output=True, text=True, timeout=3600)
            assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    return there


def _for_aarch64() -> list[str]:
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    return [f"-DCMAKE_CXX_COMPILER={compiler()}", *system]


def build(target: str) -> Path:
    """Build a program of tests/native for this machine, without sanitizers and with only the generic kernels."""
    only = ("-DSANITIZE=", "-DQTENSOR_GENERIC_ONLY=ON")
    return _make(ROOT / "tests" / "native", "generic", target, *only) / target


def cross_build(target: str) -> Path:
    """Build a program of tests/native for AArch64 with all its kernels, linked statically to run without libraries."""
    options = ["-DSANITIZE=", "-DCMAKE_EXE_LINKER_FLAGS=-static", *_for_aarch64()]
    return _make(ROOT / "tests" / "native", "aarch64", target, *options) / target


# ---- Python ----

PYTHON = ROOT / "build" / "aarch64-python"  # made by supply/aarch64_python.py
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def python_missing() -> str:
    """Return why an AArch64 Python cannot run here, or "" if it can."""
    return missing() or ("" if (PYTHON / ".done").exists() else "there is no AArch64 Python; run make test-arm")


def install(to: Path) -> None:
    """Copy the package and its native module for AArch64, built from this tree, to a folder."""
    paths = sysconfig.get_paths()
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={paths['include']}"]
    release = ["-DCMAKE_BUILD_TYPE=Release", "-DQTENSOR_CUDA=OFF"]
    built = _make(ROOT, "aarch64-module", "_native", *options, *release, *_for_aarch64())
    (module,) = built.glob("_native*.so")  # its name has the suffix for this machine's Python
    shutil.copytree(ROOT / "src" / "notso", to / "notso", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(module, to / "notso" / "qtensor" / "_native.so")


def run_python(cpu: str, package: Path, *arguments: str, timeout: float = 7000) -> subprocess.CompletedProcess[str]:
    """Run Debian's AArch64 Python with the given package and the other packages in build/aarch64-python."""
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
