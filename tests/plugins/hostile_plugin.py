"""Malicious plugins, and a well-behaved one, installed by `installed_plugins.install`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from notso.plugins import (
    CalledIn,
    LogitsProcessor,
    Page,
    PageRequest,
    PageResponse,
    Plugin,
    Refused,
    SignInRequest,
    SlashCommand,
    Tool,
)

SHORT = 0.3  # seconds until a call counts as hanging; short, because tests wait for it
ANY = {"type": "object", "properties": {"text": {"type": "string"}}}


def hang(*_: Any) -> Any:
    threading.Event().wait()


def spin(*_: Any) -> Any:
    while True:
        pass


def explode(*_: Any) -> Any:
    raise ZeroDivisionError("boom\x1b[2J\nand more")


def leave(*_: Any) -> Any:
    os.write(2, b"out of memory\nand luck")
    os._exit(3)


def print_much(*_: Any) -> str:
    print("hello from the plugin")
    print("and on stderr", file=sys.stderr)
    os.write(1, b"raw\x1b[2J\n")
    return "printed"


def print_without_end(*_: Any) -> str:
    while True:
        print("x" * 10_000)


def echo(arguments: Mapping[str, Any], called_in: CalledIn) -> str:
    return f"{arguments.get('text', '')}|{called_in.owner}|{sorted(called_in.attachments)}"


def refuse(*_: Any) -> str:
    raise Refused("not today\nnor tomorrow")


def tell_environment(*_: Any) -> str:
    return ",".join(sorted(name for name in os.environ if "NOTSO" in name or name == "DATABASE_URL"))


def ban(token: int) -> Any:
    def process(tokens: Any, logits: Any) -> Any:
        logits[token] = -float("inf")
        return logits

    return process


def only_by_length(tokens: Any, logits: Any) -> Any:
    """Allow only the token whose id is the number of tokens, to check that each row is processed once and in order."""
    left = logits.copy()
    left[:] = -float("inf")
    left[1000 + len(tokens) % 500] = 0.0
    return left


def not_numbers(tokens: Any, logits: Any) -> Any:
    return logits * float("nan")


def too_short(tokens: Any, logits: Any) -> Any:
    return logits[:5]


def nothing_left(tokens: Any, logits: Any) -> Any:
    return logits - float("inf")


def page(request: PageRequest) -> PageResponse | str:
    if request.path == "raw":
        return PageResponse("<script>alert(1)</script>", "application/x-msdownload")
    return f"<p>{request.method} {request.query.get('q', '')} {request.form.get('f', '')} {request.owner}</p>"


def sign_in(request: SignInRequest) -> str | None:
    badge = request.headers.get("x-badge", "")
    if badge == "hang":
        hang()
    return {"wave": "waver", "odd": "no name\n"}.get(badge)


def tools(seconds: float = 30.0, **functions: Any) -> tuple[Tool, ...]:
    return tuple(Tool(name, f"Does {name}.", ANY, run, seconds) for name, run in functions.items())


KIND = Plugin(
    tools=(Tool("echo", "Say it back.", ANY, echo, 30.0), Tool("refuse", "Say no.", ANY, refuse, 30.0)),
    logits_processors=(
        LogitsProcessor("only_by_length", "Counts.", only_by_length),
        LogitsProcessor("ban_1000", "Never 1000.", ban(1000)),
    ),
    slash_commands=(SlashCommand("shout", "[TEXT]", "Say it louder", str.upper), SlashCommand("help", "", "", str)),
    pages=(Page("", "First", page), Page("raw", "Raw", page)),
)
DOORMAN = Plugin(sign_in=sign_in)
RAISES = Plugin(tools=tools(raises=explode), slash_commands=(SlashCommand("explode", "", "Explode", explode),))
HANGS = Plugin(tools=tools(SHORT, hangs=hang), pages=(Page("", "Hangs", hang),))
SPINS = Plugin(tools=tools(SHORT, spins=spin))
PRINTS = Plugin(tools=tools(prints=print_much))
FLOODS = Plugin(tools=tools(floods=print_without_end))
LEAVES = Plugin(tools=tools(leaves=leave))
TELLS = Plugin(tools=tools(tells=tell_environment))
ROWS = Plugin(
    logits_processors=tuple(
        LogitsProcessor(name, "Harms.", run)
        for name, run in {
            "hang_row": hang,
            "raise_row": explode,
            "nan_row": not_numbers,
            "short_row": too_short,
            "empty_row": nothing_left,
        }.items()
    )
)
NO_PLUGIN = "not a plugin"
