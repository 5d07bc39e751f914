"""Colours for code from a process of its own, which is started when first needed and again when it died."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading

BLOCK_SECONDS = 0.2  # 20,000 characters of honest code take 0.02 to 0.06 s

_PROGRAM = "from notso.web.rendering.colours import main; main()"


class Highlighter:
    """One block at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def html(self, code: str, language: str) -> tuple[str | None, float]:
        """The code in spans with Pygments' classes, and the processor time that took, in seconds; None for a block
        that takes more than `BLOCK_SECONDS`, and where no process can be had."""
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
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _answer(self, line: bytes) -> bytes:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a key pressed in the terminal is not for it
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
