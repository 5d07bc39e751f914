"""`notso store copy`: all conversations, people and keys from one database to another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso store copy ~/.local/share/notso postgresql://notso@localhost/notso
  notso store copy postgresql://notso@localhost/notso ./chats"""


def store(
    action: Annotated[Literal["copy"], typer.Argument(metavar="copy", help="What to do.", show_default=False)],
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="A data directory or postgresql://.", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="TO", help="Another, without conversations.", show_default=False)],
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Copy all conversations, keys and usage to PostgreSQL, or back.

    No server may use either side. They are read back and compared before they are kept: all of them, or none. A
    password belongs in ~/.pgpass or in PGPASSWORD, not on a command line that others can see.
    """
    from notso.web.store.copy import copy_everything

    copied = copy_everything(source, target)
    if as_json:
        terminal.say_json([asdict(each) for each in copied])
        return
    rows = [
        ["table", "rows", "what is in them"],
        *([each.table, f"{each.rows:,}", each.digest[:16]] for each in copied),
    ]
    for line in terminal.columns(rows):
        terminal.say(line)
    terminal.say("both sides hold the same")
