"""The CUDA kernels as ordinary C++ over emulated warps and blocks (tests/native/emulated_lanes.h): the bits of the CPU.

The native module is linked a second time, with one family more, and the kernels' tests run on it in a process of its
own, one for each of a few parts. Nothing here needs a GPU, and nothing here has been timed on one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_gpu.native_build import built

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent
FAMILY = "cuda-emulated"
PARTS = ("matmul", "fused", "rows", "rope", "attention", "attention_bytes")
"""Files of kernel tests."""

# Puts another native module in the place of the installed one, before anybody asks for it. Of the families only those
# that the other tests do not compare already.
RUN_TESTS = f"""
import importlib.util, sys
name = "notso.qtensor._native"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
from notso.qtensor.backends.cpu import kernel_choice
assert "{FAMILY}" in kernel_choice.available_kernels() and kernel_choice.kernels() != "{FAMILY}"
import pytest
kernel_choice.available_kernels = lambda: ["{FAMILY}", "generic"]
sys.exit(pytest.main(sys.argv[2:]))
"""

# Without them, model and rows on the stub driver (test_cuda_rows, test_backends, test_cuda_bits) run the same kernels.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long("native")]


@pytest.fixture(scope="module")
def emulated_module() -> Path:
    """The native module with the family `cuda-emulated`, beside the module itself: nearly all of it is there."""
    return built("_native_cuda_emulated")


def run_tests(module: Path, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EMULATED_LANES_FAULT": fault}
    command = [sys.executable, "-c", RUN_TESTS, str(module), "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=800)


@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_gives_the_bits_of_generic(emulated_module: Path, part: str) -> None:
    run = run_tests(emulated_module, str(TESTS / f"test_kernels_{part}.py"))
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    print(run.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("part", "test"), [("matmul", "test_a_column_does_not_know_its_neighbors"), ("attention", "test_against_numpy")]
)
def test_a_missing_barrier_is_noticed(emulated_module: Path, part: str, test: str) -> None:
    """Threads take turns in another order at each launch. Else the tests above prove little."""
    run = run_tests(emulated_module, str(TESTS / f"test_kernels_{part}.py"), "-k", test, fault="barrier")
    assert run.returncode == 1 and " differs from " in run.stdout, run.stdout[-3000:]
