"""Which process writes into a folder: the one that holds the lock on a file in it. The system lets go when it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLock:
    """An advisory lock on `path`, which stays there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """By this process, through this object."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take it, without waiting; False if another has it. Raises OSError where the file cannot be made."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let go of it, if it was held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
