"""Parse imported files in a child process with limited CPU time and memory.

In the server, parsing would hold the GIL and need many times the file's size in memory.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.system.confinement import ConfinedWorkError, Limits, serve_confined
from notso.web.chat.files.documents import ImportFormatError, documents
from notso.web.chat.files.other_programs import ExportReader

# An export of 200 MiB takes about 10 s; only one of its conversations is in memory at a time.
LIMITS = Limits(cpu_s=60, memory_bytes=1 << 30, wall_s=180.0, answer_bytes=64 << 20)

SHAPE = JsonLimits(depth=64, objects=400_000, values=4_000_000)
"""Limits on each chat, because the server decodes it: an empty dict takes thirty times the memory of its text."""

Entry = tuple[str, Any]

_PROGRAM = "from notso.web.chat.files.import_process import main; main()"


def entries(body: bytes) -> Iterator[Entry]:
    """Parse a file and yield its chats, followed by what was left out or why the file was rejected."""
    # Kinds of entries: "own" (a chat in our export format), "openai" (a message list), "left_out" (counts by kind of
    # content) and "refused" (key, detail and values of an error message).
    left_out = Counter[str]()
    try:
        yield from ExportReader(left_out).chats(documents(body, left_out))
    except ImportFormatError as error:
        yield "refused", [error.key, error.detail, error.params]
    except MemoryError:
        yield "refused", ["import_budget", "", {}]
    else:
        yield "left_out", left_out


async def parse_in_child(body: bytes) -> Iterator[Entry]:
    """Parse a file in a child process. The returned iterator decodes one entry at a time."""
    from notso.web.values.child_work import run_confined  # loads asyncio, which the child does not need

    try:
        answer = await run_confined(_PROGRAM, body, LIMITS)
    except ConfinedWorkError:
        return iter([("refused", ["import_budget", "", {}])])
    return decode_entries(answer)


def decode_entries(answer: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        kind, value = json.loads(answer[at:end])
        yield kind, value
        at = end + 1


def encode_entries(body: bytes) -> bytes:
    answer = bytearray()
    for entry in entries(body):
        # Keep lone surrogates, which the server rejects with an error message.
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            check_shape(line, SHAPE)
        except JsonShapeError as error:
            return _limit_error(error.name, error.limit)
        answer += line + b"\n"
        if len(answer) > LIMITS.answer_bytes:
            return _limit_error("text", LIMITS.answer_bytes)
    return bytes(answer)


def _limit_error(detail: str, limit: int) -> bytes:
    return json.dumps(["refused", ["import_too_much", detail, {"limit": limit}]]).encode() + b"\n"


def main() -> None:
    """Run the child process: parse the file on stdin."""
    # Load the codecs now, because the child cannot open files later. Archives use cp437 for names.
    for name in ("cp437", "utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        codecs.lookup(name)
    serve_confined(encode_entries, LIMITS)
