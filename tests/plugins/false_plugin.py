"""A plugin with unintentional errors, and one that writes to the server's socket directly."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Any

from notso.plugins import LogitsProcessor, Page, PageResponse, Plugin, SlashCommand, Tool

ANY = {"type": "object", "properties": {"text": {"type": "string"}}}
EMPTY_LISTS = b'{"id": 0, "result": [' + b"[]," * 2_000_000 + b"[]]}"
PACKETS = {
    "no_result": b'{"id": 0}',
    "unasked": b'{"id": 77, "result": "x"}',
    "two": b'{"id": 0, "result": "x", "refused": "y"}',
    "of_another_type": b'{"id": 0, "result": {"a": 1}}',
    "text_as_id": b'{"id": "0", "result": "x"}',
    "list": b"[1]",
    "of_many_values": EMPTY_LISTS,
    "too_large": b'"' + b"x" * (9 << 20) + b'"',
}


def answer(*_: Any) -> str:
    return "fine"


def forge(packet: bytes) -> Any:
    def run(*_: Any) -> str:
        end = socket.socket(fileno=os.dup(int(sys.argv[2])))
        end.sendall(struct.pack("<I", len(packet)) + packet)
        return "behind it"

    return run


wrong: Any = None
MISTAKEN = Plugin(
    tools=(
        Tool("slow", "A tool.", ANY, answer, seconds="10 s"),  # type: ignore[arg-type]
        Tool("silent", wrong, ANY, answer),
        Tool("listed", "A tool.", [], answer),  # type: ignore[arg-type]
        Tool("numbered", "A tool.", {"type": "object", "properties": 5, "required": 7}, answer),
        Tool("never", "A tool.", ANY, answer, seconds=-1),
        Tool("Odd name", "A tool.", ANY, answer),
        Tool("long", "A tool.", ANY | {"description": "x" * 70_000}, answer),
        Tool("right", "A tool.", ANY, answer),
    ),
    logits_processors=(LogitsProcessor(7, "Something.", wrong),),  # type: ignore[arg-type]
    slash_commands=(
        SlashCommand(wrong, wrong, wrong, answer),
        SlashCommand(["a"], "u", "d", answer),  # type: ignore[arg-type]
        SlashCommand("right", "u", "d", answer),
    ),
    pages=(
        Page(wrong, wrong, answer),
        Page('a/../b"><script>', "A page", answer),
        Page("right", "A page", lambda request: PageResponse([1])),  # type: ignore[arg-type]
    ),
)
FORGER = Plugin(tools=tuple(Tool(name, "Forges.", ANY, forge(packet)) for name, packet in PACKETS.items()))
