"""Resolve --model to a GGUF file; Hugging Face folders are converted once and cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from notso.cli import terminal


def model_file(given: Path | None, *, silent: bool = False) -> Path | None:
    """Return the file to run, None for the demo. Raises as `resolve_model` and `convert`."""
    from notso.smollm3.hub.registry import resolve_model

    named = given or os.environ.get("NOTSO_MODEL")
    folder = Path(named).expanduser() if named else None
    if folder is None or not folder.is_dir():
        return resolve_model(given)
    from notso.smollm3.conversion.kept_conversion import MIX, kept_conversion

    @contextmanager
    def announce(folder: Path, target: Path) -> Iterator[Callable[[int, int], None]]:
        if not silent:
            terminal.note(f"Converting {folder} to {MIX} (once; the 3B model takes minutes): {target}")
        with terminal.progress(in_bytes=True, as_json=silent) as report:
            yield lambda done, total: report("writing", done, total)

    return kept_conversion(folder, announce)
