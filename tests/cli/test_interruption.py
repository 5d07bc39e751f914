"""Ctrl-C, closed pipes and full disks, with the command in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from notso.cli import engines, main
from notso.cli.terminal import clean_up_on_signals

Process = Callable[..., "subprocess.Popen[bytes]"]

# Engine that yields a word and then runs until it is cancelled; with `deaf`, it reports the cancellation and continues.
ENDLESS = """
import os, time
from notso.cli import engines
from notso.smollm3.values.events import Event; from notso.smollm3.values.model_info import ModelInfo

class Endless:
    info = ModelInfo("Endless", "", False, 1, 1, 4096)
    deaf = {deaf}
    def generate(self, messages, params, options, *, cancelled=lambda: False):
        yield Event("text", text="word")
        while not cancelled():
            time.sleep(0.01)
        if self.deaf:
            os.write(1, b"heard")
            while True:  # a signal just before a long sleep would be heard after it
                time.sleep(0.01)
        yield Event("end", finish_reason="cancelled")
    def close(self):
        pass

engines.open_engine = lambda *a, **k: Endless()
"""


class Interrupting:
    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_during_import_exits_with_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "notso.cli.app", cast(Any, Interrupting()))
    assert main([]) == 130


def wait_until_it_reads(run: subprocess.Popen[bytes]) -> None:
    """Wait until the process reads a line from descriptor 0. An earlier signal would be handled only after the read."""
    for _ in range(6000):
        if Path(f"/proc/{run.pid}/syscall").read_text().startswith("0 0x0 "):
            return
        time.sleep(0.01)


def wait_for(run: subprocess.Popen[bytes], text: bytes) -> None:
    assert run.stdout is not None
    seen = b""
    while text not in seen:
        piece = os.read(run.stdout.fileno(), 4096)
        assert piece, f"ended after {seen!r}"
        seen += piece


def test_ctrl_c_stops_the_answer_and_ends_its_line(process: Process) -> None:
    run = process("run", "x", setup=ENDLESS.format(deaf=False))
    wait_for(run, b"word")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)

    assert (out, err) == (b"\n", b"")
    assert run.returncode == 130


def test_second_ctrl_c_exits_immediately(process: Process) -> None:
    run = process("run", "x", setup=ENDLESS.format(deaf=True))
    wait_for(run, b"word")
    run.send_signal(signal.SIGINT)
    wait_for(run, b"heard")  # two pending signals of the same kind would be delivered as one
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)

    assert run.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize("verb", ["run", "batch"])
def test_first_ctrl_c_exits_while_the_model_is_downloaded_or_loaded(
    notso: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    def open_engine(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was ignored")

    monkeypatch.setattr(engines, "open_engine", open_engine)
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    arguments = {"run": ["x"], "batch": [str(source), str(tmp_path / "out.jsonl")]}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert notso(verb, *arguments[verb]).code == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_chat_stops_the_answer_but_not_the_chat(process: Process) -> None:
    run = process("chat", setup=ENDLESS.format(deaf=False))
    assert run.stdin is not None
    run.stdin.write(b"hello\n")
    run.stdin.flush()
    wait_for(run, b"word")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(b"/status\n", timeout=60)

    assert out == b"\n"
    assert b"Stopped" in err
    assert b"Endless" in err.rpartition(b"Stopped")[2]
    assert run.returncode == 0


def test_second_ctrl_c_at_the_chat_prompt_quits(process: Process) -> None:
    run = process("chat", setup=ENDLESS.format(deaf=False))
    assert run.stderr is not None
    while b"/help" not in run.stderr.readline():
        pass
    wait_until_it_reads(run)
    run.send_signal(signal.SIGINT)
    assert b"Press Ctrl-C again to quit" in run.stderr.readline()
    wait_until_it_reads(run)
    run.send_signal(signal.SIGINT)

    assert run.wait(60) == 130


@pytest.mark.parametrize("verb", [["list"], ["run", "x"], ["--help"]])
def test_closed_stdout_exits_quietly_with_sigpipe_code(process: Process, verb: list[str]) -> None:
    setup = ENDLESS.format(deaf=False).replace('text="word"', 'text="word\\n" * 100000')
    read, write = os.pipe()
    os.close(read)
    run = process(*verb, setup=setup, stdout=write)
    os.close(write)
    _, err = run.communicate(timeout=60)

    # An error message or a traceback, for example of a failed import, explains another exit code.
    assert (run.returncode, err) == (141, b"")


@pytest.mark.parametrize(("verb", "code"), [(["list"], 141), (["run", "x"], 141), (["list", "/no/such/folder"], 2)])
def test_missing_stdout_is_an_error(process: Process, verb: list[str], code: int) -> None:
    setup = "sys.stdout = None\n" + ENDLESS.format(deaf=False).replace("while not cancelled()", "while False")
    run = process(*verb, setup=setup)
    out, err = run.communicate(timeout=60)

    assert (run.returncode, out) == (code, b"")
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("verb", "code", "told"),
    [
        (["run"], 2, "the prompt is empty"),
        (["chat"], 0, "/help lists the commands"),
        (["inspect", "owner/repository"], 3, "use `--fetch`"),
        (["rm", "small"], 2, "stdin is not a terminal"),
    ],
)
def test_closed_stdin_is_an_empty_input(
    notso: Callable[..., Any],
    engine: object,
    fake_hub: object,
    official_file: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    code: int,
    told: str,
) -> None:
    assert notso("pull", "small").code == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(verb) == code and told in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list"], ["run", "--no-think", "--max-tokens", "2", "Hi"]])
def test_full_disk_is_reported_once(process: Process, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Path("/dev/full").open("wb") as full:
        run = process(*arguments, stdout=full)
        _, err = run.communicate(timeout=60)

    assert run.returncode == 4
    assert err.count(b"notso: No space left on device. Free disk space") == 1


def test_run_with_a_prompt_does_not_read_stdin(process: Process) -> None:
    setup = ENDLESS.format(deaf=False).replace("while not cancelled()", "while False")
    run = process("run", "x", setup=setup)  # stdin stays open, so reading it would never end

    assert run.wait(60) == 0


def test_interruption_restores_the_sigint_handler() -> None:
    from notso.cli.terminal import Interruption

    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert not interruption.requested()
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_interruption_is_inactive_outside_the_main_thread() -> None:
    import threading

    from notso.cli.terminal import Interruption

    seen: list[Any] = []

    def work() -> None:
        with Interruption() as interruption:
            seen.append(interruption.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


# Sends the signal while the first tensor is being written.
STOPPED_WRITER = """
import signal
from notso.qtensor.gguf_writer import GGUFWriter
signal.signal(signal.{name}, signal.SIG_DFL)
GGUFWriter._write_tensor = lambda *_: signal.raise_signal(signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_temporary_files_are_removed_on_signals(process: Process, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    small = ("--layers", "1", "--hidden", "256", "--ffn", "256", "--heads", "2", "--kv", "1")
    run = process("synth", str(folder / "model.gguf"), *small, setup=STOPPED_WRITER.format(name=name))
    run.communicate(timeout=60)

    assert run.returncode == -signal.Signals[name]
    assert list(folder.iterdir()) == []


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clean_up_on_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
