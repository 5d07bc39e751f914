"""The watchdog ends a server whose event loop is blocked for a number of ticks, but not a server that was suspended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_engine import IMPORTABLE

from notso.system.processes import is_stopped
from notso.web.edge.watchdog import MissedPings, Watchdog

TICK_SECONDS = 0.02
SERVER = IMPORTABLE + textwrap.dedent(
    """
    import re, sys, threading
    from pathlib import Path
    from notso.web.app import create_app
    from notso.web.edge.watchdog import Watchdog
    from notso.web.server import ChatServer, listen
    from scripted_engine import ScriptedEngine
    from notso.web.values.settings import Settings

    def hold_the_interpreter():
        print("held", flush=True)
        re.fullmatch("(a|a)*", "a" * 60 + "!")

    def commands():
        for line in sys.stdin:
            if line == "beat\\n":
                loop.call_soon_threadsafe(lambda: print("beat", flush=True))
            else:
                loop.call_soon_threadsafe(hold_the_interpreter) if line == "hold\\n" else hold_the_interpreter()

    def ready(address):
        global loop
        loop = server._loop
        threading.Thread(target=commands, daemon=True).start()
        print("ready", flush=True)

    settings = Settings(port=0, data_dir=Path(sys.argv[1]))
    server = ChatServer(create_app(ScriptedEngine, settings), "", ready, Watchdog(float(sys.argv[2]), int(sys.argv[3])))
    server.run(sockets=[listen(settings)])
    """
)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    most = getattr(request, "param", 30)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path), str(TICK_SECONDS), str(most)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert said(process) == "ready"
    yield process
    process.kill()
    process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], command: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()


def watcher_of(process: subprocess.Popen[str]) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def wake_ups(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


@pytest.mark.parametrize("where", ["hold", "hold in a thread"])
def test_blocked_server_is_aborted_with_tracebacks(server: subprocess.Popen[str], where: str) -> None:
    watcher = watcher_of(server)
    tell(server, where)
    assert said(server) == "held"
    _, errors = server.communicate(timeout=120)
    assert server.returncode == -signal.SIGABRT
    assert "the event loop did not respond 30 times in a row" in errors
    assert "in hold_the_interpreter" in errors and "Thread 0x" in errors
    while Path(f"/proc/{watcher}").exists():  # the watchdog process exits without a signal
        os.sched_yield()


@pytest.mark.parametrize("server", [3], indirect=True)
def test_suspended_server_is_not_ended(server: subprocess.Popen[str]) -> None:
    watcher = watcher_of(server)
    os.kill(server.pid, signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)
    before = wake_ups(watcher)
    while wake_ups(watcher) < before + 40:
        os.sched_yield()
    os.kill(server.pid, signal.SIGCONT)
    tell(server, "beat")
    assert said(server) == "beat" and server.poll() is None
    server.terminate()
    _, errors = server.communicate(timeout=120)
    assert server.returncode == 0, errors
    assert not Path(f"/proc/{watcher}").exists()


def test_stopped_process_is_detected() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()


def test_silence_counts_unanswered_ticks_except_while_stopped() -> None:
    silence = MissedPings(2)
    told = [(False, False), (False, False), (True, False), (False, False), (False, True), (False, True), (False, False)]
    assert not any(silence.is_over(answered, is_stopped) for answered, is_stopped in told)
    assert silence.is_over(False, False)


def test_watchdog_logs_when_process_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    Watchdog().start()
    assert "the watchdog is not active: no process can be started" in caplog.text
