"""Build targets that only tests use, in the folder in which the native module of this Python was built."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str:
    """Find a program in the folder of this Python or on PATH, or skip the test."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def build_folder() -> Path | None:
    """Return the folder in which the native module of this Python was built, if any."""
    for cache_file in sorted((ROOT / "build").glob("*/CMakeCache.txt")):
        python = re.search(r"^Python_EXECUTABLE:\w+=(.+)$", cache_file.read_text(), re.MULTILINE)
        folder = cache_file.parent
        if python and Path(python[1]).parent == Path(sys.executable).parent and (folder / "build.ninja").exists():
            return folder
    return None


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a build folder. Tests run in several processes, and ninja does not lock it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def built(target: str) -> Path:
    """Build a target and return its only library."""
    found, ninja = build_folder(), tool("ninja")
    folder = found or ROOT / "build" / "emulated"
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure = [tool("cmake"), "-G", "Ninja", *options, "-S", str(ROOT), "-B", str(folder)]
    with one_at_a_time(folder):
        for command in (*([] if found else [configure]), [ninja, "-C", str(folder), target]):
            run = subprocess.run(command, capture_output=True, text=True, timeout=800)
            assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    (module,) = folder.glob(f"{target}*.so")
    return module
