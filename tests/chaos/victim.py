"""A server in its own process to attack, and a witness that measures how the server treats an ordinary user
meanwhile."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from scripted_engine import IMPORTABLE

from notso.web.sign_in.issued_keys import KeyManager
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.store.sqlite.store import READ_THREADS
from notso.web.values.ids import new_id

PROGRAM = (
    f"{IMPORTABLE}\n"
    """
import gc
import json
import logging
import sys
from pathlib import Path
from scripted_engine import IMPORTABLE, say, ScriptedEngine
from notso.web.server import serve
from notso.web.values.settings import Settings

logging.basicConfig(level=logging.INFO)
settings = json.loads(sys.argv[2])
pace_seconds = settings.pop("pace_seconds", 0.0)

def script(messages, thinking):
    yield from say(messages[-1].content, piece=4096)

def load():
    return ScriptedEngine(script, pace_seconds=pace_seconds)

{more}

def ready(url):
    gc.freeze()  # as `notso serve` does
    print(url, flush=True)

serve(load, Settings(port=0, data_dir=Path(sys.argv[1]), **settings), on_ready=ready)
"""
)
"""The engine echoes the question at once, so a client controls what is rendered, saved and streamed."""

ANSWERED = 'data-state="done"'


DEMO = """
def load():
    from notso.smollm3 import Engine
    return Engine.load(context_tokens=2048, max_num_seqs=16, threads=2)
"""
"""A value for `more`: the real engine with the demo model."""


def new_key(directory: Path, name: str, *, is_operator: bool = False) -> dict[str, str]:
    """Create a key for the server with this data directory; return the request header that presents it."""
    secret, _ = KeyManager(lambda: SQLiteAccessStore(directory)).add(name, is_operator=is_operator)
    return {"Authorization": f"Bearer {secret}"}


class Victim:
    """A server to attack.

    `more` is source text that runs before the start and may replace `script`, `load` and `settings`. `settings` are web
    settings, and `pace_seconds` of the scripted engine. `environment` extends the environment. The client sends
    `headers`, for example with a key. The log is a file, as in production, because its growth is measured too.
    """

    def __init__(
        self,
        directory: Path,
        more: str = "",
        environment: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.headers = dict(headers or {})
        self.log = directory.with_name(directory.name + ".log")
        program = PROGRAM.replace("{more}", more)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, str(directory), json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | dict(environment or {}),
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, f"the server did not start: {self.log.read_text()[-2000:]}"
        self.port = int(self.url.rstrip("/").rpartition(":")[2])
        self.pid = self.process.pid
        self.client = httpx.Client(base_url=self.url, timeout=120, headers=self.headers)

    def ask(self, text: str, chat: str = "/chats") -> str:
        """Send a message and return the path of its chat."""
        path = chat if chat == "/chats" else f"{chat}/messages"
        answer = self.client.post(path, data={"text": text, "key": new_id()})
        assert answer.status_code == 303, answer.text[:500]
        return str(answer.headers["location"])

    def wait_for(self, text: str, path: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.client.get(path).text:
            assert time.monotonic() < deadline, f"{path} does not show {text!r}"
            time.sleep(0.05)

    def connect(self, receive_buffer_bytes: int | None = None) -> socket.socket:
        """Open a plain connection. A small receive buffer lets the server's output back up early."""
        client = socket.socket()
        if receive_buffer_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        client.settimeout(60)
        client.connect(("127.0.0.1", self.port))
        return client

    def memory_mb(self) -> float:
        """Return the process's private memory, resident or swapped out, without pages of files."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+)", status, re.MULTILINE)) / 1024

    def descriptors(self) -> int:
        """Count open descriptors; count those of the database as if all its readers were open.

        Readers are opened when reads first overlap, which depends on load.
        """
        names = self.descriptor_names()
        of_database = sum(count for name, count in names.items() if "/notso.db" in name)
        return names.total() - of_database + max(of_database, 3 * (READ_THREADS + 1))

    def descriptor_names(self) -> Counter[str]:
        """Count descriptors by target, with digits removed."""
        names: Counter[str] = Counter()
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                names[re.sub(r"\d+", "", str(entry.readlink()))] += 1
        return names

    def threads(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/task").iterdir())

    def log_mb(self) -> float:
        return self.log.stat().st_size / 1e6

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Visits:
    """Durations of one kind of request, each on its own connection."""

    milliseconds: list[float] = field(default_factory=list)
    failed: int = 0

    def percentile(self, share: float) -> float:
        """Return a percentile in milliseconds. A failed request counts as infinitely slow."""
        ranked = sorted(self.milliseconds) + [float("inf")] * self.failed
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


class Witness:
    """Requests `/livez` and a page of its own chat repeatedly, and measures the server's memory.

    Usage: `with Witness(victim) as witness:` around the attack; the figures are available afterwards.
    """

    def __init__(self, victim: Victim, pause_seconds: float = 0.05) -> None:
        self._victim = victim
        self._pause = pause_seconds
        self._chat = victim.ask("a chat that has nothing to do with the attack")
        victim.wait_for(ANSWERED, self._chat)
        self.livez, self.page = Visits(), Visits()
        self.memory_before_mb = self.memory_peak_mb = victim.memory_mb()
        self.log_before_mb = victim.log_mb()
        self.descriptors_peak = 0
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._visit, args=("/livez", self.livez), daemon=True),
            threading.Thread(target=self._visit, args=(self._chat, self.page), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]

    def __enter__(self) -> Witness:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def figures(self) -> dict[str, float]:
        return {
            "page p99 ms": self.page.percentile(0.99),
            "livez p99 ms": self.livez.percentile(0.99),
            "livez max ms": self.livez.percentile(1.0),
            "memory rise MB": self.memory_peak_mb - self.memory_before_mb,
            "log MB": self._victim.log_mb() - self.log_before_mb,
        }

    def _visit(self, path: str, visits: Visits) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._victim.port, timeout=60)
            try:
                connection.request("GET", path, headers=self._victim.headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    visits.milliseconds.append(1000 * (time.monotonic() - began))
                else:
                    visits.failed += 1
            except (OSError, http.client.HTTPException):
                visits.failed += 1
            finally:
                connection.close()
            self._over.wait(self._pause)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.memory_peak_mb = max(self.memory_peak_mb, self._victim.memory_mb())
            self.descriptors_peak = max(self.descriptors_peak, self._victim.descriptors())
