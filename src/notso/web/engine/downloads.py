"""Download models while the server runs, one at a time, in a thread.

A download continues when the browser tab that started it is closed. If it stops, fails, or is interrupted by a restart,
the received data stays on disk unless its hash is wrong. The next download of the same file resumes from this data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from notso.smollm3 import DownloadError, KnownFile, pull
from notso.web.engine.host import EngineHost
from notso.web.engine.model_names import register_installed
from notso.web.engine.models import InstalledModel, ModelRegistry, scan_models
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.models")

Phase = Literal["checking", "downloading", "stopping", "stopped", "failed", "done"]

RATE_SECONDS = 5.0  # time over which the displayed rate is averaged
_SAMPLE_SECONDS = 0.25

Pull = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Download:
    """Snapshot of a download. `bytes_per_s` is None if unknown."""

    file: KnownFile
    phase: Phase
    done_bytes: int = 0
    bytes_per_s: float | None = None
    failure: str = ""

    @property
    def active(self) -> bool:
        return self.phase in ("checking", "downloading", "stopping")

    @property
    def percent(self) -> int:
        return 100 * self.done_bytes // self.file.size_bytes

    @property
    def seconds_left(self) -> float | None:
        remaining_bytes = self.file.size_bytes - self.done_bytes
        return remaining_bytes / self.bytes_per_s if self.bytes_per_s else None


class Downloads:
    """Starts, stops and reports downloads. Thread-safe; only `close` blocks."""

    def __init__(self, pull: Pull = pull) -> None:
        self._pull = pull
        self._lock = threading.Lock()
        self._current: Download | None = None
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None
        # Set if the download is requested again while it is stopping: it then restarts with this `on_downloaded`.
        self._restart: Callable[[], None] | None = None

    @property
    def current(self) -> Download | None:
        return self._current

    def start(self, file: KnownFile, on_downloaded: Callable[[], None] = lambda: None) -> bool:
        """Start or resume a download. Return False if another file is being downloaded."""
        # `on_downloaded` is called in the download's thread, before the phase becomes "done".
        with self._lock:
            if self._current is not None and self._current.active:
                if self._current.file == file and self._current.phase == "stopping":
                    self._restart = on_downloaded
                    self._current = replace(self._current, phase="checking")
                return self._current.file == file
            self._start(file, on_downloaded)
            return True

    def _start(self, file: KnownFile, on_downloaded: Callable[[], None]) -> None:
        stop_requested = threading.Event()
        run = _Run(self, file, stop_requested, on_downloaded)
        thread = threading.Thread(target=run.run, name="notso-download", daemon=True)
        thread.start()  # first, because nothing must change if this raises RuntimeError for lack of threads
        self._thread, self._stop_requested, self._current = thread, stop_requested, Download(file, "checking")

    def _on_end(self, end: Download) -> None:
        with self._lock:
            self._current = end
            restart, self._restart = self._restart, None
            if restart is not None and end.phase == "stopped":
                try:
                    self._start(end.file, restart)
                except RuntimeError as error:
                    self._current = replace(end, phase="failed", failure=str(error))

    def stop(self) -> None:
        """Request a stop. The received data stays on disk."""
        with self._lock:
            if self._current is not None and self._current.active:
                self._stop_requested.set()
                self._restart = None
                self._current = replace(self._current, phase="stopping", bytes_per_s=None)

    def close(self, seconds: float) -> None:
        # A download that does not stop in time ends with the process. It can still be resumed later.
        self.stop()
        if self._thread is not None:
            self._thread.join(seconds)


class _DownloadStopped(Exception):
    pass


class _Run:
    def __init__(
        self, downloads: Downloads, file: KnownFile, stop_requested: threading.Event, on_downloaded: Callable[[], None]
    ) -> None:
        self._on_downloaded = on_downloaded
        self._downloads = downloads
        self._file = file
        self._stop_requested = stop_requested
        self._samples: deque[tuple[float, int]] = deque()

    def run(self) -> None:
        end = Download(self._file, "done", self._file.size_bytes)
        try:
            self._downloads._pull(self._file, progress=self._progress, sleep=self._sleep)
            self._on_downloaded()
        except _DownloadStopped:
            end = replace(end, phase="stopped", done_bytes=self._done_bytes)
        except DownloadError as error:
            end = replace(end, phase="failed", done_bytes=self._done_bytes, failure=error.sentence)
        except Exception:
            logger.exception("a download failed")
            failure = "internal error; see the server's log"
            end = replace(end, phase="failed", done_bytes=self._done_bytes, failure=failure)
        self._downloads._on_end(end)

    @property
    def _done_bytes(self) -> int:
        return self._samples[-1][1] if self._samples else 0

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._stop_requested.is_set():
            raise _DownloadStopped
        now = time.monotonic()
        if self._samples and now - self._samples[-1][0] < _SAMPLE_SECONDS and done < total:
            return
        if what != "downloading" or (self._samples and done < self._samples[-1][1]):
            self._samples.clear()  # checking the data on disk, or receiving it again, would distort the displayed rate
        self._samples.append((now, done))
        while now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        rate = (after - before) / (last - first) if last - first >= 1 else None
        phase: Phase = "downloading" if what == "downloading" else "checking"
        with self._downloads._lock:
            if not self._stop_requested.is_set():
                self._downloads._current = Download(self._file, phase, done, rate)

    def _sleep(self, seconds: float) -> None:
        if self._stop_requested.wait(seconds):
            raise _DownloadStopped


PATIENCE_SECONDS = 10.0
"""Maximum time for which a finished download waits for a busy event loop. Without the wait, the page might show the
download as done before its model starts loading."""


def create_switch_callback(host: EngineHost, registry: ModelRegistry | None, file: KnownFile) -> Callable[[], None]:
    """Return a callback that replaces the demo model, if it is the default, with the downloaded `file`."""
    # Call this function on the event loop, but the callback in another thread: the callback waits for the loop.
    loop = asyncio.get_running_loop()
    if registry is None:
        return lambda: None

    async def switch(chosen: InstalledModel) -> None:
        host.switch_when_loaded(register_installed(host, registry, chosen))

    def on_downloaded() -> None:
        chosen = _find_replacement(host, registry, file)
        if chosen is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # raised if the loop is closed or busy
                asyncio.run_coroutine_threadsafe(switch(chosen), loop).result(PATIENCE_SECONDS)

    return on_downloaded


def _find_replacement(host: EngineHost, registry: ModelRegistry, file: KnownFile) -> InstalledModel | None:
    inventory = scan_models(host.default.info, registry.folder)
    chosen = inventory.find(file.name)
    if chosen is None or not any(each.in_use and each.path is None for each in inventory.installed):
        return None
    try:
        if registry.check is not None:
            registry.check(chosen.path)
    except (NotsoError, OSError) as error:
        logger.warning("still using the demo model: %s", error)
        return None
    return chosen
