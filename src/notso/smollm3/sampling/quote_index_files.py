"""Store the indexes of long texts in files, so that they are not built again after a restart.

A file stores the places of a text (see quote_index), but not the text, and is memory-mapped. It belongs to a pinned
reading (a named prompt prefix, see block_pool) that contains the text, and is removed with this reading. The file name
contains a digest of everything that the places depend on. A damaged file is detected by its checksum and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from notso.smollm3.sampling.quote_index import Places
from notso.smollm3.sampling.quote_index_child import deserialize_places, serialize_places
from notso.system.confinement import ConfinedWorkError

BUDGET_BYTES = 512 << 20
"""Maximum total size of the files. The least recently used files are removed first."""
FREE_BYTES = 1 << 30
"""Space to keep free on the disk."""
UNFINISHED_S = 3600.0
"""Age at which a temporary file is removed, because the process that wrote it must have been killed."""
MAGIC = b"notso quote 1\n".ljust(16, b"\0")
DIGEST_BYTES = 16
HEAD_BYTES = len(MAGIC) + DIGEST_BYTES


class QuoteIndexFiles:
    """Index files in a private folder that several processes can share."""

    def __init__(self, folder: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes

    def places(self, reading: bytes, digest: bytes, size: int, make: Callable[[], Places]) -> Places:
        """Return the places of a text of `size` characters from its file, or call `make` and store the result."""
        path = self._folder / f"{reading.hex()}-{digest.hex()[:32]}"
        stored = _read(path, size)
        if stored is not None:
            return stored
        # The temporary file is created before the index is built. If the reading is removed in the meantime, this file
        # is removed with it, and no file of the removed reading remains.
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(".tmp", f"{path.name}.", self._folder)
        except OSError:
            return make()
        created = None
        try:
            with os.fdopen(descriptor, "wb") as file:
                created = make()
                body = serialize_places(created)
                self._make_room(HEAD_BYTES + len(body))
                file.write(MAGIC + _digest(body))
                file.write(body)
            Path(name).replace(path)
        except OSError:
            if created is None:
                raise
        finally:
            with contextlib.suppress(OSError):
                Path(name).unlink()
        return created

    def forget(self, reading: bytes) -> None:
        for path in self._folder.glob(f"{reading.hex()}-*"):
            path.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        if size > self._budget_bytes:
            raise OSError("beyond the budget")
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == ".tmp" and status.st_mtime < time.time() - UNFINISHED_S:
                    path.unlink()
                else:
                    files.append((status.st_mtime_ns, status.st_size, path))
        used = sum(each for _, each, _ in files)
        for _, file_size, path in sorted(files):
            if used + size <= self._budget_bytes:
                break
            if file_size:  # an empty file is still being written
                path.unlink(missing_ok=True)
                used -= file_size
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < FREE_BYTES + size:
            raise OSError("the disk is almost full")


def _read(path: Path, size: int) -> Places | None:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        body = memoryview(mapped)[HEAD_BYTES:]
        if mapped[:HEAD_BYTES] == MAGIC + _digest(body):
            with contextlib.suppress(OSError):
                os.utime(path)  # marks the file as recently used
            return deserialize_places(body, size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfinedWorkError):  # ValueError: the file is empty
        pass
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
