"""Fixtures: a real server on loopback with a scripted engine, and an event stream parser written from the
specification."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine
from web.shared_between_servers import NO_AUTHORITIES, share_between_servers
from web.store.postgres_server import PostgresServer, postgres_server

from notso.plugins.process import Plugins
from notso.system.confinement import lacking
from notso.web.api.shared.services import ApiServices
from notso.web.app import create_app
from notso.web.chat.services import ChatServices
from notso.web.engine.models import ModelRegistry
from notso.web.engine.port import ChatEngine
from notso.web.engine.remote.remote_engine import RemoteSource
from notso.web.server import ChatServer, listen, page_url
from notso.web.services import SharedServices
from notso.web.values.ids import new_id
from notso.web.values.settings import Settings

share_between_servers()


@dataclass
class SSE:
    """One server-sent event as a browser would parse it."""

    event: str = "message"
    data: str = ""
    id: str = ""


class EventReader:
    """Parser for the line rules of the HTML standard's event streams; accepts bytes split at any position."""

    def __init__(self) -> None:
        self._bytes = b""
        self._fields: list[tuple[str, str]] = []
        self.last_id = ""
        self.events: list[SSE] = []
        self.comments: list[str] = []

    def feed(self, data: bytes) -> None:
        self._bytes += data
        # A CR at the end of the buffer may be the first half of CRLF, so wait for the next byte.
        while match := re.search(rb"\r\n|\n|\r(?=.)", self._bytes, re.DOTALL):
            line, self._bytes = self._bytes[: match.start()].decode(), self._bytes[match.end() :]
            self._line(line)

    def _line(self, line: str) -> None:
        if not line:
            data = [value for name, value in self._fields if name == "data"]
            named = [value for name, value in self._fields if name == "event"]
            self._fields = []
            if data:
                self.events.append(SSE(named[-1] if named else "message", "\n".join(data), self.last_id))
        elif line.startswith(":"):
            self.comments.append(line[1:].strip())
        else:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                self.last_id = value
            self._fields.append((name, value))


PARTIAL = re.compile(r'<hx-partial hx-target="([^"]*)" hx-swap="([^"]*)">(.*?)</hx-partial>', re.DOTALL)


@dataclass
class Screen:
    """The page content after applying updates: element id -> HTML."""

    parts: dict[str, str] = field(default_factory=dict)

    def apply(self, event: SSE) -> None:
        for target, swap, html in PARTIAL.findall(event.data):
            before = self.parts.get(target, "") if swap == "beforeend" else ""
            self.parts[target] = before + html

    def html(self, message_id: str, channel: str) -> str:
        return "".join(self.parts.get(f"#msg-{message_id}-{channel}-{part}", "") for part in ("closed", "tail"))


class Shown:
    """The events a reader has received so far. The scripted engine waits on it, so that it never runs ahead of the
    reader.

    Pass it as `server.stream(asked, until=shown)` to record the events; the engine's script calls `shown.wait`.
    """

    def __init__(self) -> None:
        self.events: list[SSE] = []
        self._more = threading.Condition()

    def __call__(self, event: SSE) -> bool:
        with self._more:
            self.events.append(event)
            self._more.notify_all()
        return False

    def wait(self, what: Callable[[SSE], bool], times: int = 1) -> None:
        """Wait until the reader has received `times` events that match `what`."""
        with self._more:
            assert self._more.wait_for(lambda: sum(map(what, self.events)) >= times, 60), "no such event arrived"

    def wait_for_state(self, state: str) -> None:
        """Wait until the reader has received a status event with this state."""
        self.wait(lambda event: event.event == "status" and json.loads(event.data)["state"] == state)


@dataclass
class Asked:
    chat_id: str
    message_id: str
    generation_id: str


class Running:
    """A server in a thread, reached over TCP."""

    def __init__(
        self,
        source: Callable[[], ChatEngine],
        settings: Settings,
        model_registry: ModelRegistry | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        self.app = create_app(source, settings, model_registry=model_registry, plugins=plugins)
        listener = listen(settings)
        # Keep the send buffer small so that the server notices early when a reader stops reading.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        self.address = page_url(listener, settings).rstrip("/")
        self.server = ChatServer(self.app, self.address)
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()
        self._wait(lambda: self.server.started or not self._thread.is_alive())
        self.client = httpx.Client(base_url=self.address, timeout=60, verify=NO_AUTHORITIES)

    @property
    def shared(self) -> SharedServices:
        shared: SharedServices = self.app.state.parts.shared
        return shared

    @property
    def chat(self) -> ChatServices:
        chat: ChatServices = self.app.state.chat
        return chat

    @property
    def api(self) -> ApiServices:
        api: ApiServices = self.app.state.api
        return api

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run a callable on the server's loop and wait for what it returns."""

        async def run() -> Any:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        loop = self.shared.engine._loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(run(), loop).result(60)

    def ready(self) -> Running:
        self._wait(lambda: self.client.get("/health").status_code == 200)
        return self

    def ask(
        self, text: str, chat_id: str | None = None, *, thinking: bool = True, key: str | None = None, **others: str
    ) -> Asked:
        fields = {"text": text, "key": key or new_id()} | ({"thinking": "on"} if thinking else {}) | others
        answer = self.client.post(f"/chats/{chat_id}/messages" if chat_id else "/chats", data=fields)
        assert answer.status_code == 303, answer.text
        chat_id = answer.headers["location"].removeprefix("/chats/")
        return self.last(chat_id)

    def last(self, chat_id: str) -> Asked:
        """Return the newest answer of a chat."""
        message = self.on_loop(lambda: self.shared.store.messages("local", chat_id))[-1]
        return Asked(chat_id, message.id, message.generation_id)

    def stored(self, asked: Asked) -> Any:
        return self.on_loop(lambda: self.shared.store.message("local", asked.chat_id, asked.message_id))

    def stream(
        self,
        asked: Asked,
        last_id: str | bytes | None = None,
        *,
        until: Callable[[SSE], bool] = lambda event: False,
        limit: int = 1_000_000,
    ) -> list[SSE]:
        """Read the stream to its end, to the event for which `until` is true, or for `limit` events."""
        reader, headers = EventReader(), ({"Last-Event-ID": last_id} if last_id is not None else {})
        url = f"/generations/{asked.generation_id}/events"
        with self.client.stream("GET", url, headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            for chunk in response.iter_raw():
                seen = len(reader.events)
                reader.feed(chunk)
                for number, event in enumerate(reader.events[seen:], start=seen + 1):
                    if until(event) or number == limit:
                        return reader.events[:number]
        return reader.events

    def finished(self, asked: Asked) -> Any:
        """Return the stored answer after it has ended and all its readers have received the end."""
        self._wait(lambda: not self.stored(asked).active)
        self._wait(lambda: self.on_loop(lambda: self.chat.turns.stats(asked.generation_id)) is None)
        return self.stored(asked)

    def raw(self, request: bytes) -> bytes:
        """Send raw bytes that no HTTP client would send, and return the response."""
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65_536), b""))

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def begin_close(self) -> None:
        self.client.close()
        self.server.should_exit = True

    def close(self) -> None:
        self.begin_close()
        self._thread.join(60)
        assert not self._thread.is_alive()

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline, pause = time.monotonic() + seconds, 0.005
        while not condition():  # mostly a request to the server: longer pauses leave it the CPU during long work
            assert time.monotonic() < deadline, "timed out"
            time.sleep(pause)
            pause = min(1.3 * pause, 0.05)

    wait = _wait


@pytest.fixture(scope="session")
def closing() -> Iterator[list[Running]]:
    """Servers that have been asked to shut down. Each takes a moment, so their exit is awaited after the last test.
    Servers that have exited are removed, or the garbage collector would visit all their objects again and again."""
    servers: list[Running] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def start(tmp_path: Path, closing: list[Running]) -> Iterator[Callable[..., Running]]:
    """Return a function that starts servers and closes them at the end of the test; keyword arguments are settings."""
    running: list[Running] = []

    def begin(
        engine: ScriptedEngine | Callable[[], ChatEngine],
        *,
        model_registry: ModelRegistry | None = None,
        plugins: Plugins | None = None,
        **settings: Any,
    ) -> Running:
        source = engine if callable(engine) else lambda: engine
        usual = {"port": 0, "data_dir": tmp_path / "data", "unconfined_documents": bool(lacking())}
        chosen = Settings(**(usual | settings))
        server = Running(source, chosen, model_registry, plugins)
        running.append(server)
        return server

    yield begin
    for server in running:
        server.begin_close()
    closing[:] = [each for each in (*closing, *running) if each.is_running]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server shared by tests that leave nothing running."""
    settings = Settings(port=0, data_dir=tmp_path_factory.mktemp("data"), unconfined_documents=bool(lacking()))
    server = Running(ScriptedEngine, settings).ready()
    yield server
    server.close()


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def event_reader() -> type[EventReader]:
    return EventReader


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def new_database(postgres: PostgresServer) -> str:
    """Return the address of an empty PostgreSQL database without a schema."""
    return postgres.new_database()


@pytest.fixture(scope="session")
def reused_database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def database(reused_database: str) -> str:
    """Return the address of a PostgreSQL database without rows.

    Creating a database and its schema for every test would take 0.4 s.
    """
    import psycopg

    with psycopg.connect(reused_database) as connection:
        connection.execute("SET session_replication_role = replica")  # rows may be deleted before those that name them
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'notso'").fetchall()
        for (table,) in tables:
            if table != "schema_version":
                connection.execute(f'DELETE FROM notso."{table}"'.encode())
    return reused_database


ENGINE_KEY = "a key for front ends only"


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Connect to an engine behind a server on loopback, as a front end does."""

    @contextlib.contextmanager
    def remote(engine: ChatEngine) -> Iterator[ChatEngine]:
        settings = Settings(port=0, data_dir=tmp_path_factory.mktemp("engine"), engine_api=True, engine_key=ENGINE_KEY)
        server = Running(lambda: engine, settings).ready()
        source = RemoteSource(server.address, ENGINE_KEY)
        try:
            yield source()
        finally:
            source.close()
            server.close()

    return remote
