"""Where everything is kept, and how much of the disk that takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Sizes in bytes: conversations with their log (None: they are kept elsewhere), and prompts that were computed and
    can be again."""

    path: Path
    chats_bytes: int | None
    cache_bytes: int


def look_at(path: Path, *, is_shared: bool = False) -> DataFolder:
    """Add up what lies in a data directory. Takes as long as the disk does: not on the event loop."""
    chats = None if is_shared else sum(_size(file) for file in path.glob("notso.db*"))
    return DataFolder(path, chats, sum(_size(file) for file in (path / "kv").rglob("*")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # it went away meanwhile
        return 0
