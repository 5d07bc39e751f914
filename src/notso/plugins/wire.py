"""How server and plugin process talk: packets of JSON over a socket, and memory that both see for a row of logits."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
from typing import Any

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape

MAX_CALL_BYTES = 64 * 1024 * 1024  # a tool with all attachments of a chat
MAX_ANSWER_BYTES = 8 * 1024 * 1024  # the largest page, if all of it must be escaped
ANSWER_LIMITS = JsonLimits(depth=64, objects=20_000, values=50_000)
"""Of an offer: all other answers are a text or three."""
MAX_VOCAB = 262_144
MAX_TOKENS = 262_144
ROW_BYTES = 4 * MAX_VOCAB
SHARED_BYTES = ROW_BYTES + 4 * MAX_TOKENS
_LENGTH = struct.Struct("<I")


def packed(packet: Any, most_bytes: int = MAX_CALL_BYTES) -> bytes:
    """A packet as it travels. Raises ValueError: it is too large, or no JSON."""
    body = json.dumps(packet, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    if len(body) > most_bytes:
        raise ValueError("more than a packet holds")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Packets from bytes as they come, of at most so many bytes; `limits`: what each may be made of."""

    def __init__(self, most_bytes: int = MAX_CALL_BYTES, limits: JsonLimits | None = None) -> None:
        self._bytes = bytearray()
        self._most_bytes = most_bytes
        self._limits = limits

    def feed(self, data: bytes) -> list[Any]:
        """The packets that are whole now. Raises ValueError for what is none."""
        self._bytes += data
        packets = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._most_bytes:
                raise ValueError("a packet of a claimed size that none has")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            try:
                if self._limits is not None:
                    check_shape(body, self._limits)
                packets.append(json.loads(body.decode("utf-8", "surrogatepass")))
            except (RecursionError, JsonShapeError):
                raise ValueError("a packet of too many values, or nested too deep") from None
        return packets


def receive(end: socket.socket, unpacker: Unpacker) -> list[Any] | None:
    """Packets that came; None: the other side has gone."""
    data = end.recv(1 << 16)
    return unpacker.feed(data) if data else None


def shared_file() -> int:
    """A descriptor of memory without a name, zeros, that a child process may be given."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("notso-plugin")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, SHARED_BYTES)
    return descriptor


def mapped(descriptor: int) -> mmap.mmap:
    """That memory."""
    return mmap.mmap(descriptor, SHARED_BYTES)
