"""`notso serve` as a process: its output, readiness, shutdown, and errors at startup."""

from __future__ import annotations

import json
import queue
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notso.cli import serve
from notso.smollm3.values.engine_config import EngineConfig
from notso.web.values.settings import Settings

# Two seconds are allowed until the address is printed. Limit the run's CPU time to this multiple of a
# Python that only imports the libraries, so that a slow or busy machine has no effect.
START_IMPORTS = 5

Process = Callable[..., "subprocess.Popen[bytes]"]


def address(run: subprocess.Popen[bytes]) -> str:
    """Return the address that a server prints; assert that preceding lines are as expected."""
    assert run.stdout is not None
    lines = []
    for raw in run.stdout:
        lines.append(raw.decode())
        if raw.startswith(b"open "):
            assert [line.split()[0] for line in lines] == ["model", "memory", "device", "open"]
            return lines[-1].split()[1]
    assert run.stderr is not None
    raise AssertionError(f"exited with {run.wait()}: {run.stderr.read().decode()}")


def wait_until_healthy(url: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url + "health", timeout=30) as reply:
                told: dict[str, Any] = json.loads(reply.read())
                return told
        except urllib.error.HTTPError:
            time.sleep(0.05)  # still loading the model
    raise AssertionError("the server did not become healthy")


@pytest.fixture
def start(process: Process, small_model: Path, own_home: Path) -> Iterator[Process]:
    running: list[subprocess.Popen[bytes]] = []

    def launch(*options: str, **more: Any) -> subprocess.Popen[bytes]:
        run = process("serve", "--model", str(small_model), "--no-browser", "--threads", "1", *options, **more)
        running.append(run)
        return run

    yield launch
    for run in running:
        if run.poll() is None:
            run.kill()
        run.communicate()


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def imports_seconds() -> float:
    """Return the CPU seconds of a Python that imports the libraries of a server."""
    before = children_seconds()
    subprocess.run([sys.executable, "-c", "import fastapi, uvicorn, numpy, tokenizers, jinja2, typer"], check=True)
    return children_seconds() - before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_starts_quickly_and_exits_cleanly_on_signals(
    start: Process, imports_seconds: float, number: signal.Signals
) -> None:
    before = children_seconds()
    run = start("--port", "0")
    url = address(run)
    assert url.startswith("http://127.0.0.1:")
    told = wait_until_healthy(url)
    assert told["model"] == "Random weights in the shapes of SmolLM3"

    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0
    assert b"Traceback" not in err
    assert children_seconds() - before < START_IMPORTS * imports_seconds


def test_json_option_prints_startup_events(start: Process, small_model: Path) -> None:
    run = start("--port", "0", "--json", "--context", "64")
    assert run.stdout is not None
    starting, opened = json.loads(run.stdout.readline()), json.loads(run.stdout.readline())
    assert starting["event"] == "starting" and starting["model"] == str(small_model) and not starting["is_demo"]
    assert starting["context_tokens"] == 64 and starting["device"] == "cpu" and starting["kv"]
    assert 0 < starting["needed_bytes"] < starting["available_bytes"]
    assert opened["event"] == "open" and wait_until_healthy(opened["url"])
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    assert out == b"" and run.returncode == 0


def test_port_in_use_exits_with_code_6(start: Process) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = start("--port", str(taken.getsockname()[1]))
        _, err = run.communicate(timeout=60)

    assert run.returncode == 6
    assert b"another port with --port" in err
    assert err.count(b"\n") == 1


def test_missing_adapter_folder_is_reported(start: Process) -> None:
    _, err = start("--adapter-dir", "/none/such").communicate(timeout=60)
    assert b"--adapter-dir" in err and b"does not exist" in err


def test_public_host_without_api_key_exits_with_code_6(start: Process) -> None:
    run = start("--host", "0.0.0.0")
    _, err = run.communicate(timeout=60)

    assert run.returncode == 6
    assert b"--api-key-file" in err


def test_api_key_file_enables_authentication(start: Process, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key-of-more-than-16-letters\n")
    run = start("--port", "0", "--api-key-file", str(tmp_path / "key"))
    url = address(run)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url + "v1/models", timeout=30)

    assert caught.value.code == 401
    caught.value.close()


def test_data_directory_in_use_exits_with_code_5(start: Process, tmp_path: Path) -> None:
    first = start("--port", "0", "--data-dir", str(tmp_path / "data"))
    address(first)
    second = start("--port", "0", "--data-dir", str(tmp_path / "data"))
    _, err = second.communicate(timeout=60)

    assert second.returncode == 5
    assert b"--data-dir" in err
    assert first.poll() is None


def test_context_beyond_the_maximum_is_reduced(start: Process) -> None:
    run = start("--port", "0", "--context", "200000")
    assert run.stdout is not None
    lines = {}
    for raw in run.stdout:
        lines[raw.split()[0]] = raw
        if raw.startswith(b"open "):
            break
    assert b"(the maximum of this model)" in lines[b"memory"]
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 0


def test_summary_reports_reduced_context(small_model: Path, own_home: Path) -> None:
    memory = serve.startup_summary(small_model, EngineConfig(context_tokens=200_000)).lines[1]
    assert memory.startswith("memory ") and "(the maximum of this model)" in memory


def test_key_file_is_used_and_page_is_opened(
    notso: Callable[..., Any], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Settings] = []
    opened = queue.SimpleQueue[str]()

    def run(source: object, settings: Settings, *, on_ready: Callable[[str], None], **more: object) -> None:
        served.append(settings)
        on_ready("http://127.0.0.1:9/")

    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("notso.web.server.serve", run)
    monkeypatch.setattr(serve, "make_undumpable", lambda: None)  # it would concern the tests' process
    monkeypatch.setattr(webbrowser, "open", opened.put)
    (tmp_path / "key").write_text("a-key-of-more-than-16-letters\n")
    result = notso("serve", "--model", str(small_model), "--open", "--api-key-file", str(tmp_path / "key"))

    assert result.code == 0, result.err
    assert [each.api_key for each in served] == ["a-key-of-more-than-16-letters"]
    assert opened.get(timeout=60) == "http://127.0.0.1:9/"


@pytest.mark.parametrize(
    ("variables", "shown"), [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "wayland-0"}, True)]
)
def test_display_is_detected_from_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], shown: bool
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert serve.has_display() is shown


def test_open_option_opens_the_page(process: Process, small_model: Path, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    setup = f"import pathlib, webbrowser\nwebbrowser.open = lambda url: pathlib.Path({str(opened)!r}).write_text(url)"
    run = process("serve", "--model", str(small_model), "--port", "0", "--open", setup=setup)
    url = address(run)
    deadline = time.monotonic() + 60
    while not (opened.exists() and opened.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.terminate()
    run.communicate(timeout=60)

    assert opened.read_text() == url


def test_model_whose_path_is_not_utf8_is_refused(start: Process, small_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "mod\udce9l.gguf"
    model.symlink_to(small_model)
    run = start("--model", str(model))
    _, err = run.communicate(timeout=60)

    assert run.returncode == 2 and b"mod?l.gguf is not valid UTF-8: rename the file" in err
