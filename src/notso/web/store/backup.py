"""A copy of everything, made while no server uses the data directory."""

from __future__ import annotations

from pathlib import Path

from notso.web.errors import DataDirectoryBusyError, StorageDamagedError, StorageError
from notso.web.store.connection import DAMAGED, close_writer, copy, is_damaged, open_writer, storage_errors
from notso.web.store.directory_lock import DirectoryLock


def back_up(folder: Path, target: Path) -> None:
    """Copy the conversations in `folder` to a new file. Raises StorageError, also where a server has the folder."""
    path = folder / "notso.db"
    if not path.exists():
        raise StorageError(f"there are no conversations in {folder}")
    try:
        lock = DirectoryLock(folder)
    except DataDirectoryBusyError:
        raise DataDirectoryBusyError(
            "a server is using this data directory: ask it, with `notso backup --from` and its address"
        ) from None
    try:
        if is_damaged(path):
            raise StorageDamagedError(DAMAGED)
        writer = open_writer(path)
        try:
            with storage_errors():
                copy(writer, target)
        finally:
            close_writer(writer)
    finally:
        lock.release()
