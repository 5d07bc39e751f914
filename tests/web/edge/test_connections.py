"""Connections: slow readers, pipelined requests, and the limit on open connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.web.api.shared.services import MAX_REREAD_STREAMS
from notso.web.chat.routes import transfer
from notso.web.chat.services import MAX_PAGE_STREAMS
from notso.web.edge import limits
from notso.web.edge.connections import ConnectionLimiter, connection_limit, connection_of, network_of
from notso.web.edge.limits import ChunkedBodies
from notso.web.server import MOST_PER_WINDOW, WINDOW_SECONDS, LogRateLimit, limit_log_rate

Start = Callable[..., Any]


class Caller:
    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_longest_idle_connection_is_dropped_when_full() -> None:
    door = ConnectionLimiter(4)
    first, second, third, fourth, fifth, sixth = (Caller() for _ in range(6))
    addresses = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
    for caller, address in zip((first, second, third, fourth), addresses, strict=True):
        assert door.enter(caller, address)
    door.note(first, waits=False)
    door.note(third, waits=False)
    assert door.enter(fifth, "10.0.0.3") and second.dropped and len(door) == 4
    door.note(fourth, waits=False)
    door.note(fifth, waits=False)
    assert not door.enter(sixth, "10.0.0.3"), "a connection whose request is being served is never dropped"
    door.note(third, waits=True)
    door.note(first, waits=True)
    assert door.enter(sixth, "10.0.0.3") and third.dropped and not first.dropped
    door.leave(third)  # The dropped connection is reported again when it really ends; it must not be counted twice.
    assert len(door) == 4


def test_one_network_cannot_take_all_connections() -> None:
    door = ConnectionLimiter(8)
    other, many = Caller(), [Caller() for _ in range(7)]
    assert door.enter(other, "10.0.0.9")
    assert all(door.enter(caller, f"2001:db8::{number:x}") for number, caller in enumerate(many))
    assert many[0].dropped and not other.dropped and len(door) == 7, (
        "one /64 network may have at most six of eight connections"
    )
    for caller in many:
        door.note(caller, waits=False)
    assert not door.enter(Caller(), "2001:db8::1:2:3:4") and door.enter(Caller(), "10.0.0.9")


@pytest.mark.parametrize(
    ("host", "network"),
    [
        *(("10.1.2.3", "10.1.2.3"), ("::ffff:10.1.2.3", "10.1.2.3"), ("2001:db8::1", "2001:db8::/64")),
        *(("", ""), ("testclient", ""), ("::1", "::/64")),
    ],
)
def test_network_of_groups_ipv6_by_64_prefix(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.parametrize(
    ("soft", "hard", "after", "most"),
    [
        *((256, 20_000, 1152, 1024), (20_000, 20_000, 20_000, 1024), (512, 512, 512, 384), (100, 100, 100, 25)),
        *((256, -1, 1152, 1024), (-1, -1, -1, 1024)),
    ],
)
def test_connection_limit_follows_file_descriptor_limit(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int, most: int
) -> None:
    now = [soft, hard]
    monkeypatch.setattr("resource.getrlimit", lambda what: tuple(now))
    monkeypatch.setattr("resource.setrlimit", lambda what, wanted: now.__setitem__(slice(None), wanted))
    assert (connection_limit(), now[0]) == (most, after)


@pytest.fixture
def talker(start: Start) -> Any:
    answer = "word " * 40_000
    server = start(ScriptedEngine(lambda m, t: say(answer, piece=4096)), send_timeout_seconds=1.5).ready()
    asked = server.ask("talk")
    server.finished(asked)
    server.page = f"/chats/{asked.chat_id}"
    return server


def request(server: Any, line: str, *headers: str) -> bytes:
    host = server.address.removeprefix("http://")
    return "\r\n".join([line, f"Host: {host}", *headers, "", ""]).encode()


def unread(server: Any, sent: bytes) -> socket.socket:
    host, _, port = server.address.removeprefix("http://").rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall(sent)
    return client


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("ending", [(), ("Connection: close",)])
def test_stalled_reader_is_disconnected(talker: Any, times: int, ending: tuple[str, ...]) -> None:
    before = talker.on_loop(lambda: len(talker.server._connection_limiter))
    with unread(talker, request(talker, f"GET {talker.page} HTTP/1.1", *ending) * times):
        talker.wait(lambda: talker.on_loop(lambda: len(talker.server._connection_limiter)) == before + 1)
        talker.wait(lambda: talker.on_loop(lambda: len(talker.server._connection_limiter)) == before)
    assert talker.client.get(talker.page).status_code == 200


def test_slow_reader_receives_whole_page(start: Start) -> None:
    """The whole transfer takes longer than the send timeout, but the reader never stalls for that long."""
    talker = start(ScriptedEngine(lambda m, t: say("word " * 40_000, piece=4096)), send_timeout_seconds=4).ready()
    asked = talker.ask("talk")
    talker.finished(asked)
    talker.page = f"/chats/{asked.chat_id}"
    whole = talker.client.get(talker.page).text
    with unread(talker, request(talker, f"GET {talker.page} HTTP/1.1", "Connection: close")) as client:
        client.settimeout(60)
        began, got = time.monotonic(), b""
        while piece := client.recv(4096):
            got += piece
            time.sleep(0.1)
    assert time.monotonic() - began > 4
    assert abs(len(got) - len(whole)) < 5000 and b"</html>" in got[-100:]


def test_too_many_pipelined_requests_close_connection(talker: Any) -> None:
    some, far_too_many = (request(talker, "GET /livez HTTP/1.1") * times for times in (20, 2000))
    with unread(talker, some) as client:
        client.settimeout(60)
        got = b""
        while got.count(b"HTTP/1.1 200") < 20:
            got += client.recv(65_536)
    before = talker.on_loop(lambda: len(talker.server._connection_limiter))
    with pytest.raises(OSError), unread(talker, far_too_many) as client:
        client.settimeout(60)
        while client.recv(4096):
            pass
        raise ConnectionResetError
    talker.wait(lambda: talker.on_loop(lambda: len(talker.server._connection_limiter)) <= before)


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("POST /chats HTTP/1.1", ("Content-Length: 4", "Transfer-Encoding: chunked"), b"400"),
        ("GET /livez HTTP/1.1", ("Content-Length: 0", "Transfer-Encoding: chunked"), b"400"),
        ("GET /livez HTTP/1.2", (), b"505"),
        ("GET /livez HTTP/2.0", (), b"505"),
        ("GET /livez HTTP/0.9", (), b"505"),
        ("PRI * HTTP/2.0", (), b"505"),
    ],
)
def test_ambiguous_request_closes_connection(shared: Any, line: str, headers: tuple[str, ...], status: bytes) -> None:
    answer = shared.raw(request(shared, line, *headers) + b"0\r\n\r\n" + request(shared, "GET /livez HTTP/1.1"))
    assert answer.split()[1] == status and b"HTTP/1.1 200" not in answer, "the request behind it is not answered"
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_header_limit_includes_request_line(shared: Any) -> None:
    for length, status in ((15_000, 200), (17_000, 431)):
        assert shared.client.get("/livez?" + "x" * length).status_code == status
    assert shared.client.get("/livez?" + "x" * 9000, headers={"X": "y" * 9000}).status_code == 431


@pytest.mark.parametrize(("what", "most"), [("/feed", MAX_PAGE_STREAMS), ("/v1/stream", MAX_REREAD_STREAMS)])
def test_concurrent_stream_limit_applies_to_bursts(start: Start, what: str, most: int) -> None:
    engine = ScriptedEngine(lambda m, t: say("word " * 100_000, piece=5), pace_seconds=0.05)
    server = start(engine).ready()
    if what == "/v1/stream":
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        opening = server.client.stream("POST", "/v1/chat/completions", json=body, headers={"X-Conversation-Id": "c"})
        opening.__enter__()
        what += "?conv_id=c"
    clients = [unread(server, request(server, f"GET {what} HTTP/1.1")) for _ in range(most + 20)]
    statuses = [client.recv(12)[9:] for client in clients]
    assert (statuses.count(b"200"), statuses.count(b"429")) == (most, 20)
    for client in clients:
        client.close()
    for streams in (server.chat.page_streams, server.api.reread_streams):
        server.wait(lambda streams=streams: not streams._open)


def test_unread_backup_is_replaced_by_new_backup(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALL_SECONDS", 0.0)
    server = start(ScriptedEngine(lambda m, t: say("word " * 100_000, piece=4096)), send_timeout_seconds=600).ready()
    server.finished(server.ask("talk"))
    with unread(server, request(server, "GET /backup HTTP/1.1")):
        server.wait(lambda: server.chat.backup_reader is not None and server.chat.backup_reader.unread_since)
        assert server.client.get("/backup").content[:15] == b"SQLite format 3"
    server.wait(lambda: not server.chat.backing_up.locked() and not list(server.shared.settings.directory.glob("b*")))


def test_buffered_bytes_for_stalled_readers_are_limited(talker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(talker.client.get(talker.page).content)
    monkeypatch.setattr(limits, "MAX_HELD_BYTES", 3 * size + size // 2)
    page = request(talker, f"GET {talker.page} HTTP/1.1")
    before = talker.on_loop(lambda: len(talker.server._connection_limiter))
    clients = []
    for number in range(6):
        clients.append(unread(talker, page))
        expected = before + min(number + 1, 3)
        talker.wait(
            lambda expected=expected: talker.on_loop(lambda: len(talker.server._connection_limiter)) <= expected
        )
    # Figures on the page, such as elapsed seconds, may be a digit longer or shorter by now.
    assert abs(len(talker.client.get(talker.page).content) - size) < 100, "a reader that reads gets the whole page"
    for client in clients:
        client.close()


def test_in_pieces_passes_whole_body_under_other_servers() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"x" * 1_000_000})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "state": {}}
    asyncio.run(ChunkedBodies(app)(scope, send, send))  # type: ignore[arg-type]
    assert connection_of(scope) is None and len(sent[0]["body"]) == 1_000_000


def test_repeated_log_messages_are_limited_and_counted() -> None:
    now = 1000.0
    pace = LogRateLimit(clock=lambda: now)

    def written(text: str) -> str | None:
        record = logging.LogRecord("notso.web", logging.INFO, "x.py", 1, text, ("arg",), None)
        return record.getMessage() if pace.filter(record) else None

    assert [written("one %s") for _ in range(1000)].count("one arg") == MOST_PER_WINDOW
    assert written("two %s") == "two arg"
    now += WINDOW_SECONDS
    assert written("one %s") == "one arg (and 980 more of this kind)" and written("one %s") == "one arg"


def test_log_rate_limit_applies_to_all_server_loggers() -> None:
    written: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record)

    handler = Kept()
    logging.getLogger().addHandler(handler)
    try:
        limit_log_rate()
        for name in ("notso.web", "notso.web.store", "notso.web.turns", "uvicorn.error", "asyncio", "notso.later"):
            for number in range(10 * MOST_PER_WINDOW):
                logging.getLogger(name).error("a chunk is broken: %s", number)
            assert len([record for record in written if record.name == name]) == MOST_PER_WINDOW
        for _ in range(2 * MOST_PER_WINDOW):
            logging.getLogger("another.library").error("not caused by clients")
        assert len([record for record in written if record.name == "another.library"]) == 2 * MOST_PER_WINDOW
    finally:
        logging.getLogger().removeHandler(handler)


def test_keep_alive_client_can_repeat_requests(shared: Any) -> None:
    with httpx.Client(base_url=shared.address) as client:
        assert [client.get("/livez").status_code for _ in range(3)] == [200] * 3


def test_offered_upgrade_to_http_2_is_ignored_without_a_warning(shared: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Java's HTTP client makes this offer with every request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with caplog.at_level(logging.WARNING):
        assert shared.client.post("/v1/chat/completions", json=body, headers=offer).status_code == 200
    assert not caplog.records


def test_malformed_request_has_error_code_of_its_status(shared: Any) -> None:
    line = request(shared, "POST /v1/chat/completions HTTP/1.1", "Content-Length: 4", "Transfer-Encoding: chunked")
    assert b'"code": "invalid_value"' in shared.raw(line + b"0\r\n\r\n")


def test_idle_connections_outlive_those_of_clients_and_proxies(shared: Any) -> None:
    """A client that reuses a connection while the server closes it gets no response."""
    httpx_and_node, nginx, traefik, caddy = 5, 60, 90, 120
    assert shared.server.config.timeout_keep_alive > max(httpx_and_node, nginx, traefik, caddy)
