"""kill -9 in the middle of an answer: it goes on by itself, and one that a user stopped can be written on."""

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
    """A server in a process of its own."""

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
        """State and text of the only answer, as the page has them."""
        page = self.client.get(chat).text
        state = re.findall(r'<article class="turn assistant"[^>]*data-state="(\w+)"', page)[0]
        text = re.findall(r'-answer-closed">(.*?)</div>', page, re.DOTALL)[0]
        return state, " ".join(re.sub(r"<[^>]*>", "", text).split())


def on_disk(directory: Path) -> str:
    """The answer as far as it is saved; the page may be a second ahead."""
    with closing(sqlite3.connect(f"{(directory / 'notso.db').as_uri()}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT content FROM messages WHERE role = 'assistant'").fetchone()
    return " ".join(found[0].split()) if found else ""


def wait(look: Callable[[], T]) -> T:
    """What `look` finds, once it finds something."""
    deadline = time.monotonic() + 90  # the machine may be busy
    while not (found := look()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "data"


def test_a_killed_server_has_the_part_and_goes_on(directory: Path) -> None:
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
        wait(lambda: len(server.answer(chat)[1]) > len(saved))  # it goes on by itself
        server.client.post(f"/generations/{generation}/stop")
        wait(lambda: server.answer(chat)[0] == "stopped")
        text = server.answer(chat)[1]
        assert text.startswith(saved) and set(text.split()) == {"word"}
    finally:
        server.kill()
    server = Served(directory)
    try:
        assert server.answer(chat) == ("stopped", text), "a stopped answer stays as it is"
        page = server.client.get(chat).text
        assert "a thought" in page
        url = re.findall(rf'action="({chat}/messages/[^"]*/continue)"', page)[0]
        assert server.client.post(url, data={"key": new_id()}).status_code == 303
        wait(lambda: server.answer(chat)[0] == "done")
        assert server.answer(chat)[1] == text + " And the rest."
    finally:
        server.kill()
