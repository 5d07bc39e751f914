"""`notso serve` in its own process is killed with SIGKILL mid-answer; the browser then shows the resumed answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import pytest
from browser.conversation import answers, ask, begin, finished, last_answer
from playwright.sync_api import Page, expect

PACE_S = 0.06  # the demo model alone would finish before the kill
SERVE = """
import sys, time
from notso.smollm3.engine.engine_core import EngineCore
step, pace = EngineCore._step, float(sys.argv.pop(1))
def slow_step(core):
    time.sleep(pace)
    step(core)
EngineCore._step = slow_step
from notso.cli import main
sys.argv = ["notso", *sys.argv[1:]]
main()
"""


class Process:
    """`notso serve` with the demo model."""

    def __init__(self, folder: Path, port: int, pace_s: float) -> None:
        folder.mkdir(exist_ok=True)
        homes = {"HOME": str(folder), "XDG_DATA_HOME": "", "XDG_CACHE_HOME": "", "HF_HOME": str(folder / "hf")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NOTSO_")}
        options = ["serve", "--no-browser", "--plain", "--port", str(port), "--data-dir", str(folder / "data")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(pace_s), *options], env=kept | homes, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


def unused_port() -> int:
    """Return a port below the ephemeral range, so that no other process gets it while the server is down."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", SystemRandom().randrange(20_000, 32_000)))
            return int(free.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Process]]]:
    """Return a function that starts the server, always with the same port and folder."""
    port = unused_port()
    started: list[Process] = []

    def begin_process(pace_s: float = 0) -> tuple[str, Process]:
        started.append(Process(tmp_path, port, pace_s))
        return f"http://127.0.0.1:{port}/", started[-1]

    yield begin_process
    for process in started:
        process.kill()


def test_answer_is_resumed_identically_after_kill_and_restart(
    start: Callable[..., tuple[str, Process]], open_page: Callable[..., Page], picture: Callable[..., None]
) -> None:
    url, process = start(PACE_S)
    page = open_page(
        url, expected="htmx:sse:error|ERR_CONNECTION|ERR_INCOMPLETE|ERR_NETWORK|Failed to fetch|htmx:error"
    )
    ask(page, "/temp 0")
    expect(page.locator("#toasts")).to_contain_text("Temperature 0")
    ask(page, "Tell me a story")
    page.wait_for_url("**/chats/*")
    expect(last_answer(page).locator(".answer")).to_contain_text("Once there was a small model")
    saved = ""
    while not saved:  # the stored text is about a second behind the page
        page.wait_for_timeout(100)
        exported = page.request.get(f"{page.url}/export/json").json()
        saved = exported["chats"][0]["messages"][-1]["content"].strip()
    process.kill()
    expect(page.locator("#status .reconnecting")).to_be_visible()
    picture(page, "gone")

    start()
    expect(last_answer(page).locator(".answer")).to_contain_text("The end.")
    finished(page)
    expect(last_answer(page).locator(".reasoning summary")).to_contain_text(re.compile("Reasoning|Thought"))
    whole = last_answer(page).locator(".answer").inner_text().strip()
    assert whole.startswith(saved) and whole.count("Once there was") == 1

    page.get_by_role("link", name="New chat").click()
    begin(page, "Tell me a story")
    assert last_answer(page).locator(".answer").inner_text().strip() == whole, "as if there had been no interruption"
    expect(answers(page)).to_have_count(1)
