"""Render an answer as Markdown in the terminal; only the block being generated is redrawn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from notso.cli import terminal
from notso.cli.message_printer import MessagePrinter

if TYPE_CHECKING:
    from rich.live import Live

_FENCES = ("```", "~~~")


class MarkdownPrinter(MessagePrinter):
    """MessagePrinter for a terminal; only the last block is redrawn."""

    def __init__(self, *, show_reasoning: bool) -> None:
        super().__init__(show_reasoning=show_reasoning)
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False, no_color=not terminal.has_colour(sys.stdout))
        self._growing = ""
        self._live: Live | None = None

    def text(self, piece: str) -> None:
        self.close_reasoning()
        finished, self._growing = split_finished(self._growing + terminal.harmless(piece))
        if finished.strip():
            self._erase_growing()
            self._print(finished)
        if self._growing.strip():
            self._draw_growing()

    def finish(self) -> None:
        self.close_reasoning()
        self._erase_growing()
        if self._growing.strip():
            self._print(self._growing)
        self._growing = ""

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(text.strip("\n"), hyperlinks=False), end="\n\n", soft_wrap=False)

    def _draw_growing(self) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        block = Markdown(self._growing, hyperlinks=False)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=10)
            self._live.start()
        self._live.update(block)

    def _erase_growing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_finished(text: str) -> tuple[str, str]:
    """Split at the last empty line outside fenced code."""
    # No later text can change the part above such a line.
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
