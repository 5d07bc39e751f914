"""A copy of everything, made while no server uses the data directory."""

from __future__ import annotations

from pathlib import Path

from notso.web.store.sqlite.damage import damage_of, move_strange_log, roll_back, said_of
from notso.web.store.sqlite.directory_lock import DirectoryLock
from notso.web.store.sqlite.writer import Writer
from notso.web.values.errors import DataDirectoryBusyError, StorageDamagedError, StorageError


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
        move_strange_log(path)
        roll_back(path)
        damage = damage_of(path)
        if damage:
            raise StorageDamagedError(said_of(damage))
        writer = Writer(path)
        try:
            writer.copy(target)
        finally:
            writer.close()
    finally:
        lock.release()
