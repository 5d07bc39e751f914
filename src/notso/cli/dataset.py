"""`notso dataset`: export conversations for fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from notso.cli import backup, options, terminal

EXAMPLES = """\
  notso dataset chats.jsonl
  notso dataset chats.jsonl --preferences pairs.jsonl --from http://127.0.0.1:3000"""


def dataset(
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Output file.", show_default=False)],
    pairs: Annotated[
        Path | None,
        typer.Option(
            "--preferences",
            metavar="PAIRS.jsonl",
            help="Also write preference pairs (chosen and rejected answers).",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Read the conversations from the running server at this URL."),
    ] = None,
    force: options.Force = False,
    data_dir: options.DataDir = None,
    api_key_file: options.ApiKeyFile = None,
    debug: options.Debug = False,
) -> None:
    """Export conversations as a fine-tuning dataset.

    Each chat becomes one row with its visible branch, in TRL's conversational format. Temporary and deleted chats are
    left out. Nothing leaves this machine, and only you can read the file.
    """
    options.require_free_place(out, force, "OUT.jsonl")
    if pairs is not None:
        options.require_free_place(pairs, force, "--preferences")
    from notso.web.chat.files.export import conversation, preferences
    from notso.web.store.sqlite.store import whole_chats

    rows: list[str] = []
    preferred: list[str] = []
    with TemporaryDirectory(prefix="notso-dataset-") as folder:
        copy = Path(folder, "chats.db")
        backup.copy_chats(copy, server, data_dir, api_key_file)
        for whole in whole_chats(copy):
            row = conversation(whole)
            rows += [json.dumps(row, ensure_ascii=False)] if row is not None else []
            preferred += [json.dumps(pair, ensure_ascii=False) for pair in preferences(whole)]
    _write(out, rows)
    terminal.say(f"{out} ({len(rows):,} conversations)")
    if pairs is not None:
        _write(pairs, preferred)
        terminal.say(f"{pairs} ({len(preferred):,} pairs)")
    elif preferred:
        terminal.note(f"{len(preferred):,} preference pairs found; --preferences writes them to a file.")


def _write(path: Path, lines: list[str]) -> None:
    # A new file, readable by the owner only: an existing one could have other permissions.
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
