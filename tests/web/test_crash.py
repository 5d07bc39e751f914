"""kill -9 in the middle of an answer: the next server resumes it, and an answer that a user stopped can be
continued."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from scripted_engine import IMPORTABLE

from notso.web.values.ids import new_id

T = TypeVar("T")

SERVER = (
    f"{IMPORTABLE}\n"
    """
import sys
from pathlib import Path
from scripted_engine import ScriptedEngine, say
from notso.web.server import serve
from notso.web.values.settings import Settings

def script(messages, thinking):
    if messages[-1].role == "assistant":
        yield from say(" And the rest.")
    else:
        yield from say("word " * 100_000, "a thought", piece=5)

settings = Settings(port=0, data_dir=Path(sys.argv[1]))
serve(lambda: ScriptedEngine(script, pace_seconds=0.01), settings, on_ready=lambda url: print(url, flush=True))
"""
)


class Served:
    """A server in its own process."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(directory)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.client = httpx.Client(base_url=self.process.stdout.readline().strip(), timeout=30)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self.client.close()

    def answer(self, chat: str) -> tuple[str, str]:
        """Return the state and text of the only answer, as the page shows them."""
        page = self.client.get(chat).text
        state = re.findall(r'<article class="turn assistant"[^>]*data-state="(\w+)"', page)[0]
        text = re.findall(r'-answer-closed">(.*?)</div>', page, re.DOTALL)[0]
        return state, " ".join(re.sub(r"<[^>]*>", "", text).split())


def on_disk(directory: Path) -> str:
    """Return the answer as saved so far; the page may be up to a second ahead."""
    with closing(sqlite3.connect(f"{(directory / 'notso.db').as_uri()}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT content FROM messages WHERE role = 'assistant'").fetchone()
    return " ".join(found[0].split()) if found else ""


def wait(look: Callable[[], T]) -> T:
    """Call `look` until it returns something true, and return that."""
    deadline = time.monotonic() + 90  # generous, because the machine may be busy
    while not (found := look()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "data"


def test_answer_resumes_after_kill_and_stopped_answer_can_be_continued(directory: Path) -> None:
    server = Served(directory)
    try:
        answer = server.client.post("/chats", data={"text": "Go", "key": new_id(), "thinking": "on"})
        chat = answer.headers["location"]
        wait(lambda: server.answer(chat)[1])
        saved = wait(lambda: on_disk(directory))
    finally:
        server.kill()
    server = Served(directory)
    try:
        generation = re.findall(r"/generations/([^/]*)/events", server.client.get(chat).text)[0]
        wait(lambda: len(server.answer(chat)[1]) > len(saved))  # the answer resumes without a request
        server.client.post(f"/generations/{generation}/stop")
        wait(lambda: server.answer(chat)[0] == "stopped")
        text = server.answer(chat)[1]
        assert text.startswith(saved) and set(text.split()) == {"word"}
    finally:
        server.kill()
    server = Served(directory)
    try:
        assert server.answer(chat) == ("stopped", text), "a stopped answer is not resumed"
        page = server.client.get(chat).text
        assert "a thought" in page
        url = re.findall(rf'action="({chat}/messages/[^"]*/continue)"', page)[0]
        assert server.client.post(url, data={"key": new_id()}).status_code == 303
        wait(lambda: server.answer(chat)[0] == "done")
        assert server.answer(chat)[1] == text + " And the rest."
    finally:
        server.kill()
