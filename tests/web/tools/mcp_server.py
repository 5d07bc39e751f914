"""A small real MCP server for the tests, with tools that work, fail, hang, flood or exit."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp.types import ImageContent, TextContent
from pydantic import BaseModel, Field

app = MCPServer("little")


@app.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@app.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no such luck")


@app.tool()
def hang() -> str:
    """Sleep for ten minutes."""
    time.sleep(600)
    return ""


@app.tool()
def babble() -> str:
    """Return a long text."""
    return "bla " * 100_000


@app.tool()
def paint() -> list[TextContent | ImageContent]:
    """Return a text and an image."""
    return [TextContent(text="Look:"), ImageContent(data="AAAA", mime_type="image/png")]


@app.tool()
def environment(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "not there")


@app.tool()
def die() -> str:
    """Exit."""
    os._exit(3)


@app.tool()
def pid() -> str:
    """Return the process id."""
    return str(os.getpid())


class Table(BaseModel):
    """The form to fill in."""

    people: int = Field(ge=1, le=12, title="How many")
    outside: bool = False


async def which_table(place: str) -> Elicit[Table]:
    """Ask the user which table to book."""
    return Elicit(f"A table at {place}", Table)


@app.tool()
def book(place: str, table: Annotated[ElicitationResult[Table], Resolve(which_table)]) -> str:
    """Book a table."""
    if isinstance(table, AcceptedElicitation):
        return f"{place}, {table.data.people}, {'outside' if table.data.outside else 'inside'}"
    return table.action


@app.prompt(title="Review")
def review(code: str, tone: str = "kind") -> str:
    """Review a piece of code."""
    return f"Review in a {tone} tone:\n{code}"


@app.prompt(name="Stand Up!")
def stand_up() -> str:
    """Return a text that begins with a slash."""
    return "/usr/bin/true is a path"


@app.resource("notes://today", name="Today's notes", mime_type="text/markdown")
def notes() -> str:
    return "# Today\n\nBuy \x00 milk."


@app.resource("notes://picture", name="picture", mime_type="image/png")
def picture() -> bytes:
    return b"\x89PNG"


@app.resource("notes://large", name="large", mime_type="text/plain")
def large() -> str:
    return "x" * 200_001


print("something on stderr that may quote a question", file=sys.stderr)
app.run()
