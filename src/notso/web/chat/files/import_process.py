"""Imported files are parsed in a child process with limited CPU time and memory.

A parser holds the interpreter until it returns, and archives and JSON take many times their size in memory. This file
is also the child's program.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.system.confinement import ConfinedWorkError, Limits, serve_one
from notso.web.chat.files.documents import Unreadable, documents
from notso.web.chat.files.other_programs import Reader
from notso.web.values.child_work import confined

# An export of 200 MiB takes about 10 s; one conversation of it is in memory at a time.
LIMITS = Limits(cpu_s=60, memory_bytes=1 << 30, wall_s=180.0, answer_bytes=64 << 20)

SHAPE = JsonLimits(depth=64, objects=400_000, values=4_000_000)
"""Limits of one chat, which the server decodes; parsed, empty objects take thirty times their bytes."""

Entry = tuple[str, Any]

_PROGRAM = "from notso.web.chat.files.import_process import main; main()"


def entries(body: bytes) -> Iterator[Entry]:
    """Parse a file and yield its chats, then what was left out or why the file was refused.

    Kinds are "own" (a chat of our export), "openai", "left_out" (counts) and "refused" (a sentence's key and values).
    """
    left_out = Counter[str]()
    try:
        yield from Reader(left_out).chats(documents(body, left_out))
    except Unreadable as error:
        yield "refused", [error.key, error.params]
    except MemoryError:
        yield "refused", ["import_budget", {}]
    else:
        yield "left_out", left_out


async def entries_from_child(body: bytes) -> Iterator[Entry]:
    """Return the entries of a file, parsed in a child process. Iterating decodes them one at a time."""
    try:
        answer = await confined(_PROGRAM, body, LIMITS)
    except ConfinedWorkError:
        return iter([("refused", ["import_budget", {}])])
    return decoded(answer)


def decoded(answer: bytes) -> Iterator[Entry]:
    """Yield the entries of what `parsed` returned."""
    at = 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        kind, value = json.loads(answer[at:end])
        yield kind, value
        at = end + 1


def parsed(body: bytes) -> bytes:
    answer = bytearray()
    for entry in entries(body):
        # Lone surrogates are refused by the server, with a sentence.
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            check_shape(line, SHAPE)
        except JsonShapeError as error:
            return _too_much(str(error))
        answer += line + b"\n"
        if len(answer) > LIMITS.answer_bytes:
            return _too_much(f"more than {LIMITS.answer_bytes:,} bytes of text")
    return bytes(answer)


def _too_much(what: str) -> bytes:
    return json.dumps(["refused", ["import_too_much", {"what": what}]]).encode() + b"\n"


def main() -> None:
    """Child process: parse stdin to stdout."""
    # Loaded on first use, which fails once no file can be opened: names in archives are in cp437.
    for name in ("cp437", "utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        codecs.lookup(name)
    serve_one(parsed, LIMITS)
