"""Render Markdown incrementally: complete blocks once, and the rest (the tail) at each update."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from notso.web.rendering.budget import TICK_SECONDS, Budget, Deadline, OverBudgetError
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
    """HTML of newly completed blocks, to be appended, and of the tail, which replaces the previous tail."""

    closed: str
    tail: str


class StreamingMarkdown:
    """Renders growing text. Within the limits, the final result equals that of render_markdown."""

    def __init__(self, budget: Budget | None = None) -> None:
        # Only the rendering of complete blocks is charged to the message's budget. At each update, finding the blocks
        # and rendering the tail may take TICK_SECONDS each. If rendering the tail takes longer, the tail is shown as
        # plain text until its block ends. If finding the blocks takes longer, the next search waits until the length of
        # the text has doubled.
        self._budget = budget or Budget()
        self._text = ""
        self._cr = ""  # a trailing CR, which may be followed by LF
        self._closed_to = 0
        self._tail_is_slow = False
        self._min_search_characters = 0

    def feed(self, more: str) -> Rendered:
        """Append and render text. Blocks."""
        more = self._cr + more
        self._cr = "\r" if more.endswith("\r") else ""
        self._text += more.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")
        closed = self._close_plain() if self._budget.is_spent else self._close_blocks(Deadline(TICK_SECONDS))
        return Rendered(closed, self._render_tail())

    def finish(self) -> Rendered:
        rest = self._text[self._closed_to :] + self._cr
        self._text, self._cr, self._closed_to = self._text + self._cr, "", len(self._text) + len(self._cr)
        return Rendered(render_markdown(rest, budget=self._budget) if rest.strip(" \t\n") else "", "")

    def _close_blocks(self, tick: Deadline) -> str:
        complete = self._text.rfind("\n") + 1
        if complete - self._closed_to <= self._min_search_characters:
            return ""
        lines = LINE.findall(self._text[self._closed_to : complete])
        try:
            blocks = top_level_blocks("".join(lines), tick)
        except OverBudgetError:
            self._min_search_characters = 2 * (complete - self._closed_to)
            return ""
        html, done = "", 0
        # A block is complete once the first line of the next block is complete. Later text cannot change it.
        for block, following in pairwise(blocks):
            if done and tick.has_passed:
                break
            text = "".join(lines[block])
            try:
                html += render_block(text, self._budget)
            except OverBudgetError:
                html += render_unformatted(text, self._budget)
            done = following.start
            self._tail_is_slow = False
            self._min_search_characters = 0
        self._closed_to += sum(len(line) for line in lines[:done])
        return html

    def _close_plain(self) -> str:
        end = self._text.rfind("\n\n", self._closed_to)
        text = self._text[self._closed_to : max(end, self._closed_to)].strip("\n")
        self._closed_to = max(end, self._closed_to)
        return render_unformatted(text, self._budget) if text else ""

    def _render_tail(self) -> str:
        tail = self._text[self._closed_to :]
        if not tail.strip(" \t\n"):
            return ""
        if self._tail_is_slow or len(tail) > MAX_TAIL_CHARACTERS or self._budget.is_spent:
            return render_plain(tail)
        try:
            return render_within(complete(tail), Deadline(TICK_SECONDS), color=False)
        except OverBudgetError:
            self._tail_is_slow = True
            return render_plain(tail)


_TICKS = re.compile(r"`+")
_OPEN_CODE = re.compile(r"(?<!`)(`++)([^`]*+)$")
_OPEN_LINK = re.compile(r"!?\[([^\[\]\n]*)(?:\](?:\([^()\n]*)?)?$")
_OPEN_HEADING = re.compile(r"(?:^|(?<=\n)) {0,3}#{1,6}[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
_OPEN_FORMULA = re.compile(r"^ {0,3}(?:\$\$|\\\[|\\begin\{)", re.MULTILINE)
_PAIRS = ("~~", "**", "__", "*", "_")


def complete(tail: str) -> str:
    """Close the markup that is open in the last paragraph, or remove it if no content follows yet."""
    if len(_FENCE.findall(tail)) % 2:
        return tail
    start = tail.rfind("\n\n") + 1
    head, last = tail[:start], tail[start:]
    if _OPEN_FORMULA.search(last):
        return tail  # the content of a formula is not Markdown
    last = _OPEN_HEADING.sub("", last)
    outside = _mask_code(last)
    if code := _OPEN_CODE.search(outside):
        return head + (last.rstrip() + code[1] if code[2].strip() else last[: code.start()])
    if link := _OPEN_LINK.search(outside):
        last, outside = last[: link.start()] + link[1], outside[: link.start()] + link[1]
    for mark in _PAIRS:
        last, outside = _close_pair(last, outside, mark)
    return head + last


def _mask_code(text: str) -> str:
    runs = list(_TICKS.finditer(text))
    ends: list[int | None] = [None] * len(runs)
    # A code span ends at the next run of backticks with the same length. One backward pass finds all ends.
    seen: dict[int, int] = {}
    for number in reversed(range(len(runs))):
        length = len(runs[number][0])
        ends[number], seen[length] = seen.get(length), number
    parts, at, number = [], 0, 0
    while number < len(runs):
        end = ends[number]
        if end is not None:
            start, stop = runs[number].start(), runs[end].end()
            parts += [text[at:start], "x" * (stop - start)]
            at, number = stop, end
        number += 1
    return "".join([*parts, text[at:]])


def _close_pair(last: str, outside: str, mark: str) -> tuple[str, str]:
    # `outside` is `last` with code spans masked; both have the same length.
    character = re.escape(mark[0])
    runs = list(re.finditer(rf"(?<![\\{character}]){character}{{{len(mark)}}}(?!{character})", outside))
    openers = [run for run in runs if not _is_between_spaces(outside, run)]
    if len(openers) % 2 == 0:
        return last, outside
    opener = openers[-1]
    if not outside[opener.end() :].strip():
        return last[: opener.start()], outside[: opener.start()]
    if mark[0] == "_" and outside[: opener.start()][-1:].isalnum():
        return last, outside
    return last.rstrip() + mark, outside.rstrip() + mark


def _is_between_spaces(text: str, run: re.Match[str]) -> bool:
    # A list bullet, or an asterisk between spaces, is not emphasis.
    before, after = text[max(0, run.start() - 1) : run.start()], text[run.end() : run.end() + 1]
    return (not before or before.isspace()) and after.isspace()
