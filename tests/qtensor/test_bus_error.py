"""If a memory-mapped file is truncated, the process ends with a message about the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import mmap, sys
from notso.qtensor.backends.cpu import kernel_choice

kernel_choice.end_on_bus_errors(3, "it is gone")
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    print(mapped[5000])
"""


def test_bus_error_prints_the_message_and_exits_with_the_code(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (3, b"", b"it is gone\n")
