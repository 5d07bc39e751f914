"""Server startup, socket setup and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from types import FrameType

import uvicorn
from fastapi import FastAPI

from notso.plugins.process import Plugins
from notso.smollm3 import limit_malloc_arenas
from notso.web.app import create_app, drain_work
from notso.web.edge.connections import ClientConnection, ConnectionLimiter, RequestPipeline, connection_limit
from notso.web.edge.limits import MAX_HEADER_BYTES
from notso.web.edge.watchdog import Watchdog
from notso.web.engine.models import ModelRegistry
from notso.web.engine.port import EngineSource
from notso.web.values.errors import AddressInUseError
from notso.web.values.settings import Settings

EXTRA_EXIT_SECONDS = 3.0
SWITCH_SECONDS = 0.0005
"""Thread switch interval. With Python's default of 5 ms, each step of a request waits up to 5 ms for a computing
thread to release the GIL, so pages spend most of their time waiting."""
DATE_SECONDS = 1.0
IDLE_SECONDS = 125
"""How long idle connections are kept open. This must exceed the idle timeouts of clients (httpx and Node: 5 s) and
proxies (Caddy: 120 s). Otherwise, a request that arrives while the server closes the connection fails."""
LAST_RESORT_SECONDS = 4.5
"""If the process hangs, it is killed this long after the end of the drain period or after a second signal. Data that
was acknowledged is already on disk. Including the time to print tracebacks, the process exits within 5 s."""


def serve(
    engine_source: EngineSource,
    settings: Settings,
    *,
    model_registry: ModelRegistry | None = None,
    plugins: Plugins | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; return after everything is saved.

    `on_ready` is called in the server's thread with the page's URL once the page responds, even if the engine is still
    loading. After the first signal, running answers have `drain_seconds` to finish; a second signal ends them. Raises
    AddressInUseError, SettingsError or StorageError.
    """
    limit_malloc_arenas()
    with contextlib.ExitStack() as listening:
        listeners = [listening.enter_context(listen(settings))]
        if settings.ollama_port is not None:
            listeners.append(listening.enter_context(listen(settings, settings.ollama_port, "--ollama-port")))
        sys.setswitchinterval(SWITCH_SECONDS)
        app = create_app(engine_source, settings, model_registry=model_registry, plugins=plugins)
        if settings.ollama_port is not None:
            app.state.ollama_port = listeners[1].getsockname()[1]
        server = ChatServer(app, page_url(listeners[0], settings), on_ready, Watchdog())
        server.end_in = lambda seconds: faulthandler.dump_traceback_later(seconds, exit=True)
        server.run(sockets=listeners)


def listen(settings: Settings, port: int | None = None, option: str = "--port") -> socket.socket:
    """Return a listening socket. Raises AddressInUseError, which may suggest changing `option`."""
    port = settings.port if port is None else port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressInUseError(
            f"{settings.host} is not an address of this machine: {error.strerror}", host=settings.host, port=port
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise AddressInUseError(
            f"cannot listen on {settings.host}:{port}: {(error.strerror or 'refused').lower()};"
            f" choose another port with {option} (0 selects a free one)",
            host=settings.host,
            port=port,
        ) from error
    return listener


def page_url(listener: socket.socket, settings: Settings) -> str:
    """Return the page's URL for a browser on this machine."""
    port = listener.getsockname()[1]
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "[::]") else settings.host.strip("[]")
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class ChatServer(uvicorn.Server):
    """uvicorn server that finishes running work before it stops, and waits for events instead of polling."""

    def __init__(
        self,
        app: FastAPI,
        address: str,
        on_ready: Callable[[str], None] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._watchdog = watchdog
        # The module's function `serve` replaces `end_in` with faulthandler's timer. After `seconds`, the timer prints
        # tracebacks and kills the process, even if another thread holds the GIL.
        self.end_in: Callable[[float], None] = lambda seconds: None
        self._wakeup = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=ClientConnection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=IDLE_SECONDS,
                h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
                timeout_graceful_shutdown=int(EXTRA_EXIT_SECONDS),
            )
        )
        self._notso_app = app
        self._address = address
        self._on_ready = on_ready
        limit_log_rate()
        self._connection_limiter, self._pipeline = ConnectionLimiter(connection_limit()), RequestPipeline()
        self._stop_signal = 0
        self._stopping: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.start()
        try:
            await super().serve(sockets)
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        # The store is opened before the application starts, so that errors are reported without uvicorn's traceback.
        shared = self._notso_app.state.parts.shared
        await shared.store.open()
        try:
            if shared.accounts is not None:
                await shared.accounts.store.open()
        except BaseException:
            await shared.store.close()
            raise
        await super().startup([])  # no sockets, because uvicorn would accept any number of clients on them
        self._connection_limiter.open(sockets or [], self._create_connection)
        if self._on_ready is not None:
            self._on_ready(self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connection_limiter.close()
        self._notso_app.state.parts.chat.feed.close()  # otherwise, feed streams would never end
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        # uvicorn checks for a stop request ten times a second; this loop waits for an event instead. While clients are
        # connected, it also wakes every second, because each tick updates the Date header.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_timeout):
                    await self._wakeup.wait()
            self._wakeup.clear()

    @property
    def _tick_timeout(self) -> float | None:
        return DATE_SECONDS if self.server_state.connections else None

    @property
    def should_exit(self) -> bool:
        """Whether to stop at once. May be set from any thread or a signal handler."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        self._wake_main_loop()

    def _wake_main_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wakeup.set)

    def _create_connection(self) -> ClientConnection:
        if not self.server_state.connections:  # main_loop was idle, so the Date header is outdated
            date = formatdate(time.time(), usegmt=True).encode()
            self.server_state.default_headers = [(b"date", date), *self.config.encoded_headers]
            self._wakeup.set()
        return ClientConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            limiter=self._connection_limiter,
            pipeline=self._pipeline,
            send_seconds=self._notso_app.state.parts.shared.settings.send_timeout_seconds,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn handles only SIGINT and SIGTERM. If SIGHUP is ignored, as under nohup, it stays ignored.
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            is_handled = before is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
            if is_handled:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if is_handled:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stop_signal and sig == signal.SIGHUP:  # a shell may repeat SIGHUP when its terminal is closed
            return
        # A second signal stops the server at once. This is safe, because acknowledged data is already on disk.
        settings = self._notso_app.state.parts.shared.settings
        if self._stop_signal:
            self.end_in(LAST_RESORT_SECONDS)
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # suppress tracebacks of canceled tasks
        else:
            self.end_in(settings.leave_seconds + settings.drain_seconds + LAST_RESORT_SECONDS)
        self._stop_signal = sig
        self._wake_main_loop()

    async def on_tick(self, counter: int) -> bool:
        if self._stop_signal and self._stopping is None:
            cause = signal.Signals(self._stop_signal).name
            self._stopping = asyncio.create_task(drain_work(self._notso_app.state.parts, cause))
            self._stopping.add_done_callback(lambda _: self._wake_main_loop())
        if self._stopping is not None and self._stopping.done():
            self.should_exit = True
        return await super().on_tick(counter)


MOST_PER_WINDOW = 20
WINDOW_SECONDS = 60.0
"""Twenty records of a kind (same logger and message template) per minute suffice for diagnosis; unlimited logs could
fill the disk."""
MAX_KINDS = 256
CAUSED_BY_CLIENTS = ("asyncio", "uvicorn", "notso")
"""Loggers that log in response to client requests, and are therefore limited. Their children are included."""


class LogRateLimit(logging.Filter):
    """Log filter that passes up to MOST_PER_WINDOW records of each kind per window."""

    # The first record of the next window reports the number of dropped records.

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # kind -> (start of its window, record count)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".", 1)[0] not in CAUSED_BY_CLIENTS:
            return True
        now, kind = self._clock(), (record.name, str(record.msg))
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= WINDOW_SECONDS:
            if count > MOST_PER_WINDOW:
                record.msg = f"{record.msg} (and {count - MOST_PER_WINDOW} more of this kind)"
            began, count = now, 0
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = began, count + 1
        return count < MOST_PER_WINDOW


def limit_log_rate() -> None:
    # A logger's filter does not apply to the records of child loggers, so the filter is added to the handlers.
    for name in ("", *CAUSED_BY_CLIENTS):
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(each, LogRateLimit) for each in handler.filters):
                handler.addFilter(LogRateLimit())
