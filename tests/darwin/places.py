"""File locations of the darwin-like run."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "darwin"
FAULTS, NAMES, LIBRARY = PLACE / "faults.txt", PLACE / "names.json", PLACE / "libSystem.so"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
