"""Replicas over one PostgreSQL and one Valkey behind HAProxy, configured by deploy/haproxy.cfg: start, kill, replace.

Replicas are forked from a process that has imported everything, so a killed one is back at once. This imitates
separate machines although all replicas share one.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from scripted_engine import IMPORTABLE
from valkey_server import MISSING as NO_VALKEY
from valkey_server import PROGRAM as VALKEY
from valkey_server import ValkeyServer
from web.store.postgres_server import postgres_server

ROOT = Path(__file__).parents[2]
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
NO_HAPROXY = "haproxy is not installed (Debian: apt-get install haproxy)"
NAMES = ("one", "two", "three")

NURSERY = (
    f"{IMPORTABLE}\n"
    """
import json, logging, os, signal, sys
from pathlib import Path
from notso.web import server
from notso.web.chat import services
from notso.web.replicas import valkey_exchange
from notso.web.store.postgres import store
from scripted_engine import IMPORTABLE, say, ScriptedEngine
from notso.web.values.settings import Settings

services.MAX_TURN_STREAMS = 1000  # of one person: here one person plays them all

def script(messages, thinking):
    yield from say(messages[-1].content, piece=8)

def serve(folder, log, pace_seconds, **settings):
    logging.basicConfig(level=logging.INFO, filename=log)
    source = lambda: ScriptedEngine(script, pace_seconds=pace_seconds, slots=64)
    server.serve(source, Settings(data_dir=Path(folder), **settings))

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not (process := os.fork()):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stdin.close()
        serve(**json.loads(line))
        os._exit(0)
    print(process, flush=True)
"""
)


def free_port() -> int:
    """Return a port below the ephemeral range, so that it is still free when its server restarts."""
    while True:
        with socket.socket() as free, suppress(OSError):
            port = random.randrange(20_000, 32_000)
            free.bind(("127.0.0.1", port))
            return port


class Cluster:
    """Three replicas with a scripted engine that echoes the question, eight characters every `pace_seconds`."""

    def __init__(self, folder: Path, *, pace_seconds: float = 0.1, leave_seconds: float = 2.0) -> None:
        if VALKEY is None:
            pytest.skip(NO_VALKEY)
        if HAPROXY is None:
            pytest.skip(NO_HAPROXY)
        self._folder = folder
        self._parts = ExitStack()
        self.postgres = self._parts.enter_context(postgres_server())
        self.valkey = ValkeyServer(folder)
        self._parts.callback(self.valkey.stop)
        self.database = self.postgres.new_database()
        self.ports = [free_port() for _ in NAMES]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {"pace_seconds": pace_seconds, "leave_seconds": leave_seconds}
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._parts.callback(self._end_nursery)
        self.processes: list[int] = [0] * len(NAMES)
        self._parts.callback(self._kill_all)
        for number in range(len(NAMES)):
            self.start(number)
            self.wait_until_ready(number)  # one at a time, because the first creates the tables
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
        command = [*ends_with_us, HAPROXY, "-q", "-db", "-f", str(self._proxy_file())]
        proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._parts.callback(proxy.wait)
        self._parts.callback(proxy.kill)
        self._wait(lambda: self._ready(self.port))

    def start(self, number: int) -> None:
        """Start a replica in place of one that has ended."""
        folder = self._folder / NAMES[number]
        settings = self._settings | {
            "folder": str(folder),
            "log": str(folder.with_suffix(".log")),
            "port": self.ports[number],
            "database_url": self.database,
            "valkey_url": self.valkey.url,
            "trusted_proxies": ["127.0.0.1"],
            "max_waiting_turns": 512,
        }
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(settings) + "\n")
        self._nursery.stdin.flush()
        self.processes[number] = int(self._nursery.stdout.readline())

    def kill(self, number: int) -> None:
        os.kill(self.processes[number], signal.SIGKILL)
        self._wait(lambda: not self._is_there(self.processes[number]))

    def leave(self, number: int) -> None:
        """Stop a replica with SIGTERM and wait until it has ended."""
        os.kill(self.processes[number], signal.SIGTERM)
        self._wait(lambda: not self._is_there(self.processes[number]))

    def is_ready(self, number: int) -> bool:
        return self._ready(self.ports[number])

    def wait_until_ready(self, number: int) -> None:
        self._wait(lambda: self.is_ready(number), f"{NAMES[number]} is not ready: {self.log(number)[-2000:]}")

    def log(self, number: int) -> str:
        path = self._folder / f"{NAMES[number]}.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        self._parts.close()

    def _proxy_file(self) -> Path:
        """Write deploy/haproxy.cfg with the ports of this cluster."""
        text = (ROOT / "deploy" / "haproxy.cfg").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")
        for number, port in enumerate(self.ports, start=1):
            assert f"127.0.0.1:300{number}" in text
            text = text.replace(f"127.0.0.1:300{number}", f"127.0.0.1:{port}")
        text = re.sub(r"log stdout .*", "log stdout format raw local0 emerg", text)
        path = self._folder / "haproxy.cfg"
        path.write_text(text)
        return path

    def _end_nursery(self) -> None:
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.close()
        self._nursery.wait()
        self._nursery.stdout.close()

    def _kill_all(self) -> None:
        for process in self.processes:
            if process:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    @staticmethod
    def _is_there(process: int) -> bool:
        """Return whether any thread of the process is left; the first thread may end before the others."""
        return Path(f"/proc/{process}").exists()

    @staticmethod
    def _ready(port: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    @staticmethod
    def _wait(condition: object, why: str = "waited too long") -> None:
        assert callable(condition)
        deadline = time.monotonic() + 300  # only a guard against hanging
        while not condition():
            assert time.monotonic() < deadline, why
            time.sleep(0.02)
