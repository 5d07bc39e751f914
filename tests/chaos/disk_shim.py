"""A preloaded library that makes a process's disk fail and its clock jump (disk_shim.c)."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("disk_shim.c")
FIELDS = ("calls", "fail_from", "fail_to", "error", "failed", "clock_seconds")
WRITE, SYNC, CUT, UNLINK, CREATE = range(1, 6)
HEADER = struct.Struct("=4Iq")
EVER = 1 << 62


def built(folder: Path) -> Path:
    """Compile the library into `folder` and return its path. Skip the test if that is not possible."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("a failing disk needs Linux and a C compiler")
    library = folder / "disk_shim.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", library, SOURCE, "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return library


@dataclass(frozen=True)
class Call:
    """One call that changed a file or tried to. For CUT, `offset` is the new size."""

    kind: int
    error: int
    file: str
    data: bytes
    offset: int


class Shim:
    """Controls the shim for the files `directory`/notso.db*. The fields named in FIELDS are shared with the process."""

    def __init__(self, folder: Path, directory: Path, *, trace: bool = False) -> None:
        state = folder / f"{directory.name}.state"
        state.write_bytes(bytes(8 * len(FIELDS)))
        self._map = _mapped(state)
        self.trace = folder / f"{directory.name}.trace"
        self.environment = {
            "LD_PRELOAD": str(built(folder)),
            "NOTSO_SHIM_STATE": str(state),
            "NOTSO_SHIM_FILES": os.path.realpath(directory) + "/notso.db",
        }
        if trace:
            self.environment["NOTSO_SHIM_TRACE"] = str(self.trace)

    @classmethod
    def inherited(cls) -> Shim:
        """Return the shim under which the current process runs."""
        shim = cls.__new__(cls)
        shim._map = _mapped(Path(os.environ["NOTSO_SHIM_STATE"]))
        return shim

    def read(self, field: str) -> int:
        return int(struct.unpack_from("q", self._map, 8 * FIELDS.index(field))[0])

    def set(self, field: str, value: int) -> None:
        struct.pack_into("q", self._map, 8 * FIELDS.index(field), value)

    def fail(self, after: int, error: int, count: int = 1) -> None:
        """Let the next `after` calls pass and the following `count` calls fail."""
        self.set("fail_from", 0)
        first = self.read("calls") + after + 1
        self.set("error", error)
        self.set("failed", 0)
        self.set("fail_to", first + count - 1)
        self.set("fail_from", first)

    def mend(self) -> int:
        """Stop failing calls. Return how many have failed."""
        self.set("fail_from", 0)
        return self.read("failed")

    def calls(self) -> Iterator[Call]:
        """Return the traced calls in order."""
        held = self.trace.read_bytes()
        at = 0
        while at < len(held):
            kind, error, name, size, offset = HEADER.unpack_from(held, at)
            at += HEADER.size
            file = Path(held[at : at + name].decode()).name
            yield Call(kind, error, file, held[at + name : at + name + size], offset)
            at += name + size


def _mapped(state: Path) -> mmap.mmap:
    with state.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
