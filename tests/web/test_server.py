"""Server start and shutdown: ports, addresses, signals and kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from scripted_engine import IMPORTABLE, ScriptedEngine

from notso.web.app import create_app
from notso.web.server import LAST_RESORT_SECONDS, ChatServer, listen, page_url, serve
from notso.web.store.sqlite.connection import DirectoryLock
from notso.web.values.errors import (
    AddressInUseError,
    DataDirectoryBusyError,
    SettingsError,
    StorageError,
    UnsafeBindError,
    WebError,
)
from notso.web.values.ids import new_id
from notso.web.values.settings import Settings

PROGRAM = (
    f"{IMPORTABLE}\n"
    """
import signal
import sys
import time
from pathlib import Path
from notso.web.turns import turn_consumer as follower
from scripted_engine import ScriptedEngine, say
from notso.web import server
from notso.web.server import serve
from notso.web.values.settings import Settings

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
server.LAST_RESORT_SECONDS = float(sys.argv[3])
follower.SAVE_SECONDS = 0.2
directory = Path(sys.argv[1])

def script(messages, thinking):
    yield from say("word " * int(messages[-1].content), piece=5)
    while (directory / "hold").exists():
        time.sleep(0.01)

settings = Settings(port=0, data_dir=directory, drain_seconds=float(sys.argv[2]))
serve(lambda: ScriptedEngine(script, pace_seconds=0.02), settings, on_ready=lambda url: print(url, flush=True))
print("saved", flush=True)
"""
)


class Process:
    """The server in its own process."""

    def __init__(self, directory: Path, drain_seconds: float = 10.0, last_resort_seconds: float = 60.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory), str(drain_seconds), str(last_resort_seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = next(line for line in self.process.stdout if line.startswith("http")).strip()  # after log records
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def ask(self, words: int) -> str:
        answer = self.client.post("/chats", data={"text": str(words), "key": new_id()})
        assert answer.status_code == 303
        return str(answer.headers["location"])

    def wait_for(self, text: str, path: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.client.get(path).text:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        output = self.process.stdout.read()
        return self.process.wait(60), output


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(**settings: Any) -> Process:
        started.append(Process(tmp_path, **settings))
        return started[-1]

    yield start
    for each in started:
        each.client.close()
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()


def test_partial_answer_survives_kill_and_resumes(process: Callable[..., Process]) -> None:
    first = process()
    chat = first.ask(5000)
    # the export reads the saved text; the page may be ahead of it
    first.wait_for("word word word", f"{chat}/export/json")
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.end()[0] == -signal.SIGKILL
    second = process()
    second.wait_for("word word word", chat)
    page = second.client.get(chat).text
    assert 'data-state="running"' in page
    stream = page.partition('hx-sse:connect="/generations/')[2].partition("/")[0]
    assert second.client.post(f"/generations/{stream}/stop").status_code == 303
    second.wait_for('data-state="stopped"', chat)
    assert second.client.post(f"{chat}/messages", data={"text": "1", "key": new_id()}).status_code == 303


def test_sigterm_finishes_short_answer_and_rejects_new_ones(process: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    first = process(drain_seconds=100.0)
    chat = first.ask(20)
    first.process.send_signal(signal.SIGTERM)
    first.wait_for("stopping", "/health")
    assert first.client.get("/health").json() == {"status": "stopping"}
    assert first.client.get("/livez").status_code == 200
    refused = first.client.post("/chats", data={"text": "my words", "key": new_id()})
    assert refused.status_code == 503 and "my words" in refused.text and int(refused.headers["retry-after"]) > 0
    (tmp_path / "hold").unlink()
    assert first.end() == (0, "the server is stopping: SIGTERM\nsaved\n")
    page = process().client.get(chat).text
    assert 'data-state="done"' in page and page.count("word ") >= 19


def test_closed_terminal_ends_server_like_sigterm(process: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    first = process(drain_seconds=100.0)
    first.ask(20)
    for _ in range(2):  # the shell and the kernel may both send the signal
        first.process.send_signal(signal.SIGHUP)
        first.wait_for("stopping", "/health")
    (tmp_path / "hold").unlink()
    assert first.end() == (0, "the server is stopping: SIGHUP\nsaved\n")


def test_shutdown_leaves_long_answer_to_next_process(process: Callable[..., Process]) -> None:
    first = process(drain_seconds=0.5)
    chat = first.ask(5000)
    first.wait_for("word word", chat)
    stream_url = first.client.get(chat).text.partition('hx-sse:connect="')[2].partition('"')[0]
    with first.client.stream("GET", stream_url) as stream:
        lines = stream.iter_lines()
        next(lines)
        began = time.monotonic()
        first.process.send_signal(signal.SIGINT)
        assert [line for line in lines if line.startswith("event:")][-1] == "event: done"
    assert first.end() == (0, "the server is stopping: SIGINT\nsaved\n")
    assert time.monotonic() - began < 30, "the shutdown did not wait for the script, which takes 100 s"
    again = process()
    assert 'data-state="running"' in again.client.get(chat).text, "the next process resumes the answer"
    again.wait_for("word word", chat)


def test_hanging_engine_does_not_prevent_exit(process: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "hold").touch()  # the engine neither continues nor receives the stop
    first = process(drain_seconds=0.2, last_resort_seconds=0.5)
    first.wait_for("word", first.ask(3))
    first.process.send_signal(signal.SIGTERM)
    code, output = first.end()
    assert code == 1 and "most recent call first" in output, "the traceback shows where the server was stuck"


def test_second_signal_ends_server_immediately(process: Callable[..., Process]) -> None:
    first = process(drain_seconds=60.0)
    chat = first.ask(5000)
    first.wait_for("word word word", f"{chat}/export/json")
    first.process.send_signal(signal.SIGTERM)
    first.wait_for("stopping", "/health")
    began = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    assert "Traceback" not in first.end()[1]
    assert time.monotonic() - began < 30, "the shutdown did not wait for the drain, which takes 60 s"
    again = process()
    assert 'data-state="running"' in again.client.get(chat).text, "the next process resumes the answer"
    again.wait_for("word word", chat)


def test_request_canceled_by_second_signal_gets_503(process: Callable[..., Process]) -> None:
    first = process(drain_seconds=60.0)
    with ThreadPoolExecutor(1) as other:
        body = {"messages": [{"role": "user", "content": "5000"}]}
        asked = other.submit(first.client.post, "/v1/chat/completions", json=body)
        first.wait_for("notso_num_requests_running 1.0", "/metrics")
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("stopping", "/health")
        first.process.send_signal(signal.SIGTERM)
        answer = asked.result(60)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["message"] == "The server is stopping."
    assert "Traceback" not in first.end()[1]


def test_second_signal_requests_immediate_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", False)  # restored afterwards
    settings = Settings(port=0, data_dir=tmp_path, drain_seconds=60.0)
    server, ends = ChatServer(create_app(ScriptedEngine, settings), "", None), list[float]()
    server.end_in = ends.append
    server.handle_exit(signal.SIGTERM, None)
    assert not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit
    assert ends == [settings.leave_seconds + 60.0 + LAST_RESORT_SECONDS, LAST_RESORT_SECONDS]


def test_busy_port_raises_address_in_use_error(tmp_path: Path) -> None:
    with listen(Settings(port=0)) as taken:
        settings = Settings(port=taken.getsockname()[1], data_dir=tmp_path)
        with pytest.raises(AddressInUseError, match="--port") as caught:
            serve(ScriptedEngine, settings)
        assert caught.value.port == settings.port
        assert not list(tmp_path.iterdir()), "the data folder must stay untouched"


def test_ollama_port_is_served_beside_main_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(Settings(port=0)) as taken:
        settings = Settings(port=0, ollama_port=taken.getsockname()[1], data_dir=tmp_path)
        with pytest.raises(AddressInUseError, match="--ollama-port") as caught:
            serve(ScriptedEngine, settings)
        assert caught.value.port == settings.ollama_port
    heard: list[httpx.Response] = []

    def look(self: ChatServer, sockets: list[socket.socket]) -> None:
        def ask() -> None:
            with contextlib.suppress(httpx.TransportError):
                heard.extend(httpx.get(f"http://127.0.0.1:{each.getsockname()[1]}/livez") for each in sockets)
            self.should_exit = True

        self._on_ready = lambda address: threading.Thread(target=ask).start()
        uvicorn.Server.run(self, sockets)

    monkeypatch.setattr(ChatServer, "run", look)
    serve(ScriptedEngine, Settings(port=0, ollama_port=0, data_dir=tmp_path))
    assert [answer.json() for answer in heard] == [{"status": "alive"}] * 2
    assert len({answer.url.port for answer in heard}) == 2


def test_unavailable_address_raises_address_in_use_error(tmp_path: Path) -> None:
    with pytest.raises(AddressInUseError):
        listen(Settings(host="192.0.2.1", api_key="k" * 16))
    with pytest.raises(AddressInUseError):
        listen(Settings(host="no-such-host.invalid", api_key="k" * 16))


def test_unusable_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"the data directory {tmp_path / 'file'} cannot be used"):
        DirectoryLock(tmp_path / "file")


def test_busy_data_directory_raises_typed_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DataDirectoryBusyError):
        serve(ScriptedEngine, Settings(port=0, data_dir=tmp_path))
    lock.release()
    assert capfd.readouterr().err == "", "only the caller that catches the error prints a message"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.9", "LocalHost"])
def test_loopback_bind_requires_no_api_key(host: str) -> None:
    assert Settings(host=host).host_names >= {host.strip("[]").lower(), "localhost"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org", "128.0.0.1"])
def test_bind_beyond_loopback_requires_api_key(host: str) -> None:
    with pytest.raises(UnsafeBindError, match="API key"):
        Settings(host=host)
    assert Settings(host=host, api_key="k" * 16).host == host


def test_wildcard_address_is_not_a_host_name() -> None:
    assert "0.0.0.0" not in Settings(host="0.0.0.0", api_key="k" * 16).host_names


@pytest.mark.parametrize(
    "wrong",
    [
        *({"port": -1}, {"port": 65536}, {"host": ""}, {"host": "a b"}, {"api_key": "short"}, {"max_waiting_turns": 0}),
        *({"api_key": " " * 16}, {"api_key": "k" * 16 + " "}, {"api_key": "k" * 16 + "\n" + "k"}),
        *({"max_message_characters": 0}, {"max_answer_characters": 0}, {"drain_seconds": -1}, {"drain_seconds": 601}),
        *({"send_timeout_seconds": 0}, {"send_timeout_seconds": 601}, {"keep_alive_seconds": 10**400}),
    ],
    ids=str,
)
def test_invalid_setting_is_named_in_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**wrong)
    assert caught.value.setting == next(iter(wrong))
    assert isinstance(caught.value, WebError) and "\n" not in str(caught.value)


def test_api_key_is_not_in_repr_of_settings() -> None:
    assert "k" * 16 not in repr(Settings(api_key="k" * 16))


def test_address_of_returns_browser_url() -> None:
    with listen(Settings(port=0)) as listener:
        port = listener.getsockname()[1]
        assert page_url(listener, Settings(port=0)) == f"http://127.0.0.1:{port}/"
        assert page_url(listener, Settings(host="0.0.0.0", api_key="k" * 16)) == f"http://127.0.0.1:{port}/"
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        with listen(Settings(host="[::1]", port=0)) as listener:
            assert page_url(listener, Settings(host="[::1]")).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("GET", "/", {}),
        ("GET", "/export", {}),
        ("POST", "/settings", {"data": {"titles": "on"}}),
        ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "Hi"}]}}),
        ("POST", "/v1/responses", {"json": {"input": "Hi"}}),
        ("POST", "/tokenize", {"json": {"content": "Hi"}}),
        ("GET", "/metrics", {}),
    ],
)
def test_request_without_available_thread_returns_503(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str, path: str, sent: dict[str, Any]
) -> None:
    server = start(ScriptedEngine()).ready()

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.BaseEventLoop, "run_in_executor", refuse)
        refused = server.client.request(method, path, **sent)
    assert (refused.status_code, refused.headers.get("retry-after")) == (503, "5")
    if path.startswith("/v1/"):
        assert refused.json()["error"]["code"] == "overloaded"
    assert server.client.request(method, path, **sent).status_code in (200, 303)


def test_other_runtime_error_returns_500(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine()).ready()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.BaseEventLoop, "run_in_executor", fail)
        assert server.client.get("/").status_code == 500


def test_libraries_of_unused_features_are_not_imported() -> None:
    """Without sign-in by OpenID Connect, MCP servers and tracing, a server does not import their libraries."""
    libraries = ("authlib", "joserfc", "httpx", "mcp", "opentelemetry.sdk")
    program = (
        f"{IMPORTABLE}from notso.web import server; from notso.web.app import create_app; "
        "from scripted_engine import ScriptedEngine; create_app(ScriptedEngine); "
        f"print([name for name in {libraries} if name in sys.modules])"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
