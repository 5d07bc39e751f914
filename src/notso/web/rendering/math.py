r"""Detect TeX in Markdown: $x$, $$x$$, \(x\), \[x\] and \begin{align}. The page typesets it.

A block formula starts at the beginning of a line. It is recognized by its first line, so text that arrives later never
changes a complete block. Overlong formulas, and those that are not closed before the next blank line, remain text. So
do lone dollar signs, which usually denote prices.
"""

from __future__ import annotations

import re
from html import escape

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_FORMULA_CHARACTERS = 2_000
MAX_INLINE_CHARACTERS = 1_000  # limits the search for a closing delimiter after each opening one

_MARKS = {"$$": "$$", "\\[": "\\]"}
_INLINE_MARKS = _MARKS | {"\\(": "\\)"}
# Environments that are display formulas even without dollar signs around them.
_ENVIRONMENT = re.compile(r"\\begin\{((?:align|alignat|equation|gather|CD)\*?)\}")
_IS_TEX = re.compile(r"[\\^_={}]")


def enable_math(parser: MarkdownIt) -> None:
    """Add parser rules that produce the tokens `formula` (a block) and `formula_inline` with TeX as their content."""
    interrupted = ["paragraph", "blockquote", "list", "table"]
    parser.block.ruler.before("fence", "formula", _block, {"alt": interrupted})
    parser.inline.ruler.before("escape", "formula_inline", _inline)


def formula_html(tex: str, kind: str) -> str:
    """Return an element with TeX source, which a script on the page typesets."""
    tag = "div" if kind == "block" else "span"
    style = "inline" if kind == "inline" else "display"
    return f'<{tag} class="math {style}">{escape(tex.strip(), quote=False)}</{tag}>'


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if state.is_code_block(start):
        return False
    first = _line(state, start)
    environment = _ENVIRONMENT.match(first)
    if environment is not None:
        return _environment(state, start, end, environment[1], silent)
    closing = _MARKS.get(first[:2])
    if closing is None or first[2:3] == "$":
        return False
    body, found, after = first[2:].partition(closing)
    if found and (after.strip() or not body.strip()):
        return False  # empty, or followed by text: may be an inline formula, but is not a block
    if silent:
        return True
    lines, line = [body], start + 1
    while not found and line < end and not state.isEmpty(line) and state.sCount[line] >= state.blkIndent:
        body, found, after = _line(state, line).partition(closing)
        lines.append(body)
        line += 1
    tex = "\n".join(lines)
    _push_block(state, start, line, tex, is_closed=bool(found) and not after.strip() and bool(tex.strip()))
    return True


def _environment(state: StateBlock, start: int, end: int, name: str, silent: bool) -> bool:
    if silent:
        return True
    closing, lines, line = f"\\end{{{name}}}", [], start
    while line < end and not state.isEmpty(line) and (line == start or state.sCount[line] >= state.blkIndent):
        lines.append(_line(state, line))
        line += 1
        if closing in lines[-1]:
            break
    tex = "\n".join(lines)
    _push_block(state, start, line, tex, is_closed=tex.endswith(closing))
    return True


def _push_block(state: StateBlock, start: int, end: int, tex: str, *, is_closed: bool) -> None:
    is_formula = is_closed and len(tex) <= MAX_FORMULA_CHARACTERS
    token = state.push("formula" if is_formula else "plain", "", 0)
    token.content = tex if is_formula else state.getLines(start, end, state.blkIndent, False)
    token.map = [start, end]
    state.line = end


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()


def _inline(state: StateInline, silent: bool) -> bool:
    source, start = state.src, state.pos
    mark = source[start : start + 2]
    if mark in _INLINE_MARKS:
        closing, kind = _INLINE_MARKS[mark], "display" if mark in _MARKS else "inline"
        first = start + 2
        last = source.find(closing, first, first + MAX_INLINE_CHARACTERS)
    elif source[start] == "$":
        closing, kind, first = "$", "inline", start + 1
        last = _closing_dollar(source, start)
    else:
        return False
    if last < 0 or not source[first:last].strip():
        return False
    if not silent:
        token = state.push("formula_inline", "", 0)
        token.content, token.info = source[first:last], kind
    state.pos = last + len(closing)
    return True


def _closing_dollar(source: str, start: int) -> int:
    # Only the next unescaped dollar sign can close a formula. Text between two prices is not a formula, so no letter or
    # digit may touch a dollar sign from outside. Inside, spaces must touch both dollar signs or neither. If they touch
    # both, the content must contain a character that is typical of TeX.
    inside = source[start + 1 : start + 2]
    if not inside or source[max(0, start - 1) : start].isalnum():
        return -1
    at = source.find("$", start + 1, start + MAX_INLINE_CHARACTERS)
    while at >= 0 and source[at - 1] == "\\":
        at = source.find("$", at + 1, start + MAX_INLINE_CHARACTERS)
    after = source[at + 1 : at + 2]
    if at < 0 or after.isalnum() or after == "$" or inside.isspace() != source[at - 1].isspace():
        return -1
    return -1 if inside.isspace() and not _IS_TEX.search(source, start + 1, at) else at
