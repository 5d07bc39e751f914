"""`notso list`: list the models on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from notso.cli import options, terminal
from notso.system.files import file_type

EXAMPLES = """\
  notso list
  notso list ~/models --json"""


def list_models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Additional folders to search.")
    ] = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """List the models on this machine.

    Lists the demo model, the SmolLM3 files of the Hugging Face cache, Ollama, LM Studio and llama.cpp, and the GGUF
    files in the given folders. Pass a listed name to --model to use the file without copying it. `verified` is yes
    if the file's SHA-256 is known to match a published one; `notso verify` computes the SHA-256.
    """
    from notso.smollm3.hub import registry

    distinct: dict[Path, Path] = {}
    for folder in folders or ():
        if not stat.S_ISDIR(file_type(folder)):
            raise typer.BadParameter(f"{folder} is not a folder", param_hint="FOLDER")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise typer.BadParameter(f"{folder} cannot be searched: Permission denied", param_hint="FOLDER")
        distinct.setdefault(folder.resolve(), folder)
    models = registry.local_models(distinct.values())
    if as_json:
        terminal.print_json(
            [
                {
                    "name": model.name,
                    "path": str(model.path),
                    "size_bytes": model.size_bytes,
                    "quantization": model.quantization,
                    "where": model.where,
                    "verified": model.verified,
                }
                for model in models
            ]
        )
        return
    rows = [
        [m.name, m.quantization or "-", terminal.gigabytes(m.size_bytes), m.where, m.verified, str(m.path)]
        for m in models
    ]
    terminal.print_lines(terminal.columns([["name", "type", "size", "where", "verified", "path"], *rows], right=(2,)))
    listed = {model.path for model in models}
    for path in (path for folder in distinct.values() for path in sorted(folder.glob("*.gguf")) if path not in listed):
        terminal.note(f"{path} is not listed, because it is not a readable file.")
    if not any(model.where == "cache" for model in models):
        terminal.note("SmolLM3-3B is not installed: download it with `notso pull` (1.92 GB).")
