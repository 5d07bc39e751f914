"""Markdown that is still being written: finished blocks are rendered once, the open tail again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from notso.web.rendering.half_open import complete
from notso.web.rendering.markdown import render_markdown, render_plain, split_lines, top_level_blocks

TAIL_BUDGET_SECONDS = 0.05
MAX_TAIL_CHARACTERS = 16 * 1024


@dataclass(frozen=True, slots=True)
class Rendered:
    """What changed: HTML of blocks that closed (append it, it never changes) and of the open tail (replace it)."""

    closed: str
    tail: str


class StreamingMarkdown:
    """Feed it growing text; the closed pieces joined with the last tail are what render_markdown gives at the end.

    A block is closed when a later one has begun on a complete line: from then on no text can change it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._held = ""  # a carriage return at the end may be half of a line end
        self._closed_to = 0
        self._tail_is_slow = False

    def feed(self, more: str) -> Rendered:
        """Take more text. Takes time: not on the loop."""
        more = self._held + more
        self._held = "\r" if more.endswith("\r") else ""
        self._text += more.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")
        closed = self._close_blocks()
        return Rendered(closed, self._render_tail())

    def finish(self) -> Rendered:
        """Close everything."""
        rest = self._text[self._closed_to :] + self._held
        self._text, self._held, self._closed_to = self._text + self._held, "", len(self._text) + len(self._held)
        return Rendered(render_markdown(rest) if rest.strip(" \t\n") else "", "")

    def _close_blocks(self) -> str:
        complete = self._text.rfind("\n") + 1
        if complete <= self._closed_to:
            return ""
        lines = split_lines(self._text[self._closed_to : complete])
        blocks = top_level_blocks("".join(lines))
        if len(blocks) < 2:
            return ""
        html = "".join(render_markdown("".join(lines[block.start : block.end])) for block in blocks[:-1])
        self._closed_to += sum(len(line) for line in lines[: blocks[-1].start])
        self._tail_is_slow = False
        return html

    def _render_tail(self) -> str:
        tail = self._text[self._closed_to :]
        if not tail.strip(" \t\n"):
            return ""
        if self._tail_is_slow or len(tail) > MAX_TAIL_CHARACTERS:
            return render_plain(tail)
        started = time.thread_time()  # a pause that others caused says nothing of the text
        html = render_markdown(complete(tail), colour=False)
        self._tail_is_slow = time.thread_time() - started > TAIL_BUDGET_SECONDS
        return html
