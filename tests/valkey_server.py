"""A separate Valkey server for a test, or Redis if only that is installed. Restarts keep its port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
MISSING = "neither valkey-server nor redis-server is installed (Debian: apt-get install redis-server)"


class ValkeyServer:
    """A server without persistence: its data is lost when it stops."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None and self._process is None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
        self._process = subprocess.Popen([*ends_with_us, PROGRAM, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline and self._process.poll() is None, "the Valkey server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
