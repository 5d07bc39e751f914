"""Fixtures: servers in their own processes, for clients that are installed in other environments than the server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SERVER_PYTHON = os.environ.get("NOTSO_PYTHON", str(HERE.parents[1] / ".venv/bin/python"))
NOTSO = [SERVER_PYTHON, "-c", "import sys; from notso.cli import main; sys.exit(main(sys.argv[1:]))"]
SERVE = ("serve", "--port", "0", "--no-browser", "--threads", "1")
SMALL = ("--layers", "2", "--hidden", "256", "--ffn", "256", "--heads", "4", "--kv", "1", "--vocab", "4096")
MODEL = {"scripted": "scripted", "demo": "notso-demo"}


def _running(command: list[str]) -> Iterator[str]:
    """Start a server and yield its address, without the last slash, when it can answer."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    assert process.stdout is not None
    try:
        found = next(filter(None, (re.search(r"http://\S+", line) for line in process.stdout)), None)
        assert found, "the server ended before it was ready"
        address = found[0].rstrip("/")
        _wait_until_loaded(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_loaded(address: str, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health").close()
            return
        except urllib.error.HTTPError:
            time.sleep(0.02)
    raise AssertionError("the server ended while it loaded its model")


@pytest.fixture(scope="session")
def server_python() -> str:
    """Return the Python in which the server is installed."""
    return SERVER_PYTHON


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with scripted answers (see scripted_server)."""
    data = str(tmp_path_factory.mktemp("scripted"))
    yield from _running([SERVER_PYTHON, str(HERE / "scripted_server.py"), data])


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with the demo model."""
    data = str(tmp_path_factory.mktemp("demo"))
    yield from _running([*NOTSO, *SERVE, "--data-dir", data])


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with a small random model, which processes long prompts quickly."""
    folder = tmp_path_factory.mktemp("small")
    subprocess.run([*NOTSO, "synth", str(folder / "small.gguf"), *SMALL], check=True, capture_output=True)
    context = ("--context", "40000")
    yield from _running([*NOTSO, *SERVE, *context, "--data-dir", str(folder), "--model", str(folder / "small.gguf")])


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the machine's settings for clients, and disable telemetry."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "LANGSMITH_", "LLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
