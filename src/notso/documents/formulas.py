"""Superscripts and formulas as plain text.

Without marks, the text of `10<sup>6</sup>` would be 106, and that of a fraction 1/3 would be 13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from notso.documents.values import UnreadableError

MAX_DEPTH = 500
MAX_RAISED = 12  # longer texts are small print
_PLAIN, _RAISED = "0123456789+-\u2212=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ"
_SUPERSCRIPTS = str.maketrans(_PLAIN, _RAISED)
_ENCLOSED = re.compile(r"[\w.,]*|.|\([^()]*\)")
# A fraction or subscript at the end, and a fraction at the start.
_COMPOUND_END, _COMPOUND_START = re.compile(r"[/_](?:[^\W_]|[.,])+\Z"), re.compile(r"[\w.,]+/")
_SIMPLE = ("", "mn", "mi", "mo", "mtext", "ms", "r", "t")
_INVISIBLE = str.maketrans("", "", "\u2061\u2062\u2063\u2064")
_TEX = ("application/x-tex", "TeX", "LaTeX")


class Raised(str):
    """A piece of a superscript. A superscript may have several."""

    __slots__ = ()


def joined(pieces: Iterable[str]) -> str:
    """Join pieces of text, with superscripts as in `raised`."""
    groups = groupby(pieces, key=lambda each: isinstance(each, Raised))
    return "".join(raised("".join(group)) if is_raised else "".join(group) for is_raised, group in groups)


def raised(text: str) -> str:
    """Return superscript text of a sentence: `m²`, `10⁶`. Words and symbols (`1st`, `®`) are not changed."""
    core = text.strip()
    # Letters are more often ordinals (2e, XIXe) than exponents.
    if core.startswith("[") or len(core) > MAX_RAISED or not re.search("[0-9]", core):
        return text
    return text.replace(core, _power(core))


def _power(text: str) -> str:
    if text and set(text) <= set(_PLAIN):
        return text.translate(_SUPERSCRIPTS)
    return "^" + (text if len(text) == 1 else f"({text})") if text else ""


def _enclosed(text: str) -> str:
    return text if _ENCLOSED.fullmatch(text) else f"({text})"


def _base(text: str) -> str:
    return f"({text})" if text.endswith(tuple(_RAISED)) else _enclosed(text)


def _below(text: str) -> str:
    return f"_{_enclosed(text)}" if text else ""


def _scripts(texts: list[str]) -> str:
    # Of a list of lower and upper scripts in turn.
    return "".join(_below(low) + _power(high) for low, high in zip(texts[::2], texts[1::2], strict=False))


def _gap(before: str, after: str, is_simple: bool) -> str:
    # Without a space, 1 1/2 would be 11/2, and x_1 2 would be x_12. Several simple parts may be one number.
    if is_simple or not before or before[-1] in _RAISED or not (before[-1] + after[:1]).isalnum() or not after:
        return ""
    are_numbers = before[-1].isdecimal() and after[0].isdecimal() and not (before + after).isdecimal()
    return " " if are_numbers or _COMPOUND_END.search(before) or _COMPOUND_START.match(after) else ""


@dataclass
class _Element:
    name: str
    attributes: Mapping[str, str]
    parts: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)  # name ("": text), text, attributes
    settings: dict[str, str] = field(default_factory=dict)  # of Office Math, from elements such as `dPr`

    def texts(self, *names: str) -> list[str]:
        return [text for name, text, _ in self.parts if name and (not names or name in names)]

    def part(self, name: str, at: int) -> str:
        """Return a part by its name (Office Math) or position (MathML)."""
        found = self.texts(name) or self.texts()[at : at + 1]
        return found[0] if found else ""

    def whole(self) -> str:
        whole, last = "", ""
        for name, text, _ in self.parts:
            whole += _gap(whole[-MAX_RAISED:], text, name in _SIMPLE and last in _SIMPLE) + text
            last = name
        return whole


class Formula:
    """A formula in Office Math or MathML, received as elements. TeX that MathML contains is used unchanged."""

    def __init__(self) -> None:
        self._open = [_Element("", {})]

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Raises UnreadableError if elements are nested too deeply."""
        self._open.append(_Element(name, attributes))
        if len(self._open) > MAX_DEPTH:
            raise UnreadableError(f"has a formula nested more than {MAX_DEPTH:,} levels deep", "document_deep")

    def add(self, text: str) -> None:
        if not (text.isspace() and "\n" in text):  # indentation
            self._open[-1].parts.append(("", " ".join(re.split("[ \t\r\n]+", text.translate(_INVISIBLE))), {}))

    def end(self, name: str) -> None:
        if all(each.name != name for each in self._open[1:]):
            return
        while self._end_innermost() != name:
            pass

    def text(self) -> str:
        while len(self._open) > 1:
            self._end_innermost()
        return self._open[0].whole().strip()

    def _end_innermost(self) -> str:
        element = self._open.pop()
        above, value = self._open[-1], element.attributes.get("val")
        if element.name.endswith("Pr"):
            above.settings |= element.settings
        elif value is not None and not element.parts:
            above.settings[element.name] = value
        else:
            above.parts.append((element.name, _linear(element), element.attributes))
        return element.name


def _linear(element: _Element) -> str:
    part, settings, attributes = element.part, element.settings, element.attributes
    match element.name:
        case "math" if attributes.get("alttext"):
            return f"${attributes['alttext']}$"
        case "semantics":
            tex = [text for _, text, given in element.parts if given.get("encoding") in _TEX]
            return f"${tex[0].strip()}$" if tex else element.whole()
        case "annotation" | "annotation-xml" if attributes.get("encoding") not in _TEX:
            return ""
        case "f" | "mfrac":
            above, below = _enclosed(part("num", 0)), _enclosed(part("den", 1))
            is_bare = settings.get("type") == "noBar" or attributes.get("linethickness", "").rstrip("ptexm") == "0"
            return f"({above}; {below})" if is_bare else f"{above}/{below}"
        case "sSup" | "msup":
            return _base(part("e", 0)) + _power(part("sup", 1))
        case "sSub" | "msub":
            return _enclosed(part("e", 0)) + _below(part("sub", 1))
        case "sSubSup" | "msubsup" | "munderover":
            return _enclosed(part("e", 0)) + _below(part("sub", 1)) + _power(part("sup", 2))
        case "sPre":
            scripts = _scripts([part("sub", 0), part("sup", 1)])
            return f"{scripts}{_gap(scripts, part('e', 2), False)}{part('e', 2)}"
        case "mmultiscripts":
            names = [name for name, _, _ in element.parts if name]
            end = names.index("mprescripts") if "mprescripts" in names else len(names)
            (base, *after), scripts = [*element.texts()[:end], ""][: max(1, end)], _scripts(element.texts()[end + 1 :])
            return f"{scripts}{_gap(scripts, base, False)}{_enclosed(base)}{_scripts(after)}"
        case "limLow" | "munder":
            return part("e", 0) + _below(part("lim", 1))
        case "limUpp" | "mover":
            above = part("lim", 1)
            return part("e", 0) + (_power(above) if above.isalnum() else above)
        case "rad" | "msqrt" | "mroot":
            base = element.whole() if element.name == "msqrt" else part("e", 0)
            degree = "" if element.name == "msqrt" else "".join(element.texts("deg") or element.texts()[1:])
            return f"{_power(degree)}√{base if base.isalnum() else f'({base})'}"
        case "nary":
            ends = _below("".join(element.texts("sub"))) + _power("".join(element.texts("sup")))
            return f"{settings.get('chr', '∫')}{ends} {''.join(element.texts('e'))}"
        case "func":
            return f"{part('fName', 0)} {part('e', 1)}"
        case "d":
            inner = settings.get("sepChr", "|").join(element.texts())
            return f"{settings.get('begChr', '(')}{inner}{settings.get('endChr', ')')}"
        case "mfenced":
            return f"{attributes.get('open', '(')}{', '.join(element.texts())}{attributes.get('close', ')')}"
        case "mr" | "mtr":
            return ", ".join(element.texts())
        case "m" | "mtable" | "eqArr":
            return f"[{'; '.join(element.texts())}]"
        case "mspace":
            return " "
        case "mphantom" | "phant" | "style" | "script":
            return ""
    return element.whole()
