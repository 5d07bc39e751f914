"""The connection to an engine: calls and events that break off, are invalid or endless, and stops that fail."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from notso.smollm3 import EngineError, Event, Generation, Message
from notso.web.engine.remote import engine_link
from notso.web.engine.remote.engine_link import EngineLink
from notso.web.engine.remote.remote_engine import RemoteSource
from notso.web.values.errors import EngineUnavailableError

KEY = "a key for front ends only"

Start = Callable[..., Any]


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


INFO = {"name": "m", "path": "m", "is_demo": False, "size_bytes": 1, "parameter_count": 1, "context_tokens": 4096}
USAGE = {"kind": "usage", "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
END = {"kind": "end", "finish_reason": "stop"}


def text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if event.kind == "text")


class FalseEngine:
    """A server that speaks the engine's protocol with scripted `events` per answer and `result` per call."""

    def __init__(self) -> None:
        self.events: list[Any] = [{"kind": "text", "text": "fine"}, USAGE, END]
        self.result: bytes = b'{"result": {"prompt_tokens": 5, "cached_tokens": 0, "seconds": 1.0}}'
        self.endless = False
        self.sent = 0
        self.calls = 0
        self.at_call: Callable[[Any], bool] = lambda handler: True
        engine = self
        lines: list[Callable[[bytes], None]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Print no log lines."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.path.rpartition("/")[2]
                self.send_response(200)
                if name == "events":
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()

                    def line(text: bytes) -> None:
                        self.wfile.write(b"%x\r\n" % (len(text) + 1) + text + b"\n\r\n")
                        self.wfile.flush()

                    about = {"state": "ready", "info": INFO | {"max_num_seqs": 4}}
                    # append before sending, because a submission may arrive as soon as the line is out
                    lines.append(line)
                    line(json.dumps({"known": [int(each) for each in body["read"]], "about": about}).encode())
                    with contextlib.suppress(OSError):
                        while not engine.closed.wait(0.5):
                            line(b"{}")
                    return
                if name == "submit":
                    self.say(b'{"result": true}')
                    with contextlib.suppress(OSError):
                        lines[-1](json.dumps({"answers": {str(body["number"]): [0, engine.events]}}).encode())
                    return
                engine.calls += name == "call"
                if not engine.at_call(self):
                    self.close_connection = True
                elif engine.endless:
                    self.end_headers()
                    with contextlib.suppress(OSError):
                        while not engine.closed.is_set():
                            engine.sent += self.wfile.write(b" " * (1 << 20))
                    self.close_connection = True
                else:
                    self.say(engine.result)

            def say(self, text: bytes) -> None:
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.closed = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def false() -> Iterator[tuple[FalseEngine, RemoteSource]]:
    engine = FalseEngine()
    source = RemoteSource(engine.address, KEY)
    yield engine, source
    source.close()
    engine.close()


HELLO = (Message("user", "hello"),)


@pytest.mark.parametrize(
    "events",
    [
        [{"kind": "tool_call"}],
        [{"kind": "usage"}],
        [{"kind": "end"}],
        [{"kind": "usage", "usage": {"prompt_tokens": -1, "completion_tokens": 3}}, END],
        [{"kind": "usage", "usage": {"prompt_tokens": 1 << 63, "completion_tokens": 3}}, END],
        [{"kind": "usage", "usage": {"prompt_tokens": 1, "completion_tokens": 3, "prompt_ms": float("nan")}}, END],
        [{"kind": "progress", "progress": {"done_tokens": 10**20, "total_tokens": 0, "cached_tokens": 0}}],
        [{"kind": "queued", "place": -(10**20)}],
        [{"kind": "text", "text": "a\ud800b"}, USAGE, END],
        [{"kind": "tool_call", "tool_call": {"id": "1", "name": "a", "arguments": "\udfff"}}, USAGE, END],
        pytest.param([{"kind": "text", "text": "x", "logprobs": [[]] * 2_000_001}], id="2,000,001 logprobs"),
        {"kind": "text"},
        5,
    ],
    ids=lambda each: str(each)[:60],
)
def test_invalid_engine_events_fail_only_current_response(false: tuple[FalseEngine, RemoteSource], events: Any) -> None:
    engine, source = false
    right, engine.events = engine.events, events
    failed = list(source().submit(HELLO).events())
    assert [event.kind for event in failed][-1] == "error", failed
    assert not [event for event in failed if event.kind == "usage"]
    engine.events = right
    wait(lambda: source._link.is_up)
    assert text(source().submit(HELLO).events()) == "fine"


def test_answer_that_close_ends_while_its_events_arrive_ends_once(
    false: tuple[FalseEngine, RemoteSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = false
    validate = engine_link._validate_event

    def close_meanwhile(event: Event) -> Event:
        source._link._end_all_answers("the engine was closed")
        return validate(event)

    engine = source()
    monkeypatch.setattr(engine_link, "_validate_event", close_meanwhile)
    assert [event.kind for event in engine.submit(HELLO).events()] == ["error"]


def test_calls_on_a_reused_connection_are_sent_once(false: tuple[FalseEngine, RemoteSource]) -> None:
    engine, source = false
    remote, used = source(), set()
    for _ in range(3):
        remote.estimate(HELLO)
        used |= {connection for connection, _ in source._link._spare}
    assert (engine.calls, len(used)) == (3, 1)


def test_text_outside_ascii_is_sent_in_utf_8(false: tuple[FalseEngine, RemoteSource]) -> None:
    engine, source = false
    remote, sizes = source(), list[int]()

    def noted(handler: Any) -> bool:
        sizes.append(int(handler.headers["Content-Length"]))
        return True

    engine.at_call = noted
    for text in ("x" * 9000, "語" * 3000, "\ud83d"):  # the engine returns an error about a lone surrogate
        remote.estimate((Message("user", text),))
    assert sizes[0] == sizes[1] > sizes[2]


def test_a_slow_call_on_a_reused_connection_is_sent_once(
    false: tuple[FalseEngine, RemoteSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, source = false
    remote = source()
    monkeypatch.setattr(engine_link, "CALL_SECONDS", 0.2)
    remote.estimate(HELLO)
    engine.at_call = lambda handler: bool(engine.closed.wait(30)) and False
    with pytest.raises(EngineError, match="timed out"):
        remote.estimate(HELLO)
    assert engine.calls == 2


def test_a_call_whose_connection_breaks_is_not_sent_again(false: tuple[FalseEngine, RemoteSource]) -> None:
    engine, source = false
    remote = source()
    remote.estimate(HELLO)
    engine.at_call = lambda handler: False
    with pytest.raises(EngineError, match="it closed the connection"):
        remote.estimate(HELLO)
    assert engine.calls == 2


def test_a_response_that_breaks_off_in_its_headers_is_not_invalid(false: tuple[FalseEngine, RemoteSource]) -> None:
    engine, source = false
    remote = source()
    engine.at_call = lambda handler: handler.flush_headers()
    with pytest.raises(EngineUnavailableError, match="it closed the connection"):
        remote.estimate(HELLO)


def test_an_idle_connection_that_was_closed_is_replaced(false: tuple[FalseEngine, RemoteSource]) -> None:
    engine, source = false
    remote = source()

    def close_afterwards(handler: Any) -> bool:
        handler.close_connection = True
        return True

    engine.at_call = close_afterwards
    for _ in range(2):
        remote.estimate(HELLO)
        ((connection, _),) = source._link._spare
        assert select.select([connection.sock], [], [], 30)[0]  # the end of the answer has arrived
    assert engine.calls == 2


def test_endless_response_is_read_only_to_limit(false: tuple[FalseEngine, RemoteSource]) -> None:
    engine, source = false
    remote = source()
    assert remote.estimate(HELLO).prompt_tokens == 5
    engine.endless = True
    with pytest.raises(EngineError, match="sent too much data"):
        remote.estimate(HELLO)
    assert engine.sent <= 2 * engine_link.MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    "result",
    [
        b'{"result": {"prompt_tokens": -5, "cached_tokens": 0, "seconds": 1.0}}',
        b'{"result": {"prompt_tokens": 5, "cached_tokens": 0, "seconds": 1e999}}',
        b"[" * 100_000,
        b'{"result": [' + b"[]," * 3_000_000 + b"[]]}",
        b"[1]",
    ],
    ids=lambda each: each[:24],
)
def test_invalid_call_result_raises_engine_error(false: tuple[FalseEngine, RemoteSource], result: bytes) -> None:
    engine, source = false
    remote = source()
    engine.result = result
    with pytest.raises(EngineError):
        remote.estimate(HELLO)


def read_request(connection: socket.socket) -> None:
    """Read a request to its end. Closing a connection with unread bytes would reset it."""
    with connection.makefile("rb") as file:
        file.read(int(http.client.parse_headers(file)["Content-Length"] or 0) if file.readline() else 0)


def test_response_that_ends_early_is_reported_as_a_broken_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"result"')

        with ThreadPoolExecutor(1) as pool:
            pool.submit(respond)
            with pytest.raises(EngineUnavailableError, match="it closed the connection"):
                EngineLink(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY, lambda: None).call("steer", {})


def fail_to_stop(link: EngineLink, monkeypatch: pytest.MonkeyPatch, *streams: socket.socket) -> None:
    """Let a link without threads fail to send a stop. The first stream is open at the stop, the last at the failure."""
    monkeypatch.setattr(link, "_connect", Mock(side_effect=ConnectionRefusedError))
    generation = Generation(lambda: link._on_steering_requested(1))
    link._open[1] = engine_link._OpenAnswer(generation)
    link._stream = streams[0]
    generation.stop()
    link._stream = streams[-1]
    link._steering.put(None)
    link._send_steering()


def test_stop_that_cannot_be_sent_does_not_break_a_later_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = socket.socketpair(), socket.socketpair()
    link = EngineLink("http://engine", KEY, lambda: None)
    fail_to_stop(link, monkeypatch, pairs[0][0], pairs[1][0])
    for _, there in pairs:
        there.setblocking(False)
    assert pairs[0][1].recv(1) == b""
    with pytest.raises(BlockingIOError):
        pairs[1][1].recv(1)
    for each in itertools.chain(*pairs):
        each.close()


@pytest.mark.parametrize("cause", ["closed", "stop"])
def test_interrupted_connection_sends_nothing_unencrypted(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = EngineLink("https://engine", KEY, lambda: None)
    shutdown = socket.socket.shutdown

    def shut_down_during_send(stream: socket.socket, how: int) -> None:
        with contextlib.suppress(OSError):
            stream.send(KEY.encode())
        shutdown(stream, how)

    monkeypatch.setattr(socket.socket, "shutdown", shut_down_during_send)
    here, there = socket.socketpair()
    context = ssl.create_default_context()
    with there, context.wrap_socket(here, server_hostname="engine", do_handshake_on_connect=False) as stream:
        stream.setblocking(False)
        if cause == "closed":
            connection = http.client.HTTPSConnection("engine")
            connection.sock = stream
            link._in_use.add(connection)
            link.close()
        else:
            fail_to_stop(link, monkeypatch, stream)
        assert KEY.encode() not in there.recv(65_536)
        assert there.recv(1) == b""


def test_silence_of_a_busy_or_paused_machine_is_not_a_lost_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of the whole machine, the read timeout has expired before anything can arrive."""
    link, now, losses = engine_link.EngineLink("http://127.0.0.1:9", KEY, lambda: None), [100.0], []

    def read_lines() -> Iterator[dict[str, Any]]:
        if losses:
            link.close()  # the engine responds to the second attempt
            return
        yield {}
        now[0] += 9.0
        raise TimeoutError

    monkeypatch.setattr(engine_link, "LOST_SECONDS", 5.0)
    monkeypatch.setattr(engine_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(link, "_read_lines", read_lines)
    monkeypatch.setattr(link, "_record_failure", lambda _, is_lost: losses.append(is_lost))
    link._stream_events()
    assert losses == [False]


def test_server_shuts_down_while_engine_hangs(
    start: Start, false: tuple[FalseEngine, RemoteSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers no call and ends no answer, but its event stream stays open."""
    from notso.web import app

    monkeypatch.setattr(app, "STOP_SECONDS", 0.05)
    engine, source = false
    engine.events = [{"kind": "text", "text": "half"}]
    server = start(source, engine_url=engine.address, engine_key=KEY, drain_seconds=0.0).ready()
    asked = server.ask("hello")
    wait(lambda: "half" in str(server.chat.turns.find(asked.generation_id).log.html("answer")))
    engine.at_call = lambda handler: engine.closed.wait() and False
    wanted = range(12)  # more calls than may run at once
    with ThreadPoolExecutor(len(wanted)) as threads:
        before = engine.calls
        estimates = [threads.submit(server.client.post, "/tokenize", json={"content": "x"}) for _ in wanted]
        wait(lambda: engine.calls > before)
        server.on_loop(lambda: app.drain_work(server.app.state.parts))
        assert {each.result().status_code for each in estimates} <= {500, 503}
    # The answer stays unfinished in the store, so that the next process continues it.
    assert server.stored(asked).state == "running" and server.chat.turns.unfinished == 0
    server.close()
