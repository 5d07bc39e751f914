"""Instructions of aarch64 kernels for 256 weights and one batch row, counted by qemu: the table in neon.md.

    PYTHONPATH=tests python docs/kernels/instruction_counts.py

Counts, not rates: how many a processor does at a time, and how long it waits for memory, is not in them. Two lengths
of a row are run and subtracted, so what comes before and after the blocks is not counted.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import aarch64
from aarch64 import I8MM

from notso.qtensor.formats import FORMATS

TYPES = {str(format): format.ggml_type for format in FORMATS.values()}
K = 2048, 4096
SMALL, LARGE = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "IQ4_XS"), ("Q4_K", "Q6_K", "Q8_0")


def instructions(program: Path, *arguments: object) -> int:
    """Of one whole run."""
    command = [aarch64.emulator(), "-cpu", I8MM, "-singlestep", "-d", "exec,nochain", str(program)]
    run = subprocess.run([*map(str, command), *map(str, arguments)], capture_output=True, check=True)
    return run.stderr.count(b"\nTrace ")


def per_256(program: Path, family: str, format: str, rows: int, m: int) -> str:
    """For each row, block and batch row."""
    few, many = (instructions(program, family, TYPES[format], k, rows, m) for k in K)
    return f"{(many - few) / ((K[1] - K[0]) / 256 * rows * m):.0f}"


def main() -> None:
    if aarch64.missing():
        raise SystemExit(aarch64.missing())
    program = aarch64.cross_build("one_product")
    print("| | M = 1 | 2 | 4 | generic, 1 |\n|---|---:|---:|---:|---:|")
    for name in SMALL:
        counts = [per_256(program, "neon", name, 4, m) for m in (1, 2, 4)]
        print(f"| {name} | {' | '.join([*counts, per_256(program, 'generic', name, 4, 1)])} |", flush=True)
    print("\n| tiles, 64 rows | M = 8, sdot | smmla | 16, sdot | smmla |\n|---|---:|---:|---:|---:|")
    for name in LARGE:
        counts = [per_256(program, family, name, 64, m) for m in (8, 16) for family in ("neon", "neon_i8mm")]
        print(f"| {name} | {' | '.join(counts)} |", flush=True)


if __name__ == "__main__":
    main()
