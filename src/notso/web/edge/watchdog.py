"""Watchdog process that terminates a server with an unresponsive event loop, so that a supervisor can restart it.

A Python thread cannot do this, because code that holds the GIL (such as a regular expression) blocks all threads and
signal handlers. Therefore, a child process pings the event loop over a pipe every second and counts consecutive pings
without a reply. Pings are not counted while the server is stopped by SIGSTOP or a debugger. Suspending the machine
suspends the child, too.

The child runs this file as its program, so the file imports only notso.system and a few standard modules.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

TICK_SECONDS = 1.0
MISSED_TICKS = 30
"""Number of consecutive pings that may remain without a reply before the server is terminated."""
ABORT_TICKS = 30  # time for the process to exit after SIGABRT: it may have to write a core file of several gigabytes


class Watchdog:
    """Watches the event loop on which its methods are called.

    If the child process cannot be started, the server logs a warning and runs without it.
    """

    _loop: AbstractEventLoop

    def __init__(self, tick_s: float = TICK_SECONDS, most: int = MISSED_TICKS) -> None:
        program = [sys.executable, "-I", "-S", os.path.abspath(__file__)]  # noqa: PTH100 - without pathlib
        self._command = [*program, str(os.getpid()), str(tick_s), str(most)]
        self._child: subprocess.Popen[bytes] | None = None
        self._pings = self._replies = -1

    def start(self) -> None:
        import asyncio
        import faulthandler

        faulthandler.enable(file=2, all_threads=True)  # SIGABRT writes tracebacks, even if other code holds the GIL
        try:
            child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as error:
            self._warn(f"no process can be started: {error.strerror}")
            return
        if child.stdin is None or child.stdout is None:
            raise OSError("a process without pipes")
        self._child, self._pings, self._replies = child, child.stdout.fileno(), child.stdin.fileno()
        os.set_blocking(self._replies, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pings, self._reply)

    def stop(self) -> None:
        """Stop watching. Call before the loop ends."""
        # Once the loop has ended, nothing replies to pings.
        child, self._child = self._child, None
        if child is not None:
            self._loop.remove_reader(self._pings)
            child.kill()
            child.communicate()

    def _reply(self) -> None:
        try:
            if os.read(self._pings, 4096):
                os.write(self._replies, b".")
                return
        except BlockingIOError:  # the pipe is full of replies that the child has yet to read, so another is not needed
            return
        except OSError:
            pass
        self.stop()
        self._warn("its process exited")

    def _warn(self, reason: str) -> None:
        import logging

        logging.getLogger("notso.web").warning("the watchdog is not active: %s", reason)


class MissedPings:
    """Counts consecutive pings without a reply."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._missed = 0

    def is_over(self, replied: bool, is_stopped: bool) -> bool:
        """Count one ping; return whether the limit is exceeded."""
        if replied:
            self._missed = 0
        elif not is_stopped:
            self._missed += 1
        return self._missed > self._most


def watch(process: int, tick_s: float, most: int) -> None:
    """Ping over stdout and read replies from stdin, until the server exits or is terminated."""
    from notso.system.processes import is_stopped

    silence = MissedPings(most)
    while True:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of unread pings, so another one is not needed
            os.write(1, b".")
        if not _wait_tick(tick_s):
            return
        replied = bool(select.select([0], [], [], 0)[0])
        if replied and not os.read(0, 4096):
            return
        if silence.is_over(replied, is_stopped(process)):
            break
    text = f"notso: the event loop did not respond {most} times in a row; terminating, with the stacks of all threads\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    os.kill(process, signal.SIGABRT)
    for _ in range(ABORT_TICKS):
        if not _wait_tick(tick_s):
            return
    os.kill(process, signal.SIGKILL)


def _wait_tick(tick_s: float) -> bool:
    # Returns False as soon as the server exits, because that closes its end of the pipe.
    poll = select.poll()
    poll.register(0, 0)  # poll() reports a hang-up even if no events are requested
    return not poll.poll(1000 * tick_s)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Supervisors and terminals signal the whole process group, but only the server may stop the watchdog.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_blocking(1, False)
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))  # noqa: PTH100 - without pathlib
    watch(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
