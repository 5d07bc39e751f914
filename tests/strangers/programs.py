"""The programs of the corpus, as docs/programs.md lists them: python tests/strangers/programs.py > docs/programs.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from strangers.corpus import at, sessions

HEAD = """# Supported programs

Requests of these programs are part of the test suite, with the field names, values, order and headers that the programs
send by their defaults: `tests/strangers/requests/` has them, with the file that each was read from. A program is listed
because all its requests are answered with what they ask for: text, a tool call with valid arguments, JSON by the schema
sent, a stop string, a length, thoughts or none. Fields without effect are ignored and named in `x-notso-ignored`;
[Supported fields](compatibility.md) says what each field does.

Addresses below `/api/` belong to the port of Ollama (`--ollama-port`). This page is made by
`python tests/strangers/programs.py`.

| program | version | addresses | sent | ignored |
|---|---|---|---|---|
"""

SENT = {
    "tools": ("/tools/0",),
    "a schema": (
        "/response_format/json_schema",
        "/text/format/schema",
        "/output_config/format",
        "/structured_outputs",
        "/format/type",
    ),
    "a stream": ("/stream",),
    "stop strings": ("/stop", "/stop_sequences", "/options/stop"),
}


def _row(program: str, held: list[dict[str, Any]]) -> str:
    turns = [turn for session in held for turn in session["turns"]]
    addresses = dict.fromkeys(turn["address"].partition("?")[0] for turn in turns)
    bodies = [turn.get("body") or {} for turn in turns]
    sent = [name for name, where in SENT.items() if any(at(body, each) for body in bodies for each in where)]
    if any(turn["expected"].get("thinking") is not None for turn in turns):
        sent.append("thinking on or off")
    ignored = dict.fromkeys(name for turn in turns for name in turn["expected"].get("ignored", ()))
    version = ", ".join(dict.fromkeys(session["version"] for session in held))
    cells = (", ".join(f"`{each}`" for each in addresses), ", ".join(sent), ", ".join(f"`{each}`" for each in ignored))
    return f"| {program} | {version} | {' | '.join(cells)} |".replace("|  |", "| |")


def page() -> str:
    """The page: a row for each program."""
    of_program: dict[str, list[dict[str, Any]]] = {}
    for session in sessions():
        of_program.setdefault(session["program"], []).append(session)
    rows = (_row(name, of_program[name]) for name in sorted(of_program, key=str.lower))
    return HEAD + "\n".join(rows).replace("|  |", "| |") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
