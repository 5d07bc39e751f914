"""Fixtures for tests of several layers: a fake Hugging Face Hub, and an isolated home folder."""

from __future__ import annotations

import os

# Idle threads of numpy's BLAS spin, which takes CPU time from other workers. numpy reads this when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc
import hashlib
import http.server
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import due_files
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from long_tests import is_long, thinned

from notso.smollm3.hub import registry as hub
from notso.system.confinement import ConfinedProcess, Limits

# A background job of a shell ignores Ctrl-C, and the programs that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Slowness of a busy machine is not a failure. Examples are the same in each run, except in `make fuzz`.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="FUZZ_SECONDS" not in os.environ,
)
settings.load_profile("unhurried")


# Collection creates a million objects and almost no garbage; the garbage collector would take a sixth of its time.
gc.disable()

SECONDS = Path(__file__).with_name("seconds.json")


class FileResults:
    """Outcome and seconds of each test file, collected in the process that all workers report to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.failed:
            self.failed.add(file)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            due_files.record(self.seconds, self.failed)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.pop("TESTS_PLANNED", ""):  # only in the main process, and not in pytest runs that tests start
        config.pluginmanager.register(FileResults())


SYNTAX = ("growth", "house_rules", "rooms", "system_layer", "walls")
"""Files of tests/architecture that use the syntax trees of all modules, which take two seconds to parse."""


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the files in SYNTAX in one worker, so that modules are parsed once, and the few browser tests that run by
    default, so that one browser is started."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if Path(file).stem.removeprefix("test_") in SYNTAX and "/architecture/" in file:
                return "syntax"
            return "browser" if "/browser/" in file and not is_long("page") else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long tests unless LONG names their group, and sort the tests. Workers begin with the browser tests and then
    the files that take longest, so that no worker is left with a long one at the end."""
    seconds = due_files.read(SECONDS) if hasattr(config, "workerinput") else {}
    files = [item.nodeid.partition("::")[0] for item in items]
    rank = {file: ("/browser/" not in file, -seconds.get(file, 0), file) for file in {*files}}  # equal in all workers
    items.sort(key=lambda item: rank[item.nodeid.partition("::")[0]])
    marked = {item.nodeid for item in items if item.get_closest_marker("long")}
    group_of = thinned((item.nodeid for item in items), marked)
    for item in items:
        if group := group_of.get(item.nodeid):
            item.add_marker(pytest.mark.long(group))
        for marker in item.iter_markers("long"):
            if not any(map(is_long, marker.args)):
                reason = f"takes minutes: make test-long, or LONG={marker.args[0]}; make check runs it when it is due"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Let workers send one message about a passed test instead of five, which would take a third of the time of a short
    test in the worker and in the main process."""
    if not hasattr(item.config, "workerinput"):
        return None
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if all(report.passed for report in reports):
        reports[1].duration = sum(report.duration for report in reports)
        reports = reports[1:2]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude what a finished file leaves behind from garbage collection, which would visit it in all later tests."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def unhurried_children() -> Iterator[None]:
    """Give confined children an hour instead of seconds; their CPU time stays limited. Tests of this limit set it to
    less than a second."""
    start = ConfinedProcess.__init__

    def start_unhurried(self: ConfinedProcess, arguments: Sequence[str], request: bytes, limits: Limits) -> None:
        start(self, arguments, request, limits if limits.wall_s < 1 else replace(limits, wall_s=3600))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfinedProcess, "__init__", start_unhurried)
        yield


@dataclass
class FakeHub:
    """Serves a file as the Hub does, with configurable faults. The settings may be changed between requests."""

    content: bytes
    url: str = ""
    offered_size: int | None = None  # size in answers to HEAD, if wrong
    offered_etag: str | None = None
    statuses: list[int] = field(default_factory=list)  # each GET pops the first and returns only this status
    cuts: list[int] = field(default_factory=list)  # each GET pops the first and disconnects after that many bytes
    knows_ranges: bool = True
    extra: bytes = b""  # sent after the content, contrary to Content-Length
    bytes_per_second: float = 0.0
    trickles_from: int | None = None  # from this byte on, the download takes minutes, so that tests can observe it
    redirect_to: str = ""
    listing: bytes = b""  # answer about the files of a repository; empty for none
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # method and Range
    tokens: list[str | None] = field(default_factory=list)  # Authorization of each GET

    @property
    def gets(self) -> list[str | None]:
        return [wanted for method, wanted in self.requests if method == "GET"]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.hub.requests.append(("HEAD", None))
        size = len(self.hub.content) if self.hub.offered_size is None else self.hub.offered_size
        etag = self.hub.offered_etag or hashlib.sha256(self.hub.content).hexdigest()
        if self.hub.redirect_to:
            self.send_response(302)
            self.send_header("Location", self.hub.redirect_to + self.path)
            self.send_header("X-Linked-Size", str(size))
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("Content-Length", "0")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", "f" * 40)
        self.end_headers()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            self._list()
            return
        if "/resolve/" not in self.path:  # a test may send requests to a server that used this port before
            self._answer(404)
            return
        wanted = self.headers.get("Range")
        self.hub.requests.append(("GET", wanted))
        self.hub.tokens.append(self.headers.get("Authorization"))
        if self.hub.redirect_to:
            self._answer(302, Location=self.hub.redirect_to + self.path)
            return
        if self.hub.statuses:
            self._answer(self.hub.statuses.pop(0))
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.hub.knows_ranges else 0
        total = len(self.hub.content)
        if start >= total:
            self._answer(416)
            return
        body = self.hub.content[start:] + self.hub.extra
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        if self.hub.cuts:
            body = body[: self.hub.cuts.pop(0)]
            self.close_connection = True
        at = 0
        while at < len(body):
            trickles = self.hub.trickles_from is not None and start + at >= self.hub.trickles_from
            size, pace = (512, 25_000) if trickles else (65536, self.hub.bytes_per_second)
            self.wfile.write(body[at : at + size])
            at += size
            if pace:
                time.sleep(size / pace)

    def _list(self) -> None:
        self.hub.requests.append(("LIST", self.path))
        if not self.hub.listing:
            self._answer(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.hub.listing)))
        self.end_headers()
        self.wfile.write(self.hub.listing)

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _serve(hub_state: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub_state})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # clients disconnect early
    hub_state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield hub_state
    server.shutdown()
    server.server_close()


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Isolate the test's home, cache and data folder, and remove NOTSO_ and HF_ variables."""
    for name in list(os.environ):
        if name.startswith(("NOTSO_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OLLAMA_", "LLAMA_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    for name, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("XDG_DATA_HOME", "data"), ("HF_HOME", "hf")):
        monkeypatch.setenv(name, str(home / folder))
    return home


@pytest.fixture
def fake_hub(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run a Hub with one file of three megabytes, at the address in HF_ENDPOINT."""
    for state in _serve(FakeHub(random.Random(5).randbytes(3_000_000))):
        monkeypatch.setenv("HF_ENDPOINT", state.url)
        yield state


@pytest.fixture
def other_host(fake_hub: FakeHub) -> Iterator[FakeHub]:
    """Serve the same file from another host, as a content delivery network does."""
    yield from _serve(FakeHub(fake_hub.content))


@pytest.fixture
def official_file(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> hub.KnownFile:
    """Replace the official files with the file of `fake_hub`."""
    file = hub.KnownFile(
        name="small:Q4_K_M",
        repository="somebody/Small-GGUF",
        revision="0123456789" * 4,
        filename="SmolLM3-Small-Q4_K_M.gguf",
        size_bytes=len(fake_hub.content),
        sha256=hashlib.sha256(fake_hub.content).hexdigest(),
    )
    monkeypatch.setattr(hub, "KNOWN_FILES", (file,))
    return file
