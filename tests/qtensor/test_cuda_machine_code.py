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

# Require eight thread blocks per multiprocessor for every kernel, which causes spills.
TOO_MANY_BLOCKS = """
#include "cuda/lanes.h"
#undef LANES_KERNEL
#define LANES_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, 8)
#include "cuda/kernels.cu"
"""

# Maximum registers of a thread, by prefix of the kernel's name. A multiprocessor has 65,536 registers. Products on
# tensor cores keep the next block of weights in registers while they process the current one. Of other kernels, at
# least 16 warps must fit.
BOUNDS = {"small_m_": 224, "large_m_": 184, "one_row_": 184, "store_": 168, "": 128}

pytestmark = [
    pytest.mark.long("native"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]


@dataclass(frozen=True)
class Use:
    """The compiler's report about a kernel's resources."""

    registers: int
    spilled: int
    """Bytes stored to and loaded from memory because registers were insufficient."""


def compiled(architecture: int, cubin: Path, *more: str, source: Path = KERNELS_SOURCE) -> dict[str, Use]:
    """Compile all kernels to machine code, and return the resources that each uses."""
    command = ["nvcc", *FLAGS, *more, f"-arch=sm_{architecture}", str(source), "-o", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr[-4000:]
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, run.stdout + run.stderr, re.DOTALL)
    return {name: Use(int(registers), int(stored) + int(loaded)) for name, stored, loaded, registers in found}


def complaints(uses: dict[str, Use]) -> list[str]:
    found = [f"{name} spills {use.spilled} bytes" for name, use in uses.items() if use.spilled]
    for name, use in uses.items():
        bound = next(most for begin, most in BOUNDS.items() if name.startswith(begin))
        if use.registers > bound:
            found.append(f"{name} takes {use.registers} registers, {bound} are its bound")
    return found


def instructions(cubin: Path) -> dict[str, bytes]:
    """Return each kernel's section of an ELF file; other sections contain the compiler's options, which differ."""
    data = cubin.read_bytes()
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    text = headers[names][4]
    found = {data[text + h[0] : data.index(0, text + h[0])].decode(): data[h[4] : h[4] + h[5]] for h in headers}
    return {name: code for name, code in found.items() if name.startswith(".text.")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_do_not_spill_and_stay_within_register_limits(architecture: int, tmp_path: Path) -> None:
    uses = compiled(architecture, tmp_path / "kernels.cubin")
    assert len(uses) == KERNELS, sorted(uses)
    assert not complaints(uses)


def test_register_spill_is_detected(tmp_path: Path) -> None:
    """Without this check, the test above could pass without detecting anything."""
    source = tmp_path / "crowded.cu"
    source.write_text(TOO_MANY_BLOCKS)
    said = complaints(compiled(90, tmp_path / "kernels.cubin", source=source))
    assert any("spills" in words for words in said)


def test_machine_code_does_not_depend_on_contraction(tmp_path: Path) -> None:
    """Every float operation is an intrinsic, so that allowing contraction gives the same code, byte for byte."""
    compiled(90, tmp_path / "apart.cubin")
    compiled(90, tmp_path / "contracted.cubin", "-fmad=true")
    code = instructions(tmp_path / "apart.cubin")
    assert len(code) == KERNELS
    assert code == instructions(tmp_path / "contracted.cubin")
