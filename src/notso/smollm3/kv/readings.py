"""Pinned readings on disk: named sets of blocks with a budget of their own.

A reading is evicted whole, since a chain of blocks is of no use without its beginning. The least recently used one goes
first; conversations never evict one. Blocks that several readings begin with are stored once.
"""

from __future__ import annotations

import logging
from pathlib import Path

from notso.smollm3.kv.block_file import file_bytes
from notso.smollm3.kv.disk_store import DiskStore
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS

_log = logging.getLogger(__name__)


class Readings:
    """Readings in a folder, of all models. `windows` is None if the format has none."""

    def __init__(
        self, folder: Path, cache_version: bytes, block_bytes: int, window_bytes: int, budget_bytes: int
    ) -> None:
        self._budget_bytes = budget_bytes
        self._has_warned = False
        self.files = DiskStore(folder, cache_version, block_bytes, budget_bytes, evicts=False)
        self.windows: DiskStore | None = None
        self.stores = [self.files]
        beside = folder / "windows"
        if window_bytes:
            self.windows = DiskStore(beside, cache_version, window_bytes, budget_bytes, evicts=False)
            self.stores.append(self.windows)
        elif beside.is_dir():  # windows of an earlier format: counted, and removed with their readings
            self.stores.append(DiskStore(beside, cache_version, 0, 0, evicts=False))

    @property
    def is_writing(self) -> bool:
        return all(files.is_writing for files in self.stores)

    def has(self, hash: bytes) -> bool:
        """Whether a block exists, judging by file names."""
        return self.files.has(hash)

    def window(self, hash: bytes, tokens: list[int]) -> bytes | None:
        """Return the window of a first block, or None."""
        return None if self.windows is None else self.windows.get(hash, tokens)

    def belongs_to(self, hash: bytes, reading: bytes) -> None:
        """Add a stored block to a reading."""
        for files in self.stores:
            files.belongs_to(hash, reading)

    def stored(self, reading: bytes) -> tuple[int, int]:
        """Return the number of a reading's blocks, and their size with windows in bytes."""
        blocks, *windows = (files.sizes(reading) for files in self.stores)
        return len(blocks), sum(blocks) + sum(map(sum, windows))

    def make_room(self, reading: bytes, blocks: int, unwritten: int) -> bool:
        """Evict other readings until `unwritten` blocks fit; False if all `blocks` of this one exceed the budget."""
        block, window = (0 if files is None else _file_bytes(files) for files in (self.files, self.windows))
        if blocks * block + window > self._budget_bytes:
            if not self._has_warned:
                _log.warning("a reading of %d blocks exceeds the disk space for readings and is not pinned", blocks)
                self._has_warned = True
            return False
        for files in self.stores:
            files.use(reading)
        others = iter([each for each in self.files.by_use() if each != reading])
        while unwritten and self._used_bytes + unwritten * block + window > self._budget_bytes:
            oldest = next(others, None)
            if oldest is None:
                return False
            for files in self.stores:
                files.evict(oldest)
        return True

    @property
    def _used_bytes(self) -> int:
        return sum(files.used_bytes + files.queued_bytes for files in self.stores)


def _file_bytes(files: DiskStore) -> int:
    return file_bytes(BLOCK_TOKENS, files.block_bytes)
