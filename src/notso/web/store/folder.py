"""Location and disk usage of the data directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Sizes in bytes: chats with their log (None if stored elsewhere), and the KV cache."""

    path: Path
    chats_bytes: int | None
    cache_bytes: int


def look_at(path: Path, *, is_shared: bool = False) -> DataFolder:
    """Measure a data directory. Blocking: not for the event loop."""
    chats = None if is_shared else sum(_size(file) for file in path.glob("notso.db*"))
    return DataFolder(path, chats, sum(_size(file) for file in (path / "kv").rglob("*")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # deleted meanwhile
        return 0
