"""Convert the formulas of exported and shared pages to MathML, which browsers typeset without scripts or fonts.

latex2mathml is recursive, has no limits and copies markup in a formula to its output. Therefore, it runs in a child
process with limited CPU time, and its output may contain only allowlisted elements and attributes.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Awaitable, Callable
from html import escape, unescape
from typing import Any
from xml.etree import ElementTree

from notso.system.confinement import ConfinedWorkError, Limits, serve_confined

# A thousand typical formulas take about 1 s, and their MathML takes about 1 MiB. A short formula with macros can take
# any time and yield any amount of MathML.
LIMITS = Limits(cpu_s=10, memory_bytes=512 << 20, wall_s=60.0, answer_bytes=32 << 20)
FORMULA_SECONDS = 0.5  # CPU time per formula
MOST_AT_ONCE = 500
PAGE_SECONDS, PAGE_BYTES = 5.0, 16 << 20
"""CPU time and size of MathML after which the other formulas of a page, or of a part of an export, are left as TeX."""

_PROGRAM = "from notso.web.rendering.mathml import main; main()"
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


Formula = tuple[str, str]  # TeX, and "inline" or "display"
Convert = Callable[[tuple[Formula, ...]], Awaitable[list[str | None]]]


async def convert_formulas(html: str, convert: Convert | None = None) -> tuple[str, int]:
    """Convert the formulas in sanitized HTML to MathML. Return the HTML and the number of failures."""
    found = list(_FORMULA.finditer(html))
    converted = await (convert or convert_all)(tuple((unescape(each[3]), each[2]) for each in found))
    pieces, end = [], 0
    for formula, mathml in zip(found, converted, strict=True):
        pieces += [html[end : formula.start()], mathml or formula[0]]
        end = formula.end()
    return "".join(pieces) + html[end:], converted.count(None)


async def convert_all(found: tuple[Formula, ...]) -> list[str | None]:
    """Convert a page's formulas to MathML, or to None if that fails."""
    from notso.web.values.child_work import run_confined  # not at the top: loads asyncio, which the child does not need

    converted: list[str | None] = []
    seconds, size = 0.0, 0
    for at in range(0, len(found), MOST_AT_ONCE):
        if seconds >= PAGE_SECONDS or size >= PAGE_BYTES:
            converted += [None] * (len(found) - at)
            break
        part = found[at : at + MOST_AT_ONCE]
        limits = {"seconds": PAGE_SECONDS - seconds, "bytes": PAGE_BYTES - size}
        request = json.dumps({"formulas": part, **limits}).encode()
        try:
            answer = json.loads(await run_confined(_PROGRAM, request, LIMITS))
        except ConfinedWorkError:
            answer = {"mathml": [None] * len(part), "seconds": LIMITS.cpu_s}
        converted += answer["mathml"]
        seconds += answer["seconds"]
        size += sum(len(each or "") for each in answer["mathml"])
    return converted


def tex_to_mathml(tex: str, style: str) -> str | None:
    """Convert TeX to MathML, or return None if that fails. `style`: "inline" or "display"."""
    from latex2mathml.converter import convert

    try:
        root = ElementTree.fromstring(convert(tex, display="block" if style == "display" else "inline"))
    except Exception:  # latex2mathml raises various exceptions, and the timer raises TimeoutError
        return None
    return _sanitize(root, tex)


def _sanitize(root: ElementTree.Element, tex: str) -> str | None:
    for element in root.iter():
        name = element.tag.removeprefix(f"{{{_NAMESPACE}}}")
        # latex2mathml converts an unknown command to an identifier with the command's name, including the backslash.
        if name not in _ELEMENTS or (element.text or "").startswith("\\"):
            return None
        element.tag = name
        for attribute in [each for each in element.attrib if each not in _ATTRIBUTES]:
            del element.attrib[attribute]
    html = ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
    return html.replace("<math", f'<math alttext="{escape(tex)}"', 1)


def _convert(request: bytes) -> bytes:
    def on_timeout(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, on_timeout)
    asked, began = json.loads(request), time.process_time()
    converted: list[str | None] = []
    remaining = asked["bytes"]
    for tex, style in asked["formulas"]:
        if time.process_time() - began >= asked["seconds"]:
            converted.append(None)
            continue
        signal.setitimer(signal.ITIMER_VIRTUAL, FORMULA_SECONDS)
        try:
            mathml = tex_to_mathml(tex, style)
        except TimeoutError:
            mathml = None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if mathml is not None and len(mathml) > remaining:
            mathml = None
        remaining -= len(mathml or "")
        converted.append(mathml)
    return json.dumps({"mathml": converted, "seconds": time.process_time() - began}).encode()


def main() -> None:
    """Run the child process: convert the formulas on stdin."""
    import latex2mathml.converter  # noqa: F401  reads its tables before the process loses access to files

    serve_confined(_convert, LIMITS)
