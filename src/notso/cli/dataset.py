"""`notso dataset`: export conversations for fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from notso.cli import backup, options, terminal
from notso.system.files import write_private

EXAMPLES = """\
  notso dataset chats.jsonl
  notso dataset chats.jsonl --preferences pairs.jsonl --from http://127.0.0.1:3000
  notso dataset quotes.jsonl --documents Documents"""


def dataset(
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Output file.")],
    pairs: Annotated[
        Path | None,
        typer.Option(
            "--preferences",
            metavar="PAIRS.jsonl",
            help="Also write preference pairs (chosen and rejected answers).",
            show_default=False,
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            "--documents",
            metavar="LIBRARY",
            help="Instead of conversations, write questions about the library's documents and answers that quote them.",
            show_default=False,
        ),
    ] = None,
    max_rows: Annotated[
        int,
        typer.Option("--rows", metavar="N", min=1, max=10_000, help="Maximum number of questions about each document."),
    ] = 40,
    server: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Read the conversations from the running server at this URL."),
    ] = None,
    force: options.Force = False,
    data_dir: options.DataDir = None,
    api_key_file: options.ApiKeyFile = None,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Export conversations as a fine-tuning dataset.

    Each chat becomes one row in TRL's conversational format: the messages of its visible branch, and its documents as
    they appear in prompts. Temporary and deleted chats are left out. With --documents, the rows are questions about the
    texts of a library: each answer first quotes the document, or says that the text does not mention what was asked.
    Nothing leaves this machine, and only you can read the file.
    """
    options.check_output_path(out, force, "OUT.jsonl")
    if pairs is not None:
        if library is not None:
            raise typer.BadParameter("cannot be combined with --documents", param_hint="--preferences")
        options.check_output_path(pairs, force, "--preferences")
        options.check_distinct_outputs(out, pairs, "--preferences")
    from notso.web.chat.files.export import conversation, load_chats, preference_rows
    from notso.web.chat.files.quoting_rows import quoting_rows
    from notso.web.edge.access import LOCAL_OWNER
    from notso.web.store.sqlite.store import SQLiteStore, library_texts, permanent_chats
    from notso.web.values.errors import WebError

    rows: list[str] = []
    preferred: list[str] = []
    with TemporaryDirectory(prefix="notso-dataset-") as folder:
        copy = Path(folder, "notso.db")
        backup.copy_chats(copy, server, data_dir, api_key_file)
        if library is not None:
            found = list(library_texts(copy, LOCAL_OWNER, library))
            for name, text in found:
                rows += [json.dumps(row, ensure_ascii=False) for row in quoting_rows(name, text, max_rows)]
            if not rows:
                raise WebError(f"the library {library} has no documents with sentences to quote")
            _write(out, rows)
            terminal.print_line(
                f"{out} ({terminal.counted(len(rows), 'question')} about {terminal.counted(len(found), 'document')})"
            )
            return
        for chat, documents_of in load_chats(SQLiteStore(copy.parent), permanent_chats(copy)):
            row = conversation(chat, documents_of)
            rows += [json.dumps(row, ensure_ascii=False)] if row is not None else []
            preferred += [json.dumps(pair, ensure_ascii=False) for pair in preference_rows(chat, documents_of)]
    _write(out, rows)
    terminal.print_line(f"{out} ({terminal.counted(len(rows), 'conversation')})")
    if pairs is not None:
        _write(pairs, preferred)
        terminal.print_line(f"{pairs} ({terminal.counted(len(preferred), 'pair')})")
    elif preferred:
        terminal.note(f"{len(preferred):,} preference pairs found; --preferences writes them to a file.")


def _write(path: Path, lines: list[str]) -> None:
    write_private(path, "".join(f"{line}\n" for line in lines), replace=True)
