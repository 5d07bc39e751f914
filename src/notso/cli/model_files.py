"""Resolve --model to a GGUF file; Hugging Face folders are converted once and cached."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from notso.cli import terminal

MIX = "Q4_K_M"
"""Type that folders are converted to automatically."""


def model_file(given: Path | None, *, silent: bool = False) -> Path | None:
    """Return the file to run, or None for the demo. A folder is converted once, and again if one of its files changes.

    Raises what `resolve_model` and `convert` raise.
    """
    from notso.smollm3.hub.registry import resolve_model

    named = given or os.environ.get("NOTSO_MODEL")
    folder = Path(named).expanduser() if named else None
    if folder is None or not folder.is_dir():
        return resolve_model(given)
    target = _target(folder.resolve())
    if not target.is_file():
        _convert(folder, target, silent)
    return target


def _target(folder: Path) -> Path:
    """Return the cache path, named by the folder, its path and its contents."""
    import platformdirs

    from notso.smollm3.conversion.converter import VERSION

    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    known = (str(folder), (VERSION, states))
    where, what = (hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in known)
    return platformdirs.user_cache_path("notso") / "converted" / f"{folder.name}-{where}-{what}-{MIX}.gguf"


def _convert(folder: Path, target: Path, silent: bool) -> None:
    from notso.smollm3.conversion.converter import convert

    if not silent:
        terminal.note(f"Converting {folder} to {MIX} (once; the 3B model takes minutes): {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with terminal.progress(in_bytes=True, as_json=silent) as report:
        convert(folder, target, MIX, lambda done, total: report("writing", done, total))
    kept_for = target.name.removesuffix(f"-{MIX}.gguf").rpartition("-")[0]
    for older in target.parent.glob("*.gguf"):
        if older != target and older.name.startswith(f"{kept_for}-"):
            older.unlink(missing_ok=True)
