"""`notso plugin`: list installed plugins, or create a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from notso.cli import options, terminal

EXAMPLES = """\
  notso plugin list
  notso plugin new word-counter"""


def plugin(
    action: Annotated[Literal["list", "new"], typer.Argument(metavar="list|new", help="Action.")] = "list",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the new plugin.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Folder to create. Default: ./NAME.", show_default=False),
    ] = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """List installed plugins, or create a new one.

    A plugin runs only if it is enabled with `notso serve --plugin NAME`. `new` creates a project with a passing test.
    """
    if action == "list":
        _print_plugins(as_json)
        return
    if name is None:
        raise typer.BadParameter("a new plugin needs a name", param_hint="NAME")
    from notso.plugins.new_plugin import write_plugin

    target = folder or Path(name)
    written = write_plugin(name, target)
    if as_json:
        terminal.print_json({"folder": str(target), "files": [path.name for path in written]})
        return
    terminal.print_line(
        f"Created {target} with {', '.join(path.name for path in written)}. Next: pip install -e {target}"
    )


def _print_plugins(as_json: bool) -> None:
    from notso.plugins.loading import list_installed

    found = list_installed()
    if as_json:
        terminal.print_json([{"name": p.name, "distribution": p.distribution, "version": p.version} for p in found])
        return
    rows = [["plugin", "distribution", "version"], *([p.name, p.distribution, p.version] for p in found)]
    terminal.print_lines(
        terminal.columns(rows) if found else ["No plugins installed; create one with `notso plugin new NAME`."]
    )
