"""Protocol between server and plugin: JSON packets over a socket, and shared memory for logits."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from notso.plugins.json_shape import JsonLimits, JsonShapeError, check_shape
from notso.system.files import anonymous_file

MAX_CALL_BYTES = 64 * 1024 * 1024  # enough for a tool call with all attachments of a chat
MAX_ANSWER_BYTES = 8 * 1024 * 1024  # enough for a text result of 2**20 characters, each escaped as \uXXXX
ANSWER_LIMITS = JsonLimits(depth=64, objects=20_000, values=50_000)  # enough for the list of what a plugin provides
MAX_VOCAB = 262_144
MAX_TOKENS = 262_144
ROW_BYTES = 4 * MAX_VOCAB
SHARED_BYTES = ROW_BYTES + 4 * MAX_TOKENS
_LENGTH = struct.Struct("<I")


def encode_packet(packet: Any, max_bytes: int = MAX_CALL_BYTES) -> bytes:
    """Serialize a packet. Raises ValueError if it is too large, nested too deeply, or not JSON."""
    try:
        body = json.dumps(packet, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(body) > max_bytes:
        raise ValueError(f"more than {max_bytes >> 20} MiB of JSON")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    def __init__(self, max_bytes: int = MAX_CALL_BYTES, limits: JsonLimits | None = None) -> None:
        self._bytes = bytearray()
        self._max_bytes = max_bytes
        self._limits = limits

    def feed(self, data: bytes) -> list[Any]:
        """Return the packets completed by `data`. Raises ValueError."""
        self._bytes += data
        packets = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._max_bytes:
                raise ValueError("a packet with an invalid size")
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
                raise ValueError("a packet with too many values or too much nesting") from None
        return packets


def receive(connection: socket.socket, unpacker: Unpacker) -> list[Any] | None:
    """Wait for data; return completed packets, or None if the peer has closed the connection."""
    data = connection.recv(1 << 16)
    return unpacker.feed(data) if data else None


def create_shared_file() -> int:
    descriptor = anonymous_file()
    try:
        os.ftruncate(descriptor, SHARED_BYTES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
