"""`notso rm`: remove a fetched model file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso rm smollm3-3b:Q8_0
  notso rm Q8_0 --yes"""


def remove_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `notso list` shows it, or its path.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Remove a fetched model file.

    Out of the Hugging Face cache, where `notso pull` has put it. Files that other programs have fetched are theirs to
    remove.
    """
    from notso.smollm3.hub import removal

    model = removal.fetched_model(name)
    size = terminal.gigabytes(model.size_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here: say --yes", param_hint="--yes")
        terminal.note(f"{model.path} ({size})")
        if not typer.confirm("Remove it?", err=True):
            raise typer.Abort
    removal.remove(model)
    terminal.note(f"{model.name} is removed: {size} are free. `notso pull` fetches it again.")
