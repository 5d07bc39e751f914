"""Fetching a model while the server runs: one at a time, in a thread, seen from any tab, stopped and resumed.

It belongs to the server: closing the tab changes nothing. What has arrived stays on the disk, so that a stop, a failure
or a restart of the server costs nothing but the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from notso.smollm3 import DownloadError, KnownFile, pull

logger = logging.getLogger("notso.web.models")

Phase = Literal["checking", "downloading", "stopping", "stopped", "failed", "done"]

RATE_SECONDS = 5.0  # the rate shown is that of so many last seconds
_SAMPLE_SECONDS = 0.25

Pull = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Download:
    """A download at one moment. Sizes in bytes; `bytes_per_s` and `seconds_left` are None until they can be told."""

    file: KnownFile
    phase: Phase
    done_bytes: int = 0
    bytes_per_s: float | None = None
    failure: str = ""

    @property
    def active(self) -> bool:
        """Whether something still goes on."""
        return self.phase in ("checking", "downloading", "stopping")

    @property
    def percent(self) -> int:
        """How much of the file is here; 100 only when all of it is."""
        return 100 * self.done_bytes // self.file.size_bytes

    @property
    def seconds_left(self) -> float | None:
        """At the rate of the last seconds."""
        left = self.file.size_bytes - self.done_bytes
        return left / self.bytes_per_s if self.bytes_per_s else None


class Downloads:
    """Starts, shows and stops downloads. Everything may be called from any thread and returns at once."""

    def __init__(self, pull: Pull = pull) -> None:
        self._pull = pull
        self._lock = threading.Lock()
        self._current: Download | None = None
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> Download | None:
        """The one that runs, or ended last."""
        return self._current

    def start(self, file: KnownFile, arrived: Callable[[], None] = lambda: None) -> bool:
        """Begin, or go on where it stopped. False while another one runs. `arrived` is called in the download's thread,
        before it is said to be done."""
        with self._lock:
            if self._current is not None and self._current.active:
                return self._current.file == file
            self._current = Download(file, "checking")
            self._stop_requested = threading.Event()
            run = _Run(self, file, self._stop_requested, arrived)
            self._thread = threading.Thread(target=run.run, name="notso-download", daemon=True)
            self._thread.start()
            return True

    def stop(self) -> None:
        """Ask it to end; what has arrived is kept."""
        with self._lock:
            if self._current is not None and self._current.active:
                self._stop_requested.set()
                self._current = replace(self._current, phase="stopping", bytes_per_s=None)

    def close(self, seconds: float) -> None:
        """The server goes away. What does not end in time ends with the process; the file can stand that."""
        self.stop()
        if self._thread is not None:
            self._thread.join(seconds)


class _Stop(Exception):
    """Leaves the transfer from within."""


class _Run:
    """One download, in its thread."""

    def __init__(
        self, downloads: Downloads, file: KnownFile, stop_requested: threading.Event, arrived: Callable[[], None]
    ) -> None:
        self._arrived = arrived
        self._downloads = downloads
        self._file = file
        self._stop_requested = stop_requested
        self._samples: deque[tuple[float, int]] = deque()

    def run(self) -> None:
        end = Download(self._file, "done", self._file.size_bytes)
        try:
            self._downloads._pull(self._file, progress=self._progress, sleep=self._sleep)
            self._arrived()
        except _Stop:
            end = replace(end, phase="stopped", done_bytes=self._done_bytes)
        except DownloadError as error:
            end = replace(end, phase="failed", done_bytes=self._done_bytes, failure=str(error))
        except Exception:
            logger.exception("a download failed")
            failure = "something went wrong inside; the server's log says more"
            end = replace(end, phase="failed", done_bytes=self._done_bytes, failure=failure)
        with self._downloads._lock:
            self._downloads._current = end

    @property
    def _done_bytes(self) -> int:
        return self._samples[-1][1] if self._samples else 0

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._stop_requested.is_set():
            raise _Stop
        now = time.monotonic()
        if self._samples and now - self._samples[-1][0] < _SAMPLE_SECONDS and done < total:
            return
        if what != "downloading" or (self._samples and done < self._samples[-1][1]):
            self._samples.clear()  # bytes read from the disk, or sent again, say nothing of the network
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
            raise _Stop
