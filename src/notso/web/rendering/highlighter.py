"""Highlighting in a child process, started on first use and again after it died."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading

BLOCK_SECONDS = 0.2  # 20,000 characters of ordinary code take 0.02 to 0.06 s

_PROGRAM = "from notso.web.rendering.colours import main; main()"


class Highlighter:
    """Highlights one block at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def html(self, code: str, language: str) -> tuple[str | None, float]:
        """Return highlighted spans and CPU seconds.

        The HTML is None if the block exceeds BLOCK_SECONDS or no process can be started.
        """
        asked = {"code": code, "language": language, "seconds": BLOCK_SECONDS}
        with self._lock:
            try:
                line = self._answer(json.dumps(asked).encode() + b"\n")
            except OSError:
                line = b""
            if not line:
                self._end()
                return None, BLOCK_SECONDS
        answer = json.loads(line)
        return str(answer["html"]), float(answer["seconds"])

    def close(self) -> None:
        """Kill the process, if any."""
        with self._lock:
            self._end()

    def _answer(self, line: bytes) -> bytes:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise OSError("a process without pipes")
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
