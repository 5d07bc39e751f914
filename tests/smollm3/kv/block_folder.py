"""A folder of small blocks for tests of `notso.smollm3.kv.disk_store`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from notso.smollm3.kv.block_file import BlockName
from notso.smollm3.kv.disk_store import DiskStore

SIZE = 96  # bytes per block
MODEL = b"one model, one format"
TOKENS = [5, 0, 128_255, 7]
Open = Callable[..., DiskStore]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


@contextlib.contextmanager
def opening(folder: Path) -> Iterator[Open]:
    """Return a function that opens the folder any number of times; close all stores at the end."""
    with contextlib.ExitStack() as stack:

        def open_files(cache_version: bytes = MODEL, budget: int = 1 << 20, size: int = SIZE, **how: int) -> DiskStore:
            files = DiskStore(folder, cache_version, size, budget, **({"free_bytes": 0} | how))
            stack.callback(files.close)
            return files

        yield open_files


def stored(opened: Open, tmp_path: Path) -> Path:
    """Store a block with key(1), and return its file."""
    files = opened()
    assert files.put(key(1), TOKENS, content(1))
    files.close()
    return tmp_path / "kv" / str(BlockName.of(MODEL, key(1), b"", is_partial=False))
