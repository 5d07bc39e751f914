"""Resolve --model to a GGUF file; Hugging Face folders are converted once and cached."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from notso.cli import terminal

MIX = "Q4_K_M"  # type that folders are converted to


def model_file(given: Path | None, *, silent: bool = False) -> Path | None:
    """Return the file to run, None for the demo. Raises as `resolve_model` and `convert`."""
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
    import platformdirs

    from notso.smollm3.conversion.converter import VERSION

    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    # A changed file or converter gives another name, so the folder is converted again.
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
    # Conversions of earlier states of the folder.
    for older in target.parent.glob("*.gguf"):
        if older != target and older.name.startswith(f"{kept_for}-"):
            older.unlink(missing_ok=True)
