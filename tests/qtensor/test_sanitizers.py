"""Native code under the address, undefined-behavior and thread sanitizers, without Python: tests/native/driver.cpp.

The first build takes half a minute and is kept in build/; the tests then take a few seconds. `make sanitize` runs them
longer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from notso.qtensor.backends.cpu import kernel_choice

ROOT = Path(__file__).parents[2]
SECONDS = os.environ.get("SANITIZE_SECONDS", "3")
SEED = os.environ.get("SANITIZE_SEED", "1")

pytestmark = [pytest.mark.timeout(7200), pytest.mark.long("native")]


def tool(name: str) -> str:
    """Return a program next to this Python or on PATH; skip the test if there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def need_sanitizer(kinds: str, folder: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    command = [*compiler.split(), f"-fsanitize={kinds}", str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, timeout=120).returncode != 0:
        pytest.skip(f"the compiler has no -fsanitize={kinds}")
    if subprocess.run([folder / "probe"], capture_output=True, timeout=60).returncode != 0:
        pytest.skip(f"programs with -fsanitize={kinds} do not run here")


def build(kinds: str, *options: str) -> Path:
    folder = ROOT / "build" / "sanitize" / kinds.replace(",", "-")
    ninja = tool("ninja")
    configure = [tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DSANITIZE={kinds}", *options]
    for command in (
        [*configure, "-S", str(ROOT / "tests/native"), "-B", str(folder)],
        [ninja, "-C", str(folder), "driver"],
    ):
        run = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return folder / "driver"


def watch(driver: Path, what: str) -> None:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run = subprocess.run(
        [driver, what, SEED, SECONDS], capture_output=True, text=True, env=environment, timeout=3600 + float(SECONDS)
    )
    assert run.returncode == 0, f"driver {what} {SEED}: {run.stdout[-2000:]}{run.stderr[-6000:]}"
    print(run.stdout.strip())


def test_kernels_and_operations_pass_address_sanitizer(tmp_path: Path) -> None:
    """All families and formats with exactly sized arrays: no access out of bounds or undefined behavior; equal bits."""
    need_sanitizer("address,undefined", tmp_path)
    without_amx = "OFF" if "amx_int8" in kernel_choice.cpu_features() else "ON"
    watch(build("address,undefined", f"-DWITHOUT_AMX={without_amx}"), "kernels")


def test_thread_pool_passes_thread_sanitizer(tmp_path: Path) -> None:
    """Concurrent callers, replaced thread pools and changed kernels. Generic kernels suffice, because only the pool
    could have races."""
    need_sanitizer("thread", tmp_path)
    watch(build("thread", "-DQTENSOR_GENERIC_ONLY=ON"), "threads")
