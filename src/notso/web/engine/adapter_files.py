"""The adapter files in the operator's folder, and a path within it and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PEFT_CONFIG = "adapter_config.json"
MAX_LISTED = 500
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A GGUF file or a folder of PEFT's, by its path within the operator's folder, and what it may be called."""

    path: str
    name: str


def adapter_files(folder: Path | None) -> list[AdapterFile]:
    """What looks like an adapter in the folder, not below. Takes time; none where it cannot be read."""
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
    """A name that requests can use, made of a file's."""
    stem = path.stem if path.suffix == ".gguf" else path.name
    return _NO_NAME.sub("-", stem).strip("._-")[:64] or "adapter"


def within(folder: Path, name: str) -> Path | None:
    """A path within the folder, whatever links there are; None where it leads out, or is no path."""
    try:
        root, path = folder.resolve(), (folder / name).resolve()
    except (OSError, ValueError):
        return None
    return path if path.is_relative_to(root) else None
