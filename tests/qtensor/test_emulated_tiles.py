"""The AMX kernels on emulated tiles (tests/native/emulated_tiles.h), for machines without AMX.

The native module is linked again with an additional kernel family, and the kernel tests run with it in a separate
process. With a deliberate fault, the same tests must fail. Everything else in these kernels needs AVX-512.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stub_gpu.native_build import built

from notso.qtensor.backends.cpu import kernel_choice

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent
KERNEL_TESTS = ("matmul", "fused", "attention_bytes")
NO_TILES = "not F32 and not F16 and not BF16"  # AMX uses AVX-512's kernels, as in attention over F16

# Replace the installed native module before its first import.
REPLACE = """
import importlib.util, sys
name = "notso.qtensor._native"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
from notso.qtensor.backends.cpu import kernel_choice
assert "amx-emulated" in kernel_choice.available_kernels() and kernel_choice.kernels() != "amx-emulated"
"""
# Test only the family that the other tests do not compare.
RUN_TESTS = """
import pytest
kernel_choice.available_kernels = lambda: ["amx-emulated", "generic"]
sys.exit(pytest.main(sys.argv[2:]))
"""
COUNT = """
import ctypes, json
import numpy as np
from notso.qtensor.backends.cpu import ops
from notso.qtensor.formats import Q4_K, Q6_K
from notso.qtensor.reference.random_blocks import random_blocks
from notso.qtensor.tensor import QTensor

rng = np.random.default_rng(1)
library = ctypes.CDLL(sys.argv[1])
kernel_choice.set_threads(1)
kernel_choice.use_kernels("amx-emulated")

def counted(call):
    before, after = (ctypes.c_int64 * 6)(), (ctypes.c_int64 * 6)()
    library.emulated_tile_counts(before)
    call()
    library.emulated_tile_counts(after)
    names = ("configures", "zeros", "loads", "stores", "byte_products", "float_products")
    return {name: b - a for name, a, b in zip(names, before, after)}

found = {}
for format in (Q4_K, Q6_K):
    weight = QTensor("w", format, (256, 512), random_blocks(format, 512, rng).reshape(-1))
    for columns in (3, 4, 16, 18, 32, 48, 64, 96, 128, 160):
        x, y = rng.standard_normal((columns, 512), np.float32), ops.empty(columns, 256)
        found[f"{format} {columns}"] = counted(lambda: ops.matmul(x, weight, y))
pool = ops.key_value_pool(4, 1, 128, "k8v8")
table, out = np.arange(4, dtype=np.int32).reshape(1, 4), np.empty((32, 4, 128), np.float32)
q = rng.standard_normal((32, 4, 128), np.float32)
for rows in (1, 3, 4, 8, 32):
    at = np.arange(512 - rows, 512, dtype=np.int32), np.zeros(rows, np.int32), table
    found[f"attention {rows}"] = counted(lambda: ops.attention(q[:rows], *at, pool, 0.1, out[:rows]))
print(json.dumps(found))
"""

pytestmark = [
    pytest.mark.long("native"),
    pytest.mark.timeout(7200),
    pytest.mark.skipif("avx512_vnni" not in kernel_choice.cpu_features(), reason="the AMX kernels also need AVX-512"),
]


@pytest.fixture(scope="module")
def emulated_module() -> Path:
    """Build the native module with the family `amx-emulated`, reusing most objects of the module's build folder."""
    return built("_native_emulated")


def run_tests(module: Path, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EMULATED_TILE_FAULT": fault}
    if not fault:
        del environment["EMULATED_TILE_FAULT"]
    command = [sys.executable, "-c", REPLACE + RUN_TESTS, str(module), "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=3600)


def test_emulated_amx_kernels_match_generic(emulated_module: Path) -> None:
    files = [str(TESTS / f"test_kernels_{name}.py") for name in KERNEL_TESTS]
    run = run_tests(emulated_module, *files, "-k", NO_TILES)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    print(run.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("file", "test"),
    [("matmul", "test_column_does_not_depend_on_neighbors"), ("attention_bytes", "test_prefill_gives_the_bits")],
)
def test_missing_tile_row_is_detected(emulated_module: Path, file: str, test: str) -> None:
    """Hardware would give no error. Without this check, the tests above could pass without detecting anything."""
    run = run_tests(emulated_module, str(TESTS / f"test_kernels_{file}.py"), "-k", test, fault="short")
    noticed = re.search("amx-emulated differs from generic|a packed .* differs from rows", run.stdout)
    assert run.returncode == 1 and noticed, run.stdout[-3000:]


def test_mismatched_tile_shapes_abort_the_process(emulated_module: Path) -> None:
    """Hardware would raise an invalid-opcode exception."""
    run = run_tests(emulated_module, str(TESTS / "test_kernels_matmul.py"), "-k", "neighbors", "-s", fault="uneven")
    assert run.returncode < 0 and re.search("emulated tiles: tdp.*differ in rows", run.stderr), run.stderr[-2000:]


def test_tile_instruction_counts_stay_within_limits(emulated_module: Path) -> None:
    """A product takes 16 cycles and a load 8, so with two loads per product, a kernel would be limited by loads."""
    command = [sys.executable, "-c", REPLACE + COUNT, str(emulated_module)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    per_block = 2 * 256 // 16  # two blocks per row, tiles of 16 rows
    for name in ("Q4_K", "Q6_K"):
        assert not any(found[f"{name} 3"].values()), "few columns do not use tiles"
        for columns in (16, 18, 32, 48, 64, 96, 128, 160):
            counts, tiles = found[f"{name} {columns}"], -(-columns // 16)
            mins = name == "Q4_K" and columns > 128  # with fewer columns, vector instructions apply the minima
            assert counts["byte_products"] == per_block * tiles * 8, "two planes, each of four times 64 values"
            assert counts["float_products"] == (per_block * tiles if mins else 0)
            products = counts["byte_products"] + counts["float_products"]
            assert counts["loads"] <= (1.6 if columns == 16 else 1.25) * products
            assert counts["stores"] == per_block * tiles * (3 if mins else 2)
    for rows in (1, 3):
        assert not any(found[f"attention {rows}"].values()), "fewer than sixteen queries do not use tiles"
    for rows in (4, 8, 32):
        counts, per_tile = found[f"attention {rows}"], 4 * -(-rows * 4 // 16)
        assert counts["byte_products"] == per_tile * (16 + 32), "one plane for scores, two for values"
        assert counts["loads"] <= 1.1 * counts["byte_products"] and counts["stores"] == per_tile * 24
        assert 1 <= counts["configures"] <= (os.cpu_count() or 1), "once per participating thread"
