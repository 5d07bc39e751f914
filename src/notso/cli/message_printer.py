"""Print an answer as it is generated: text to stdout, thinking to stderr, control characters as symbols."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from notso.cli import terminal

if TYPE_CHECKING:
    from rich.live import Live

    from notso.smollm3.values.events import Event, FinishReason, Usage
    from notso.smollm3.values.messages import ToolCall


@dataclass(slots=True)
class PrintedMessage:
    """A complete answer. Times are in milliseconds since the request."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason = "stop"
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    ids: list[int] = field(default_factory=list)  # empty unless token ids were requested
    closed_at: list[int] = field(default_factory=list)  # indices in `ids` at which the engine ended the reasoning


# Without colors, these lines enclose the thinking; with colors, it is dimmed instead.
_THINKING, _END_OF_THINKING = "[thinking]", "[end of thinking]"


class MessagePrinter:
    def __init__(self, *, show_reasoning: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._show_reasoning = show_reasoning
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._pending_newlines = ""  # trailing newlines, held back so that the output ends with exactly one
        self._started = False
        self._in_reasoning = False

    def text(self, piece: str) -> None:
        self.close_reasoning()
        piece = terminal.escape_control(piece)
        if not self._started:
            piece = piece.lstrip("\n")
            if not piece:
                return
            self._started = True
        body = piece.rstrip("\n")
        if body:
            self._out.write(self._pending_newlines + body)
            self._out.flush()
            self._pending_newlines = ""
        self._pending_newlines += piece[len(body) :]

    def reasoning(self, piece: str) -> None:
        if not self._show_reasoning:
            return
        if not self._in_reasoning:
            piece = piece.lstrip("\n")
            self._in_reasoning = bool(piece)
            if piece and not terminal.has_color(self._err):
                piece = f"{_THINKING}\n{piece}"
        self._err.write(terminal.styled(terminal.escape_control(piece), "dim", self._err) if piece else "")
        self._err.flush()

    def finish(self) -> None:
        self.close_reasoning()
        self._out.write("\n")
        self._out.flush()

    def close_reasoning(self) -> None:
        if self._in_reasoning:
            mark = "" if terminal.has_color(self._err) else f"\n{_END_OF_THINKING}"
            self._err.write(mark + ("\n\n" if terminal.is_terminal(self._err) else "\n"))
            self._err.flush()
            self._in_reasoning = False


def collect(
    events: Iterator[Event], printer: MessagePrinter | None, on_first: Callable[[], None] | None = None
) -> PrintedMessage:
    answer = PrintedMessage()
    start = time.perf_counter()
    try:
        for event in events:
            if on_first is not None:
                on_first()
                on_first = None
            if not answer.first_token_ms and event.kind in ("reasoning", "text", "tool_call"):
                answer.first_token_ms = (time.perf_counter() - start) * 1000
            _apply(event, answer, printer)
    finally:
        # Closing an unfinished generator makes the engine stop the answer.
        if isinstance(events, Generator):
            events.close()
    answer.total_ms = (time.perf_counter() - start) * 1000
    return answer


def _apply(event: Event, answer: PrintedMessage, printer: MessagePrinter | None) -> None:
    if event.kind == "reasoning":
        answer.reasoning += event.text
        if printer is not None:
            printer.reasoning(event.text)
    elif event.kind == "text":
        answer.text += event.text
        if printer is not None:
            printer.text(event.text)
    elif event.kind == "tool_call" and event.tool_call is not None:
        answer.tool_calls.append(event.tool_call)
    elif event.kind == "tokens":
        answer.closed_at += [len(answer.ids)] if event.is_forced else []
        answer.ids += event.token_ids
    elif event.kind == "usage":
        answer.usage = event.usage
    elif event.kind == "end":
        answer.finish_reason = event.finish_reason or "stop"


def speed_line(answer: PrintedMessage) -> str:
    """Return a line such as `412 prompt tokens (240 cached) in 1.3 s, 96 tokens at 8.1 per second`."""
    usage = answer.usage
    if usage is None:
        return f"{answer.total_ms / 1000:.1f} s"
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    line = f"{usage.prompt_tokens:,} prompt tokens{cached} in {usage.prompt_ms / 1000:.1f} s"
    if usage.completion_ms > 0:
        rate = usage.completion_tokens * 1000 / usage.completion_ms
        line += f", {usage.completion_tokens:,} tokens at {rate:.1f} per second"
    return line


_FENCES = ("```", "~~~")


class MarkdownPrinter(MessagePrinter):
    """MessagePrinter that renders Markdown in a terminal and redraws only the last block."""

    def __init__(self, *, show_reasoning: bool) -> None:
        super().__init__(show_reasoning=show_reasoning)
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False, no_color=not terminal.has_color(sys.stdout))
        self._unfinished = ""
        self._live: Live | None = None

    def text(self, piece: str) -> None:
        self.close_reasoning()
        finished, self._unfinished = split_completed(self._unfinished + terminal.escape_control(piece))
        if finished.strip():
            self._erase_unfinished()
            self._print(finished)
        if self._unfinished.strip():
            self._draw_unfinished()

    def finish(self) -> None:
        self.close_reasoning()
        self._erase_unfinished()
        if self._unfinished.strip():
            self._print(self._unfinished)
        self._unfinished = ""

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(text.strip("\n"), hyperlinks=False), end="\n\n", soft_wrap=False)

    def _draw_unfinished(self) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        block = Markdown(self._unfinished, hyperlinks=False)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=10)
            self._live.start()
        self._live.update(block)

    def _erase_unfinished(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_completed(text: str) -> tuple[str, str]:
    """Split the text at the last empty line outside fenced code."""
    # Text after an empty line rarely changes how the text before that line is rendered.
    cut, position, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = line.strip()[:3]
        if fence:
            fence = "" if mark == fence and not line.strip(" \n" + fence[0]) else fence
        elif mark in _FENCES:
            fence = mark
        elif line == "\n":
            cut = position
    return text[:cut], text[cut:]
