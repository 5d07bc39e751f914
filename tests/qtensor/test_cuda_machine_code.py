"""Machine code of the CUDA kernels for all supported architectures: no spills, limited registers, no contraction.

Requires nvcc. It only compiles; no GPU is needed.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
FLAGS = ("-cubin", "-O3", "-fmad=false", "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas=-v", f"-I{NATIVE}")
KERNELS_SOURCE = NATIVE / "cuda" / "kernels.cu"
KERNELS = 54

# Requires that eight thread blocks of each kernel fit on a multiprocessor. Some kernels then have too few registers.
TOO_MANY_BLOCKS = """
#include "cuda/lanes.h"
#undef LANES_KERNEL
#define LANES_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, 8)
#include "cuda/kernels.cu"
"""

# Maximum registers of a thread, by prefix of the kernel's name. Products on tensor cores keep the next block of weights
# in registers while they process the current one. Of other kernels, at least 16 warps must fit on a multiprocessor,
# which has 65,536 registers.
MAX_REGISTERS = {"small_m_": 224, "large_m_": 184, "one_row_": 184, "store_": 168, "": 128}

pytestmark = [
    pytest.mark.long("native"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel, as reported by the compiler."""

    registers: int  # of a thread
    spilled: int  # bytes stored to and loaded from memory because registers were insufficient


def compiled(architecture: int, cubin: Path, *more: str, source: Path = KERNELS_SOURCE) -> dict[str, Resources]:
    """Compile all kernels to machine code, and return the resources of each."""
    command = ["nvcc", *FLAGS, *more, f"-arch=sm_{architecture}", str(source), "-o", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr[-4000:]
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, run.stdout + run.stderr, re.DOTALL)
    return {name: Resources(int(registers), int(stored) + int(loaded)) for name, stored, loaded, registers in found}


def excesses(kernels: dict[str, Resources]) -> list[str]:
    """Return a sentence for each spill and each exceeded limit of registers."""
    found = [f"{name} spills {kernel.spilled} bytes" for name, kernel in kernels.items() if kernel.spilled]
    for name, kernel in kernels.items():
        limit = next(limit for prefix, limit in MAX_REGISTERS.items() if name.startswith(prefix))
        if kernel.registers > limit:
            found.append(f"{name} uses {kernel.registers} registers; its limit is {limit}")
    return found


def instructions(cubin: Path) -> dict[str, bytes]:
    """Return the machine code of each kernel in an ELF file. Other sections contain the compiler's options."""
    data = cubin.read_bytes()
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    text = headers[names][4]
    found = {data[text + h[0] : data.index(0, text + h[0])].decode(): data[h[4] : h[4] + h[5]] for h in headers}
    return {name: code for name, code in found.items() if name.startswith(".text.")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_do_not_spill_and_stay_within_register_limits(architecture: int, tmp_path: Path) -> None:
    kernels = compiled(architecture, tmp_path / "kernels.cubin")
    assert len(kernels) == KERNELS, sorted(kernels)
    assert not excesses(kernels)


def test_register_spill_is_detected(tmp_path: Path) -> None:
    source = tmp_path / "crowded.cu"
    source.write_text(TOO_MANY_BLOCKS)
    found = excesses(compiled(90, tmp_path / "kernels.cubin", source=source))
    assert any("spills" in sentence for sentence in found)


def test_machine_code_does_not_depend_on_contraction(tmp_path: Path) -> None:
    """Every float operation is an intrinsic, so the compiler has nothing to contract."""
    compiled(90, tmp_path / "separate.cubin")
    compiled(90, tmp_path / "contracted.cubin", "-fmad=true")
    code = instructions(tmp_path / "separate.cubin")
    assert len(code) == KERNELS
    assert code == instructions(tmp_path / "contracted.cubin")
