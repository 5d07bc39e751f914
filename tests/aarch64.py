"""Compiling and running for aarch64 on a machine of another kind: a cross compiler and qemu's user mode."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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


def build(folder: str, target: str, *options: str) -> Path:
    """A target of tests/native without sanitizers; what is there already and up to date costs nothing."""
    there, ninja = ROOT / "build" / "native" / folder, str(tool("ninja"))
    configure = [str(tool("cmake")), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DSANITIZE=", *options]
    for command in (
        [*configure, "-S", str(ROOT / "tests" / "native"), "-B", str(there)],
        [ninja, "-C", str(there), target],
    ):
        made = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    return there / target


def cross_build(target: str) -> Path:
    """The same for aarch64, linked so that no library of that kind is needed to run it."""
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static")
    return build("aarch64", target, f"-DCMAKE_CXX_COMPILER={compiler()}", *system)
