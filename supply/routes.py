"""Update the table of routes in SECURITY.md: `python supply/routes.py`.

Existing rows keep their order and description; a new route's description is the first sentence of its docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastapi.routing import iter_route_contexts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from scripted_engine import ScriptedEngine

from notso.web.app import create_app
from notso.web.edge.access import audience_of, mark_of
from notso.web.values.settings import Settings

PAGE = Path(__file__).parents[1] / "SECURITY.md"
HEAD = "| route | guard | does |\n|---|---|---|\n"
TABLE = re.compile(r"^\| route \|.*?(?=^(?!\|)|\Z)", re.MULTILINE | re.DOTALL)


def routes() -> dict[str, Any]:
    """Return all routes by method and path."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), engine_api=True, engine_key="a key for front ends only")
        contexts = list(iter_route_contexts(create_app(ScriptedEngine, settings).routes))
    return {
        f"{method} {context.path}": context.original_route  # type: ignore[attr-defined]
        for context in contexts
        for method in sorted(context.original_route.methods)  # type: ignore[attr-defined]
    }


def with_table(page: str) -> str:
    """Return the page with an updated table of routes."""
    described = dict(re.findall(r"^\| `([A-Z]+ /\S*)` \|.*\| ([^|]*) \|$", page, re.MULTILINE))
    known = routes()
    ordered = [*(name for name in described if name in known), *(name for name in known if name not in described)]
    rows = [
        f"| `{name}` | {_guard(known[name])} | {described.get(name) or _summary(known[name])} |\n" for name in ordered
    ]
    table = HEAD + "".join(rows)
    return TABLE.sub(lambda _: table, page)


def _guard(route: Any) -> str:
    return audience_of(route) + (", audited" if mark_of(route).audit else "")


def _summary(route: Any) -> str:
    said = inspect.getdoc(route.endpoint) or route.endpoint.__name__.replace("_", " ")
    return " ".join(said.partition(". ")[0].split()).rstrip(".")


if __name__ == "__main__":
    sys.exit(PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8") == 0)
