"""A little real MCP server for the tests: it adds, fails, hangs, talks without end, and dies."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent

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
    """Never answer."""
    time.sleep(600)
    return ""


@app.tool()
def babble() -> str:
    """Talk without end."""
    return "bla " * 100_000


@app.tool()
def paint() -> list[TextContent | ImageContent]:
    """Text and a picture."""
    return [TextContent(text="Look:"), ImageContent(data="AAAA", mime_type="image/png")]


@app.tool()
def environment(name: str) -> str:
    """Tell a variable."""
    return os.environ.get(name, "not there")


@app.tool()
def die() -> str:
    """End this program."""
    os._exit(3)


@app.tool()
def pid() -> str:
    """This program's number."""
    return str(os.getpid())


print("something on stderr that may quote a question", file=sys.stderr)
app.run()
