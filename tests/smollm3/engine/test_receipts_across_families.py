"""Receipts of one kernel family are reproduced by all others, and changed ones are detected.

RECEIPTS=1000 sets their number; LONG=native also checks up to twenty under qemu and ten with emulated CUDA kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aarch64
import pytest
from stub_gpu.native_build import built

from notso.qtensor.backends.cpu.kernel_choice import available_kernels

COUNT = int(os.environ.get("RECEIPTS", 12))
WRITER = Path(__file__).with_name("receipt_writer.py")
pytestmark = pytest.mark.timeout(0 if COUNT > 12 else 900)


def run(*arguments: object, family: str = "") -> dict[str, Any]:
    environment = {**os.environ, **({"NOTSO_KERNELS": family} if family else {})}
    done = subprocess.run(
        [sys.executable, str(WRITER), *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    print(family or "best", arguments[0], told)
    return told


@pytest.fixture(scope="module")
def receipts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("receipts") / "receipts.json"
    told = run("write", path, COUNT)
    assert told["receipts"] == COUNT and not told["problems"]
    return path


@pytest.mark.parametrize("family", available_kernels()[1:])
def test_receipts_are_reproduced_by_other_kernel_families(receipts: Path, family: str) -> None:
    few = (max(1, COUNT // 10),) if family == "generic" else ()  # fewer, because it takes ten times as long
    assert not run("check", receipts, *few, family=family)["problems"]


def test_changed_receipts_are_detected(receipts: Path) -> None:
    told = run("attack", receipts, COUNT)
    assert not told["problems"] and all(told["tried"].values())


@pytest.mark.long("native")
@pytest.mark.skipif(bool(aarch64.python_missing()), reason=aarch64.python_missing() or "-")
def test_receipts_are_reproduced_on_emulated_aarch64(receipts: Path, tmp_path: Path) -> None:
    aarch64.install(tmp_path)
    done = aarch64.run_python(aarch64.I8MM, tmp_path, str(WRITER), "check", str(receipts), "20")
    assert done.returncode == 0, done.stderr[-3000:]
    print("neon_i8mm", done.stdout)
    assert not json.loads(done.stdout)["problems"]


# As in tests/qtensor/test_emulated_cuda.py, replace the installed native module.
EMULATED = """
import importlib.util, runpy, sys
name = "notso.qtensor._native"
spec = importlib.util.spec_from_file_location(name, sys.argv.pop(1))
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
from notso.qtensor.backends.cpu import kernel_choice
assert "cuda-emulated" in kernel_choice.available_kernels()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long("native")
def test_receipts_are_reproduced_by_emulated_cuda_kernels(receipts: Path) -> None:
    module = built("_native_cuda_emulated")
    command = [sys.executable, "-c", EMULATED, str(module), str(WRITER), "check", str(receipts), "10"]
    environment = {**os.environ, "NOTSO_KERNELS": "cuda-emulated"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    print("cuda-emulated", done.stdout)
    assert not json.loads(done.stdout)["problems"]
