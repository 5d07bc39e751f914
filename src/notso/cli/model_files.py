"""Resolve --model to a GGUF file: a path, an installed model, one to download, or a Hugging Face folder to convert."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from notso.cli import terminal

if TYPE_CHECKING:
    from notso.smollm3.hub.download import Pulled
    from notso.smollm3.hub.registry import KnownFile


def model_file(given: Path | None, *, silent: bool = False, fetch: bool = False) -> Path | None:
    """Return the file to run, None for the demo.

    A name of the Hub that is not installed is downloaded with `fetch`, or after asking on a terminal. Raises as
    `resolve_model`, `convert` and `pull`.
    """
    from notso.smollm3.errors import ModelFileError
    from notso.smollm3.hub.registry import resolve_model
    from notso.smollm3.hub.repository import find_cached, is_downloadable

    named = str(given or os.environ.get("NOTSO_MODEL") or "")
    folder = Path(named).expanduser() if named else None
    if folder is None or not folder.is_dir():
        try:
            return resolve_model(given)
        except ModelFileError as error:
            if not is_downloadable(named):
                raise
            return find_cached(named) or _fetched(named, silent=silent, fetch=fetch, missing=error)
    from notso.smollm3.conversion.converter import MIX, kept_conversion

    @contextmanager
    def announce(folder: Path, target: Path) -> Iterator[Callable[[int, int], None]]:
        if not silent:
            terminal.note(f"Converting {folder} to {MIX} (once; the 3B model takes minutes): {target}")
        with terminal.progress(in_bytes=True, as_json=silent) as report:
            yield lambda done, total: report("writing", done, total)

    return kept_conversion(folder, announce)


def download(file: KnownFile, *, offline: bool = False, force: bool = False, silent: bool = False) -> Pulled:
    """Download a file, showing its size and the progress. Raises DownloadError."""
    from notso.smollm3.hub import download, registry

    if not silent and registry.find_local(file) is None and not offline:
        plan = download.plan_download(file)
        free = terminal.gigabytes(plan.free_bytes)
        terminal.note(f"{file.filename}, {terminal.gigabytes(file.size_bytes)}, to {plan.folder} ({free} free)")
    try:
        with terminal.progress(in_bytes=True, as_json=silent) as report:
            return download.pull(file, offline=offline, force=force, progress=report)
    except KeyboardInterrupt:
        terminal.note("Stopped. Run the same command again to continue.")
        raise


def _fetched(name: str, *, silent: bool, fetch: bool, missing: Exception) -> Path:
    from notso.smollm3.errors import ModelFileError
    from notso.smollm3.hub.download import is_offline
    from notso.smollm3.hub.repository import file_named

    can_ask = not silent and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stderr)
    if is_offline() or not (fetch or can_ask):
        raise ModelFileError(f"{name} is not installed; `--fetch` downloads it first") from missing
    file = file_named(name)
    if not fetch:
        question = f"{file.name} ({terminal.gigabytes(file.size_bytes)}) is not installed. Download it now?"
        if not typer.confirm(question, default=True, err=True):
            raise ModelFileError(f"{name} is not installed") from missing
    return download(file, silent=silent).path
