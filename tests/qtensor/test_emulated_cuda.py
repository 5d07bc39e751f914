"""The CUDA kernels, compiled as C++ for emulated warps and blocks (tests/native/emulated_lanes.h), give the CPU's bits.

The native module is linked again with an additional kernel family, and the kernel tests run with it, in a separate
process for each part. These tests need no GPU, and say nothing about speed.
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

# Replace the installed native module before its first import. Test only families that the other tests do not compare.
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

# Without these tests, the same kernels are tested by the model and by rows on the stub driver (test_cuda_rows,
# test_backends, test_cuda_bits).
pytestmark = [pytest.mark.timeout(7200), pytest.mark.long("native")]


@pytest.fixture(scope="module")
def emulated_module() -> Path:
    """Build the native module with the family `cuda-emulated`, reusing most objects of the module's build folder."""
    return built("_native_cuda_emulated")


def run_tests(module: Path, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EMULATED_LANES_FAULT": fault}
    command = [sys.executable, "-c", RUN_TESTS, str(module), "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=3600)


@pytest.mark.parametrize("part", PARTS)
def test_emulated_cuda_kernels_match_generic(emulated_module: Path, part: str) -> None:
    run = run_tests(emulated_module, str(TESTS / f"test_kernels_{part}.py"))
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    print(run.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("part", "test"),
    [("matmul", "test_column_does_not_depend_on_neighbors"), ("attention", "test_attention_matches_numpy")],
)
def test_missing_barrier_is_detected(emulated_module: Path, part: str, test: str) -> None:
    """Threads run in a different order in each launch. Without this check, the tests above could miss such errors."""
    run = run_tests(emulated_module, str(TESTS / f"test_kernels_{part}.py"), "-k", test, fault="barrier")
    assert run.returncode == 1 and " differs from " in run.stdout, run.stdout[-3000:]
