"""One process owns a data directory at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from notso.web.values.errors import DataDirectoryBusyError, StorageError


class DirectoryLock:
    """A lock on `directory`, freed by `release` or by the end of the process, however it ends."""

    def __init__(self, directory: Path) -> None:
        """Make the directory (0700) where it is missing and lock it. Raises StorageError, DataDirectoryBusyError."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"the data directory cannot be used: {error.strerror}") from error
        try:
            _lock(self._descriptor)
        except OSError:
            os.close(self._descriptor)
            raise DataDirectoryBusyError(
                "another notso is using this data directory: stop it first, or choose another data directory"
            ) from None

    def release(self) -> None:
        """Let go. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
