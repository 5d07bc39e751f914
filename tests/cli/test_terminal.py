"""Streams, colors and progress bars, on terminals and elsewhere."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from notso.cli import terminal
from notso.cli.message_printer import MessagePrinter, split_completed

SPEAKER = """
import sys
from notso.cli import terminal
from notso.cli.message_printer import MessagePrinter
from notso.cli.message_printer import split_completed
printer = MessagePrinter(show_reasoning=True)
with terminal.progress(in_bytes=True) as report:
    for done in range(0, 1000001, 100000):
        report("fetching", done, 1000000)
with terminal.waiting("waiting for it"):
    pass
printer.reasoning("why")
printer.text("because")
printer.finish()
"""


def on_a_terminal(code: str, **environment: str) -> str:
    """Run Python code with stdout and stderr on one terminal, and return its output."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "NOTSO_PLAIN")}
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env={**env, **environment}
    )
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([ours], [], [], 60)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not data:
            break
        written += data
    os.close(ours)
    assert run.wait(60) == 0
    return written.decode().replace("\r\n", "\n")


def test_terminal_gets_dim_reasoning_and_erased_progress_bars() -> None:
    shown = on_a_terminal(SPEAKER, TERM="xterm")

    assert "\x1b[2mwhy\x1b[0m" in shown
    assert "because" in shown
    assert "fetching" in shown
    assert "waiting for it" in shown
    assert "\x1b[2K" in shown  # the progress bar's line is erased


@pytest.mark.parametrize("variable", [{"TERM": "dumb"}, {"TERM": "xterm", "NOTSO_PLAIN": "1"}])
def test_plain_terminal_gets_text_only(variable: dict[str, str]) -> None:
    assert on_a_terminal(SPEAKER, **variable) == "[thinking]\nwhy\n[end of thinking]\nbecause\n"


def test_no_color_removes_colors_and_spinner_but_keeps_progress_bar() -> None:
    shown = on_a_terminal(SPEAKER, TERM="xterm", NO_COLOR="1")

    assert "[thinking]\nwhy\n[end of thinking]\n\nbecause" in shown
    assert "fetching" in shown
    assert "waiting for it" not in shown  # without colors, spinners are not shown
    assert "\x1b[2mwhy" not in shown
    assert "\x1b[3" not in shown.replace("\x1b[3K", "")  # no color codes


@pytest.mark.parametrize(
    ("variable", "seen"),
    [({}, (True, True)), ({"NO_COLOR": "1"}, (False, True)), ({"NOTSO_PLAIN": "1"}, (False, False))],
)
def test_spinner_and_progress_bar_depend_on_environment(variable: dict[str, str], seen: tuple[bool, bool]) -> None:
    code = (
        "from notso.cli import terminal\n"
        "with terminal.waiting('waiting-for'): pass\n"
        "with terminal.progress() as report: report('working-on', 1, 2)\n"
    )
    shown = on_a_terminal(code, **{"TERM": "xterm", **variable})

    assert ("waiting-for" in shown, "working-on" in shown) == seen


def test_pipe_gets_text_only() -> None:
    run = subprocess.run([sys.executable, "-c", SPEAKER], capture_output=True, text=True, check=True)

    assert (run.stdout, run.stderr) == ("because\n", "[thinking]\nwhy\n[end of thinking]\n")


def test_harmless_replaces_control_characters() -> None:
    text = "".join(map(chr, range(0x00, 0x100)))
    shown = terminal.escape_control(text)

    assert len(shown) == len(text)
    assert [c for c in shown if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0] == ["\t", "\n"]
    assert terminal.escape_control("é 漢 🙂") == "é 漢 🙂"


def test_printed_text_does_not_depend_on_chunk_boundaries() -> None:
    text = "\n\x1b[31mred\n\nblue\n\n"
    whole = io.StringIO()
    printer = MessagePrinter(show_reasoning=True, out=whole, err=io.StringIO())
    printer.text(text)
    printer.finish()
    for at in range(len(text)):
        out = io.StringIO()
        printer = MessagePrinter(show_reasoning=True, out=out, err=io.StringIO())
        for piece in (text[:at], "", text[at:]):
            printer.text(piece)
        printer.finish()
        assert out.getvalue() == whole.getvalue() == "␛[31mred\n\nblue\n"


def test_json_progress_is_written_as_lines_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress(as_json=True) as report:
        for done in range(11):
            report("checking", done, 10)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == '{"progress": "checking", "done": 10, "total": 10}'
    assert len(captured.err.splitlines()) == 2  # at most one line per second, and the last one


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0 bytes"), (999, "999 bytes"), (6_300_000, "6.3 MB"), (1_915_305_312, "1.92 GB")]
)
def test_sizes_are_formatted_with_decimal_units(size: int, said: str) -> None:
    assert terminal.gigabytes(size) == said


def test_columns_are_aligned() -> None:
    assert terminal.columns([["name", "size"], ["a", "10 MB"], ["longer", "9 MB"]], right=(1,)) == [
        "name     size",
        "a       10 MB",
        "longer   9 MB",
    ]
    assert terminal.columns([]) == []


def test_closed_stdout_exits_with_sigpipe_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m notso list >&-; echo $?"], capture_output=True, text=True, check=True
    )

    assert run.stdout == "141\n"


def test_unencodable_characters_are_replaced() -> None:
    code = "from notso.cli import terminal; terminal.prepare_streams(); terminal.print_line('ü🙂')"
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)

    assert run.stdout == b"\xfc?\n"


MARKDOWN = (
    "# Title\n\nSome **bold** and\nplain text.\n\n- one\n- two\n\n```python\nx = 1\n\ny = 2\n```\n\nThe end\x1b[2J"
)


def test_markdown_is_rendered_with_each_block_once() -> None:
    pieces = [MARKDOWN[at : at + 3] for at in range(0, len(MARKDOWN), 3)]
    code = (
        "from notso.cli.message_printer import MarkdownPrinter\n"
        "printer = MarkdownPrinter(show_reasoning=True)\n"
        f"for piece in {pieces!r}: printer.text(piece)\n"
        "printer.finish()"
    )
    standing = what_stands(on_a_terminal(code, TERM="xterm", COLUMNS="60"))

    assert [line.strip(" ┏┓┃━┗┛") for line in standing if line.strip(" ┏┓┃━┗┛")] == [
        "Title", "Some bold and plain text.", "• one", "• two", "x = 1", "y = 2", "The end␛[2J",
    ]  # fmt: skip


def what_stands(written: str) -> list[str]:
    """Return the lines that a terminal shows at the end; understands only cursor up, erased lines and colors."""
    lines, row = [""], 0
    for piece in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)", written):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece.endswith("A") and piece.startswith("\x1b["):
            row -= int(piece[2:-1] or 1)
        elif piece.endswith("K") and piece.startswith("\x1b["):
            lines[row] = ""
        elif piece and not piece.startswith("\x1b[") and piece != "\r":
            lines[row] += piece
    return lines


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("growing", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", "one\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n~~~\n\nc", "~~~\n```\n\n~~~\n\n"),
        ("``` py\n\n```not the end\n\n", ""),
    ],
)
def test_markdown_block_ends_at_empty_line_outside_code(text: str, finished: str) -> None:
    assert split_completed(text) == (finished, text[len(finished) :])


def test_json_output_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"ä": [math.inf, -math.inf, math.nan, 0.1]})
    assert capsys.readouterr().out == '{"ä": [null, null, null, 0.1]}\n'
