"""Slow clients: headers and bodies that arrive late or never, without any effect on other clients."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event
from notso.web.edge import connections, limits

Start = Callable[..., Any]


@pytest.fixture
def server(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.7)
    monkeypatch.setattr(limits.RequestLimits.__init__, "__defaults__", (0.7,))
    return start(ScriptedEngine()).ready()


def connect(server: Any) -> socket.socket:
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def request(server: Any, *lines: str) -> bytes:
    host = server.address.removeprefix("http://")
    return "\r\n".join([lines[0], f"Host: {host}", *lines[1:]]).encode()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127"])
def test_connection_with_incomplete_headers_is_closed(server: Any, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_slowly_sent_headers_close_connection(server: Any) -> None:
    began = time.monotonic()
    with connect(server) as client, pytest.raises(OSError):
        client.sendall(b"GET / HTTP/1.1\r\n")
        while time.monotonic() - began < 15:
            client.sendall(b"X: y\r\n")
            time.sleep(0.05)
    assert time.monotonic() - began < 15


def test_header_timeout_applies_to_reused_connection(server: Any) -> None:
    with connect(server) as client:
        client.sendall(request(server, "GET /livez HTTP/1.1") + b"\r\n\r\n")
        answer = b""
        while b"alive" not in answer:
            answer += client.recv(10_000)
        client.sendall(b"GET / HT")
        assert client.recv(100) == b""


def test_incomplete_body_returns_408(server: Any) -> None:
    with connect(server) as client:
        kind = "Content-Type: application/x-www-form-urlencoded"
        client.sendall(request(server, "POST /chats HTTP/1.1", kind, "Content-Length: 100") + b"\r\n\r\ntext=")
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_long_stream_is_not_limited_by_client_timeouts(server: Any, shown: Any) -> None:
    """A stream may take longer than any of the limits for slow clients."""

    def slow(messages: object, thinking: bool) -> Iterator[Event]:
        for number in range(1, 4):
            yield from say("word ")
            shown.wait(lambda event: event.event == "message", number)
            time.sleep(0.4)

    server.shared.engine.engine.script = slow
    assert server.stream(server.ask("one"), until=shown)[-1].event == "done"
