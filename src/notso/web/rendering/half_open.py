"""Temporary closing of incomplete Markdown, so that no marks flicker while text streams.

Only the open tail passes through here. The final text never does, so the next update corrects a wrong guess.
"""

from __future__ import annotations

import re

_TICKS = re.compile(r"`+")
_OPEN_CODE = re.compile(r"(?<!`)(`++)([^`]*+)$")
_OPEN_LINK = re.compile(r"!?\[([^\[\]\n]*)(?:\](?:\([^()\n]*)?)?$")
_OPEN_HEADING = re.compile(r"(?:^|(?<=\n)) {0,3}#{1,6}[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
_OPEN_FORMULA = re.compile(r"^ {0,3}(?:\$\$|\\\[|\\begin\{)", re.MULTILINE)
_PAIRS = ("~~", "**", "__", "*", "_")


def complete(tail: str) -> str:
    """Close the markup left open in the last paragraph, or drop it if nothing follows it yet."""
    if len(_FENCE.findall(tail)) % 2:
        return tail
    start = tail.rfind("\n\n") + 1
    head, last = tail[:start], tail[start:]
    if _OPEN_FORMULA.search(last):
        return tail  # marks in a formula are not Markdown
    last = _OPEN_HEADING.sub("", last)
    outside = _without_code(last)
    if code := _OPEN_CODE.search(outside):
        return head + (last.rstrip() + code[1] if code[2].strip() else last[: code.start()])
    if link := _OPEN_LINK.search(outside):
        last, outside = last[: link.start()] + link[1], outside[: link.start()] + link[1]
    for mark in _PAIRS:
        last, outside = _close(last, outside, mark)
    return head + last


def _without_code(text: str) -> str:
    """Blank code spans, keeping the length."""
    runs = list(_TICKS.finditer(text))
    ends: list[int | None] = [None] * len(runs)
    # A code span ends at the next run of backticks of the same length; found in one backward pass.
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


def _close(last: str, outside: str, mark: str) -> tuple[str, str]:
    # `outside` is `last` with blanked code spans, equally long.
    character = re.escape(mark[0])
    runs = list(re.finditer(rf"(?<![\\{character}]){character}{{{len(mark)}}}(?!{character})", outside))
    openers = [run for run in runs if not _between_blanks(outside, run)]
    if len(openers) % 2 == 0:
        return last, outside
    opener = openers[-1]
    if not outside[opener.end() :].strip():
        return last[: opener.start()], outside[: opener.start()]
    if mark[0] == "_" and outside[: opener.start()][-1:].isalnum():
        return last, outside
    return last.rstrip() + mark, outside.rstrip() + mark


def _between_blanks(text: str, run: re.Match[str]) -> bool:
    # A list bullet, or a star between spaces, is no emphasis.
    before, after = text[: run.start()][-1:], text[run.end() : run.end() + 1]
    return (not before or before.isspace()) and after.isspace()
