"""Count the instructions of AArch64 kernels for 256 weights and one batch row with qemu: see docs/kernels/neon.md.

    PYTHONPATH=tests python benchmarks/instruction_counts.py

Counts are not rates: they do not show how many instructions a processor executes at a time, nor how long it waits for
memory. The counts of two row lengths are subtracted, so that only the work on blocks is counted.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import aarch64
from aarch64 import I8MM

from notso.qtensor import FORMATS

TYPES = {str(format): format.ggml_type for format in FORMATS.values()}
K = 512, 1024
FORMATS_COUNTED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q5_1", "IQ4_XS")
BATCHES = 1, 2, 4, 8, 16, 64
ROWS = 64


def instructions(program: Path, *arguments: object) -> int:
    """Return the number of instructions of a run."""
    command = [aarch64.emulator(), "-cpu", I8MM, "-singlestep", "-d", "exec,nochain", str(program)]
    run = subprocess.run([*map(str, command), *map(str, arguments)], capture_output=True, check=True)
    return run.stderr.count(b"\nTrace ")


def per_256(program: Path, family: str, format: str, m: int, *layout: str) -> str:
    """Return the number of instructions per row, block and batch row."""
    few, many = (instructions(program, family, TYPES[format], k, ROWS, m, *layout) for k in K)
    return f"{(many - few) / ((K[1] - K[0]) / 256 * ROWS * m):.0f}"


def main() -> None:
    if aarch64.missing():
        raise SystemExit(aarch64.missing())
    program = aarch64.cross_build("one_product")
    for family in ("neon", "neon_i8mm"):
        print(f"\n| {family}: rows, packed | M = {' | '.join(map(str, BATCHES))} |\n|---|{'---:|' * len(BATCHES)}")
        for name in FORMATS_COUNTED:
            both = [
                f"{per_256(program, family, name, m)}, {per_256(program, family, name, m, 'packed')}" for m in BATCHES
            ]
            print(f"| {name} | {' | '.join(both)} |", flush=True)


if __name__ == "__main__":
    main()
