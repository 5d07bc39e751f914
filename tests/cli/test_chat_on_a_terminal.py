"""`notso chat` on a terminal: the prompt, completion, the status line, and Ctrl-C from the keyboard."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator

import pytest

# Repeats the question, generates reasoning if enabled, and continues until it is cancelled.
ENGINE = """
import os, signal, time
from notso.cli import engines

# A process without a shell above it is never stopped by the kernel, so it only reports the signal.
signal.signal(signal.SIGTSTP, lambda *_: os.write(1, b"[suspended]"))
from notso.smollm3.values.events import Event, Usage; from notso.smollm3.values.model_info import ModelInfo

class Talker:
    info = ModelInfo("Talker", "", False, 1, 1, 4096)
    def generate(self, messages, params, options, *, cancelled=lambda: False):
        if options.thinking:
            yield Event("reasoning", text="pondering")
        yield Event("text", text="You said " + messages[-1].content.upper())
        while "WAIT" in messages[-1].content.upper() and not cancelled():
            time.sleep(0.01)
        yield Event("usage", usage=Usage(100, 23))
        yield Event("end", finish_reason="cancelled" if cancelled() else "stop")
    def close(self):
        pass

engines.open_engine = lambda *a, **k: Talker()
"""


class Terminal:
    """A terminal with 100 columns that runs a process."""

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]], *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        self.run = start(
            *arguments,
            setup=ENGINE,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            preexec_fn=own_terminal,
        )
        os.close(theirs)
        self.shown = ""

    def expect(self, text: str) -> str:
        """Read until `text` is shown, and return the output since the last call."""
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                data = os.read(self._ours, 65536)
                if b"\x1b[6n" in data:  # the program asks for the cursor's position; answer: the first line
                    os.write(self._ours, b"\x1b[1;1R")
                self.shown += data.decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def expect_prompt(self) -> None:
        self.expect(">")
        self.expect("\x1b[?25h")  # the cursor is shown when the program waits for keys

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def rest(self) -> str:
        """Return the output until the process ends."""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(self._ours, 65536):
                self.shown += data.decode(errors="replace")
        return self.shown

    def close(self) -> None:
        os.close(self._ours)
        if self.run.poll() is None:
            self.run.kill()
        self.run.wait()


@pytest.fixture
def terminal(process: Callable[..., subprocess.Popen[bytes]]) -> Iterator[Terminal]:
    opened = Terminal(process, "chat")
    yield opened
    opened.close()


def test_terminal_conversation_with_completion_and_status_line(terminal: Terminal) -> None:
    terminal.expect("Ctrl-D quits.")
    terminal.expect_prompt()
    terminal.type("hello\r")
    assert "\x1b[2mpondering\x1b[0m" in terminal.expect("You said HELLO")
    terminal.expect("123 / 4,096 tokens")  # the status line, so the prompt is ready
    terminal.type("/thi")
    terminal.expect("/thinking")  # offered as a completion
    terminal.type("\t off\r")
    terminal.expect("Thinking is off.")
    terminal.expect_prompt()
    terminal.type("again\r")
    assert "pondering" not in terminal.expect("You said AGAIN")
    terminal.expect_prompt()
    terminal.type("\x04")

    assert terminal.run.wait(60) == 0


def test_ctrl_c_stops_the_answer_and_a_second_one_quits(terminal: Terminal) -> None:
    terminal.expect("Ctrl-D quits.")
    terminal.expect_prompt()
    terminal.type("wait\r")
    terminal.expect("You said WAIT")
    terminal.type("\x03")
    terminal.expect("Stopped. Press Ctrl-C again to quit.")
    terminal.expect_prompt()
    terminal.type("\x03")

    assert terminal.run.wait(60) == 130


def test_ctrl_c_at_the_prompt_must_be_repeated_to_quit(terminal: Terminal) -> None:
    terminal.expect("Ctrl-D quits.")
    terminal.expect_prompt()
    terminal.type("\x03")
    terminal.expect("Press Ctrl-C again to quit.")
    terminal.expect_prompt()
    terminal.type("hello\r")  # cancels quitting
    terminal.expect("You said HELLO")
    terminal.expect_prompt()
    terminal.type("\x03")
    terminal.expect("Press Ctrl-C again to quit.")
    terminal.expect_prompt()
    terminal.type("\x03")

    assert "Press Ctrl-C" not in terminal.rest()
    assert terminal.run.wait(60) == 130


def test_ctrl_c_is_not_echoed_into_the_answer(terminal: Terminal) -> None:
    terminal.expect("Ctrl-D quits.")
    terminal.expect_prompt()
    terminal.type("wait\r")
    terminal.expect("You said WAIT")
    terminal.type("\x03")

    assert "^C" not in terminal.expect("Stopped. Press Ctrl-C again to quit.")


def test_ctrl_z_suspends_at_the_prompt_and_in_an_answer(terminal: Terminal) -> None:
    terminal.expect("Ctrl-D quits.")
    terminal.expect_prompt()
    terminal.type("\x1a")
    terminal.expect("[suspended]")
    terminal.expect_prompt()
    terminal.type("wait\r")
    terminal.expect("You said WAIT")
    terminal.type("\x1a")
    terminal.expect("[suspended]")
    terminal.type("\x03")
    terminal.expect("Stopped. Press Ctrl-C again to quit.")
