"""The AArch64 kernels, cross-compiled and run by qemu, give the bits of the generic kernels.

tests/native/family_bits.cpp compares them. The first build takes a minute and is kept in build/. If tools are missing,
the skip message names them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import aarch64
import pytest
from aarch64 import DOTPROD, I8MM, PLAIN

SEED, ROUNDS = "1", "20"
FAMILIES = {I8MM: ["neon_i8mm", "neon", "generic"], DOTPROD: ["neon", "generic"], PLAIN: ["generic"]}

pytestmark = [
    pytest.mark.skipif(bool(aarch64.missing()), reason=aarch64.missing() or "-"),
    pytest.mark.timeout(1200),
    pytest.mark.long("native"),
]


@pytest.fixture(scope="module")
def family_bits() -> Path:
    return aarch64.cross_build("family_bits")


@pytest.fixture(scope="module")
def digest_of_this_machine() -> str:
    """Return a digest of this machine's results with the generic kernels for the same inputs."""
    program = aarch64.build("family_bits")
    run = subprocess.run([program, SEED, ROUNDS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return digests(run.stdout)["generic"]


def digests(printed: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+): \d+ values, digest (\w+)$", printed, re.MULTILINE))


@pytest.mark.parametrize("cpu", FAMILIES)
def test_aarch64_kernels_match_generic(cpu: str, family_bits: Path, digest_of_this_machine: str) -> None:
    """Kernels of all families that the CPU supports are run, best first; results also equal those of this machine."""
    run = aarch64.run(cpu, family_bits, SEED, ROUNDS)
    assert run.returncode == 0, run.stdout + run.stderr
    found = digests(run.stdout)
    assert list(found) == FAMILIES[cpu]
    assert set(found.values()) == {digest_of_this_machine}


@pytest.mark.parametrize("fault", ["matmul", "slabs", "slabs_of_rows", "rows", "attention"])
def test_flipped_bit_is_detected(fault: str, family_bits: Path) -> None:
    """Without this check, the tests above could pass without detecting anything."""
    run = aarch64.run(DOTPROD, family_bits, SEED, ROUNDS, fault)
    assert run.returncode == 1 and "neon differs from generic" in run.stdout, run.stdout + run.stderr


def test_operations_and_threads_pass_on_emulated_aarch64() -> None:
    """Operations with several threads, families selected at run time, and arrays that end at inaccessible pages."""
    driver = aarch64.cross_build("driver")
    for cpu, families in FAMILIES.items():
        run = aarch64.run(cpu, driver, "kernels", SEED, "0")
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.startswith(f"kernels: {' '.join(families)}, "), run.stdout
    run = aarch64.run(I8MM, driver, "threads", SEED, "1")
    assert run.returncode == 0 and "threads: " in run.stdout, run.stdout + run.stderr


# Instructions that some cores lack must occur only in the object files of their family.
INSTRUCTIONS = {
    "generic": (set(), {"sdot", "udot", "smmla"}),
    "neon": ({"sdot", "udot"}, {"smmla", "ummla", "usdot"}),
    "neon_i8mm": ({"sdot", "udot", "smmla"}, set()),
}


def output_of(tool: str, *arguments: str) -> str:
    return subprocess.run(
        [aarch64.PREFIX + tool, *arguments], capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.parametrize("family", INSTRUCTIONS)
def test_kernel_objects_use_only_allowed_instructions(family: str, family_bits: Path) -> None:
    (path,) = family_bits.parent.glob(f"CMakeFiles/kernels_{family}.dir/**/table.cpp.o")
    code = set(
        re.findall(r"^\s*[0-9a-f]+:\s+([a-z]\w*)", output_of("objdump", "-d", "--no-show-raw-insn", str(path)), re.M)
    )
    wanted, unwanted = INSTRUCTIONS[family]
    assert "ret" in code and wanted <= code and not unwanted & code


@pytest.mark.parametrize("family", INSTRUCTIONS)
def test_kernel_objects_export_only_their_kernel_table(family: str, family_bits: Path) -> None:
    (path,) = family_bits.parent.glob(f"CMakeFiles/kernels_{family}.dir/**/table.cpp.o")
    defined = [line.split() for line in output_of("nm", "--defined-only", str(path)).splitlines() if line.strip()]
    shown = [words[2] for words in defined if len(words) == 3 and (words[1].isupper() or words[1] in "vw")]
    assert len(shown) == 1 and "Kernels" in shown[0], f"{path.name} shows {shown}, not its table alone"
