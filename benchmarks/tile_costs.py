"""Measure the work of the AMX kernels on tiles and vectors, on any machine with AVX-512: see docs/kernels/tiles-amx.md.

    python benchmarks/tile_costs.py

An emulation counts the tile instructions; everything else is timed without them. If the processor has AMX, the whole
kernels are timed as well. Builds tests/native/tile_costs.cpp in build/tile_costs, which takes a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "tile_costs"


def main() -> None:
    beside = Path(sys.executable).parent  # where the build tools of the virtual environment are
    options = ["-DSANITIZE=", "-DQTENSOR_OPTIMIZE=-O3", f"-DCMAKE_MAKE_PROGRAM={beside / 'ninja'}"]
    configure = [
        str(beside / "cmake"),
        "-G",
        "Ninja",
        *options,
        "-S",
        str(ROOT / "tests" / "native"),
        "-B",
        str(FOLDER),
    ]
    for command in (configure, [str(beside / "ninja"), "-C", str(FOLDER), "tile_costs"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    raise SystemExit(subprocess.run([FOLDER / "tile_costs"]).returncode)


if __name__ == "__main__":
    main()
