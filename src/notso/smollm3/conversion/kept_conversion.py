"""Conversions of Hugging Face folders, made once and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import platformdirs

from notso.smollm3.conversion.converter import VERSION, Progress, convert

MIX = "Q4_K_M"  # type that folders are converted to

# Receives folder and file before a conversion, and returns what gives its progress.
Announce = Callable[[Path, Path], AbstractContextManager[Progress]]


def _quietly(folder: Path, target: Path) -> AbstractContextManager[Progress]:
    return nullcontext(lambda done, total: None)


def kept_conversion(folder: Path, announce: Announce = _quietly) -> Path:
    """Return the GGUF file of a folder, converted if it is new or changed. Raises as `convert`."""
    target = _target(folder.resolve())
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with announce(folder, target) as report:
            convert(folder, target, MIX, report)
        _forget_earlier(target)
    return target


def _target(folder: Path) -> Path:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    # A changed file or converter gives another name, so the folder is converted again.
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    known = (str(folder), (VERSION, states))
    where, what = (hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in known)
    return platformdirs.user_cache_path("notso") / "converted" / f"{folder.name}-{where}-{what}-{MIX}.gguf"


def _forget_earlier(target: Path) -> None:
    # Conversions of earlier states of the folder.
    kept_for = target.name.removesuffix(f"-{MIX}.gguf").rpartition("-")[0]
    for older in target.parent.glob("*.gguf"):
        if older != target and older.name.startswith(f"{kept_for}-"):
            older.unlink(missing_ok=True)
