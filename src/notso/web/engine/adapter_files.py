"""Adapter files in the operator's folder, and path checks that confine access to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PEFT_CONFIG = "adapter_config.json"
MAX_LISTED = 500
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter in the operator's folder."""

    path: str  # GGUF file or PEFT folder, relative to the operator's folder
    name: str


def adapter_files(folder: Path | None) -> list[AdapterFile]:
    """List adapters directly in the folder; empty if unreadable. Blocks on the disk."""
    if folder is None:
        return []
    try:
        found = sorted(
            path
            for path in folder.iterdir()
            if (path.suffix == ".gguf" and path.is_file()) or (path.is_dir() and (path / PEFT_CONFIG).is_file())
        )
    except OSError:
        return []
    return [AdapterFile(path.name, name_of(path)) for path in found[:MAX_LISTED]]


def name_of(path: Path) -> str:
    """Derive a name usable in requests from an adapter's path."""
    stem = path.stem if path.suffix == ".gguf" else path.name
    return _NO_NAME.sub("-", stem).strip("._-")[:64] or "adapter"


def within(folder: Path, name: str) -> Path | None:
    """Resolve a path within the folder; None if it leads outside, also through links."""
    try:
        root, path = folder.resolve(), (folder / name).resolve()
    except (OSError, ValueError):
        return None
    return path if path.is_relative_to(root) else None
