"""Incremental Markdown: closed blocks are rendered once, the open tail at each update."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from notso.web.rendering.budget import TICK_SECONDS, Budget, Deadline, OverBudgetError
from notso.web.rendering.half_open import complete
from notso.web.rendering.markdown import (
    LINE,
    render_block,
    render_markdown,
    render_plain,
    render_unformatted,
    render_within,
    top_level_blocks,
)

MAX_TAIL_CHARACTERS = 16 * 1024


@dataclass(frozen=True, slots=True)
class Rendered:
    """HTML of blocks that closed (append it) and of the open tail (replace it)."""

    closed: str
    tail: str


class StreamingMarkdown:
    """Renderer of growing text; the result equals that of render_markdown."""

    def __init__(self, budget: Budget | None = None) -> None:
        # Closed blocks are charged to the message. Repeated work (the tail, the search for blocks) has TICK_SECONDS
        # each time; when over, it waits for the end of the block, or for twice as much text.
        self._budget = budget or Budget()
        self._text = ""
        self._held = ""  # a trailing CR may be half of a line end
        self._closed_to = 0
        self._tail_is_slow = False
        self._enough_to_look = 0

    def feed(self, more: str) -> Rendered:
        """Append text. Blocking: not for the event loop."""
        more = self._held + more
        self._held = "\r" if more.endswith("\r") else ""
        self._text += more.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")
        closed = self._close_plain() if self._budget.spent else self._close_blocks(Deadline(TICK_SECONDS))
        return Rendered(closed, self._render_tail())

    def finish(self) -> Rendered:
        """Close everything."""
        rest = self._text[self._closed_to :] + self._held
        self._text, self._held, self._closed_to = self._text + self._held, "", len(self._text) + len(self._held)
        return Rendered(render_markdown(rest, budget=self._budget) if rest.strip(" \t\n") else "", "")

    def _close_blocks(self, tick: Deadline) -> str:
        complete = self._text.rfind("\n") + 1
        if complete - self._closed_to <= self._enough_to_look:
            return ""
        lines = LINE.findall(self._text[self._closed_to : complete])
        try:
            blocks = top_level_blocks("".join(lines), tick)
        except OverBudgetError:
            self._enough_to_look = 2 * (complete - self._closed_to)
            return ""
        html, done = "", 0
        # A block is closed once the next one has begun on a complete line: no later text can change it.
        for block, following in pairwise(blocks):
            if done and tick.passed:
                break
            text = "".join(lines[block.start : block.end])
            try:
                html += render_block(text, self._budget)
            except OverBudgetError:
                html += render_unformatted(text, self._budget)
            done = following.start
            self._tail_is_slow = False
            self._enough_to_look = 0
        self._closed_to += sum(len(line) for line in lines[:done])
        return html

    def _close_plain(self) -> str:
        # The budget is spent: complete paragraphs are sent as plain text.
        end = self._text.rfind("\n\n", self._closed_to)
        text = self._text[self._closed_to : max(end, self._closed_to)].strip("\n")
        self._closed_to = max(end, self._closed_to)
        return render_unformatted(text, self._budget) if text else ""

    def _render_tail(self) -> str:
        tail = self._text[self._closed_to :]
        if not tail.strip(" \t\n"):
            return ""
        if self._tail_is_slow or len(tail) > MAX_TAIL_CHARACTERS or self._budget.spent:
            return render_plain(tail)
        try:
            return render_within(complete(tail), Deadline(TICK_SECONDS), colour=False)
        except OverBudgetError:
            self._tail_is_slow = True
            return render_plain(tail)
