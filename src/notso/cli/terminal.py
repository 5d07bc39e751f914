"""Terminal output: results on stdout; progress, reasoning and notices on stderr.

Colors, spinners and progress bars appear only on interactive terminals. NO_COLOR disables colors and spinners.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, TextIO

Progress = Callable[[str, int, int], None]
Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

# Control characters could move the cursor or change the window title, so those in a model's output are replaced with
# symbols.
_HARMLESS: dict[int, str] = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_HARMLESS |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}


def escape_control(text: str) -> str:
    """Replace control characters, except newline and tab, with symbols."""
    return text.translate(_HARMLESS)


def on_one_line(text: str) -> str:
    """Replace control characters, including newline and tab, with symbols. Use for untrusted names."""
    return escape_control(text).translate({0x09: "\u2409", 0x0A: "\u240a"})


class NullStream(io.TextIOWrapper):
    """Stream that discards text; `has_lost_text` is true once text has been written."""

    has_lost_text = False

    def __init__(self) -> None:
        super().__init__(open(os.devnull, "wb"))  # noqa: PTH123, SIM115 -- lives as long as the process

    def write(self, text: str, /) -> int:
        self.has_lost_text = self.has_lost_text or bool(text)
        return len(text)


def prepare_streams() -> None:
    # Python sets a standard stream to None if it was closed when notso started.
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BytesIO())
    elif hasattr(sys.stdin, "reconfigure"):
        # Invalid bytes in a line must not end a chat; the message that contains them is refused.
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, NullStream())
        elif hasattr(stream, "reconfigure"):
            # Replace characters that the terminal cannot encode, instead of raising an error.
            stream.reconfigure(errors="replace")


def abandon_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO) -> bool:
    if os.environ.get("NOTSO_PLAIN") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def has_color(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: Style, stream: TextIO) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_color(stream) else text


def print_line(text: str) -> None:
    print(escape_control(text), flush=True)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def note(text: str) -> None:
    print(styled(escape_control(text), "dim", sys.stderr), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    print(styled(escape_control(text), "yellow", sys.stderr), file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    print(f"{styled('notso:', 'red', sys.stderr)} {escape_control(text)}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # JSON has neither infinity nor NaN: they become null
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False)
    # JSON need not escape DEL and C1 control characters, but terminals act on them.
    print("".join(c if not 0x7F <= ord(c) < 0xA0 else f"\\u{ord(c):04x}" for c in text), flush=True)


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Align the columns of rows; `right` contains the indices of right-aligned columns."""
    if not rows:
        return []
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def gigabytes(size_bytes: float) -> str:
    """Format a size in decimal units: `1.92 GB`, `6.3 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}" if unit == "GB" else f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


@contextlib.contextmanager
def progress(*, in_bytes: bool = False, as_json: bool = False) -> Iterator[Progress]:
    if as_json:
        yield _json_progress()
    elif is_terminal(sys.stderr):
        with _bar(in_bytes) as report:
            yield report
    else:
        yield lambda _what, _done, _total: None


@contextlib.contextmanager
def waiting(what: str, *, silent: bool = False) -> Iterator[Callable[[], None]]:
    """Show a spinner until the yielded callable is called or the block ends."""
    if silent or not has_color(sys.stderr):
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True, highlight=False, no_color=not has_color(sys.stderr)).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


@contextlib.contextmanager
def suppress_key_echo() -> Iterator[None]:
    """Stop the terminal from echoing `^C`, which could wrap a progress line and make it appear twice."""
    try:
        before = termios.tcgetattr(sys.stdin)
        modes = [*before]
        modes[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
    except (AttributeError, OSError, ValueError, termios.error):  # stdin is not a terminal
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError, termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _json_progress() -> Progress:
    last = [0.0]

    def report(what: str, done: int, total: int) -> None:
        if done == total or time.monotonic() - last[0] >= 1.0:
            last[0] = time.monotonic()
            print(json.dumps({"progress": what, "done": done, "total": total}), file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def _bar(in_bytes: bool) -> Iterator[Progress]:
    from rich import progress as bars
    from rich.console import Console

    bar_columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn()]
    if in_bytes:
        bar_columns += [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    else:
        bar_columns += [bars.MofNCompleteColumn()]
    console = Console(stderr=True, highlight=False, no_color=not has_color(sys.stderr))
    with bars.Progress(*bar_columns, bars.TimeRemainingColumn(), console=console, transient=True) as bar:
        tasks: dict[str, bars.TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for old in tasks.values():
                    bar.remove_task(old)
                tasks.clear()
                tasks[what] = bar.add_task(what, total=total, completed=done)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@contextlib.contextmanager
def clean_up_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, so that temporary files are removed before the process ends."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        received.append(number)
        sys.exit(128 + number)

    # Signals that are ignored, as under nohup, stay ignored. Only the main thread can install signal handlers.
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = [signal.SIGTERM, signal.SIGHUP] if in_main_thread else []
    handled = [each for each in signals if signal.getsignal(each) == signal.SIG_DFL]
    for each in handled:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
        if received:  # end with the same signal, so that the parent process sees the cause
            os.kill(os.getpid(), received[0])


class Interruption:
    """Context manager: the first SIGINT makes `requested()` true; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: object = None
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interruption:
        if self._in_main_thread:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def requested(self) -> bool:
        return self._requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
