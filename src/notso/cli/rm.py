"""`notso rm`: delete a downloaded model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso rm smollm3-3b:Q8_0
  notso rm Q8_0 --yes"""


def remove_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name shown by `notso list`, or path.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Delete a downloaded model.

    Deletes the file from the Hugging Face cache, where `notso pull` stores models. To remove a file that another
    program downloaded, use that program.
    """
    from notso.smollm3.hub import registry

    model = registry.find_fetched_model(name)
    size = terminal.gigabytes(model.size_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                "cannot ask for confirmation, because stdin is not a terminal: pass --yes", param_hint="--yes"
            )
        terminal.note(f"{model.path} ({size})")
        if not typer.confirm("Delete it?", err=True):
            raise typer.Abort
    registry.remove(model)
    terminal.note(f"{model.name} deleted, {size} freed. Run `notso pull` to download it again.")
