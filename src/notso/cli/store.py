"""`notso store copy`: migrate conversations, documents, keys and usage between databases."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso store copy ~/.local/share/notso postgresql://notso@localhost/notso
  notso store copy postgresql://notso@localhost/notso ./chats"""


def store(
    action: Annotated[Literal["copy"], typer.Argument(metavar="copy", help="Action.")],
    source: Annotated[str, typer.Argument(metavar="FROM", help="Source: data directory or postgresql:// URL.")],
    target: Annotated[
        str,
        typer.Argument(metavar="TO", help="Target, whose database must be empty: data directory or postgresql:// URL."),
    ],
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Migrate conversations between SQLite and PostgreSQL.

    Copies conversations, documents, settings, API files, keys and usage. First stop every server that uses the source
    or the target. The copy is read back and compared before it is committed, so the target receives either everything
    or nothing. Put passwords in ~/.pgpass or PGPASSWORD, not on the command line, where other users can see them.
    """
    from notso.web.store.copy import copy_database

    copied = copy_database(source, target)
    if as_json:
        terminal.print_json([asdict(each) for each in copied])
        return
    rows = [
        ["table", "rows", "digest"],
        *([each.table, f"{each.rows:,}", each.digest[:16]] for each in copied),
    ]
    terminal.print_lines(terminal.columns(rows))
    terminal.print_line("copy verified: both sides are identical")
