"""TeX in Markdown: $x$, $$x$$, \\(x\\), \\[x\\] and \\begin{align}, detected here and typeset by the page.

A displayed formula begins a line and ends with its own mark or, as in TeX, a blank line. Its first line therefore
decides, and growing text never changes a block already shown. Formulas that are unclosed or too long stay text, as do
lone dollar signs, which are prices.

Formulas of an exported page as MathML, which browsers typeset without scripts or fonts.

latex2mathml is recursive, has no limits and passes markup through, so it runs in a child process with limited CPU time,
and only the elements and attributes of MathML that it needs are kept. This file is also the child's program.
"""

from __future__ import annotations

import json
import re
import signal
from html import escape, unescape
from typing import Any
from xml.etree import ElementTree

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

from notso.system.confinement import ConfinedWorkError, Limits, serve_one
from notso.web.values.child_work import confined

# A thousand ordinary formulas take about 1 s.
LIMITS = Limits(cpu_s=10, memory_bytes=512 << 20, wall_s=60.0, answer_bytes=32 << 20)
FORMULA_SECONDS = 0.5
MOST_AT_ONCE = 500

_PROGRAM = "from notso.web.rendering.math import main; main()"
_FORMULA = re.compile(r'<(span|div) class="math (inline|display)">([^<]*)</\1>')
_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
_ELEMENTS = frozenset(
    {
        *("math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "msub", "msup", "msubsup", "munder", "mover"),
        *("munderover", "mmultiscripts", "mprescripts", "mfrac", "msqrt", "mroot", "mtable", "mtr", "mtd", "mstyle"),
        *("mpadded", "mphantom", "menclose", "merror", "none"),
    }
)
_ATTRIBUTES = frozenset(
    {
        *("display", "displaystyle", "scriptlevel", "mathvariant", "stretchy", "fence", "separator", "accent"),
        *("accentunder", "movablelimits", "largeop", "symmetric", "minsize", "maxsize", "lspace", "rspace", "width"),
        *("height", "depth", "voffset", "linethickness", "columnalign", "rowspacing", "columnspacing", "columnlines"),
        *("rowlines", "notation", "form", "mathcolor"),
    }
)


async def with_mathml(html: str) -> tuple[str, int]:
    """Replace the formulas in sanitized HTML by MathML; return the number of those that stay TeX, too."""
    found = list(_FORMULA.finditer(html))
    made: list[str | None] = []
    for at in range(0, len(found), MOST_AT_ONCE):
        part = [[unescape(each[3]), each[2]] for each in found[at : at + MOST_AT_ONCE]]
        try:
            made += json.loads(await confined(_PROGRAM, json.dumps(part).encode(), LIMITS))
        except ConfinedWorkError:
            made += [None] * len(part)
    pieces, end = [], 0
    for formula, mathml in zip(found, made, strict=True):
        pieces += [html[end : formula.start()], mathml or formula[0]]
        end = formula.end()
    return "".join(pieces) + html[end:], made.count(None)


def mathml_of(tex: str, look: str) -> str | None:
    """Return a formula ("inline" or "display") as MathML, or None if it cannot be converted."""
    from latex2mathml.converter import convert

    try:
        root = ElementTree.fromstring(convert(tex, display="block" if look == "display" else "inline"))
    except Exception:  # latex2mathml raises what its parts happen to raise; also a formula's time limit
        return None
    return _safe(root, tex)


def _safe(root: ElementTree.Element, tex: str) -> str | None:
    for element in root.iter():
        name = element.tag.removeprefix(f"{{{_NAMESPACE}}}")
        # An unknown command becomes an identifier of its name.
        if name not in _ELEMENTS or (element.text or "").startswith("\\"):
            return None
        element.tag = name
        for attribute in [each for each in element.attrib if each not in _ATTRIBUTES]:
            del element.attrib[attribute]
    html = ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
    return html.replace("<math", f'<math alttext="{escape(tex)}"', 1)


def _convert(request: bytes) -> bytes:
    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    made = []
    for tex, look in json.loads(request):
        signal.setitimer(signal.ITIMER_REAL, FORMULA_SECONDS)
        try:
            made.append(mathml_of(tex, look))
        except TimeoutError:
            made.append(None)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return json.dumps(made).encode()


def main() -> None:
    """Child process: convert the formulas on stdin."""
    import latex2mathml.converter  # noqa: F401  it reads its tables before files are closed to the process

    serve_one(_convert, LIMITS)


MAX_FORMULA_CHARACTERS = 2_000
MAX_INLINE_CHARACTERS = 1_000  # limits the search after each of a thousand lone dollar signs

_MARKS = {"$$": "$$", "\\[": "\\]"}
# Environments that are formulas of their own, without dollars around them.
_ENVIRONMENT = re.compile(r"\\begin\{((?:align|alignat|equation|gather|CD)\*?)\}")
_IS_TEX = re.compile(r"[\\^_={}]")


def enable_math(parser: MarkdownIt) -> None:
    interrupted = ["paragraph", "blockquote", "list", "table"]
    parser.block.ruler.before("fence", "formula", _block, {"alt": interrupted})
    parser.inline.ruler.before("escape", "formula_inline", _inline)


def formula_html(tex: str, kind: str) -> str:
    """Return the element that the page's script typesets; without it the source is shown."""
    tag = "div" if kind == "block" else "span"
    look = "inline" if kind == "inline" else "display"
    return f'<{tag} class="math {look}">{escape(tex.strip(), quote=False)}</{tag}>'


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
        return False  # text follows: an inline formula of a paragraph
    if silent:
        return True
    lines, line = [body], start + 1
    while not found and line < end and not state.isEmpty(line) and state.sCount[line] >= state.blkIndent:
        body, found, after = _line(state, line).partition(closing)
        lines.append(body)
        line += 1
    tex = "\n".join(lines)
    whole = bool(found) and not after.strip() and bool(tex.strip()) and len(tex) <= MAX_FORMULA_CHARACTERS
    token = state.push("formula" if whole else "plain", "", 0)
    token.content = tex if whole else state.getLines(start, line, state.blkIndent, False)
    token.map = [start, line]
    state.line = line
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
    whole = tex.endswith(closing) and len(tex) <= MAX_FORMULA_CHARACTERS
    token = state.push("formula" if whole else "plain", "", 0)
    token.content = tex if whole else state.getLines(start, line, state.blkIndent, False)
    token.map = [start, line]
    state.line = line
    return True


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()


def _inline(state: StateInline, silent: bool) -> bool:
    source, start = state.src, state.pos
    mark = source[start : start + 2]
    if mark in ("\\(", "\\[", "$$"):
        closing, kind = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}[mark], "inline" if mark == "\\(" else "display"
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
    """Return the end of `$x$`, or -1."""
    # Only the next dollar sign counts: text between two prices is no formula. No letter or digit just outside of the
    # dollars. Spaces just inside only on both sides, and of what no price holds.
    inside = source[start + 1 : start + 2]
    if not inside or source[:start][-1:].isalnum():
        return -1
    at = source.find("$", start + 1, start + MAX_INLINE_CHARACTERS)
    while at >= 0 and source[at - 1] == "\\":
        at = source.find("$", at + 1, start + MAX_INLINE_CHARACTERS)
    after = source[at + 1 : at + 2]
    if at < 0 or after.isalnum() or after == "$" or inside.isspace() != source[at - 1].isspace():
        return -1
    return -1 if inside.isspace() and not _IS_TEX.search(source, start + 1, at) else at
