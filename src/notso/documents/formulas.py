"""Convert superscripts, formulas, symbols and list numbers to plain text.

Without marks, the text of `10<sup>6</sup>` would be 106, and that of the fraction 1/3 would be 13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from notso.documents.archives import XMLEvent
from notso.documents.values import UnreadableError

MAX_DEPTH = 500
SLASHES = ("/", "\u2044")
MAX_RAISED = 12  # maximum length of a superscript; longer raised text is small print
_PLAIN, _RAISED = "0123456789+-\u2212=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ"
_SUPERSCRIPTS = str.maketrans(_PLAIN, _RAISED)
_ENCLOSED = re.compile(r"[\w.,]*|.|\([^()]*\)")
# Match a fraction or subscript at the end of a text, and a fraction at its start.
_COMPOUND_END, _COMPOUND_START = re.compile(r"[/_](?:[^\W_]|[.,])+\Z"), re.compile(r"[\w.,]+/")
_SIMPLE = ("", "mn", "mi", "mo", "mtext", "ms", "r", "t")
_INVISIBLE = str.maketrans("", "", "\u2061\u2062\u2063\u2064")
_TEX = ("application/x-tex", "TeX", "LaTeX")

MAX_LEVEL = 8  # maximum level of lists; the outermost level is 0
MAX_LABEL = 100  # maximum length of a label
# Names of number formats in HTML, style sheets and Office Open XML -> the names that `numeral` uses.
_FORMATS = {
    **dict.fromkeys(("lower-alpha", "lower-latin"), "a"),
    **dict.fromkeys(("upper-alpha", "upper-latin"), "A"),
    **dict.fromkeys(("lower-roman", "lowerRoman", "romanLc"), "i"),
    **dict.fromkeys(("upper-roman", "upperRoman", "romanUc"), "I"),
    **dict.fromkeys(("decimal-leading-zero", "decimalZero", "01, 02, 03, ..."), "01"),
    **{"alphaLc": "lowerLetter", "alphaUc": "upperLetter", "ea1JpnChs": "japaneseCounting"},
    **{"1st": "ordinal", "cardinalText": "One", "ordinalText": "First", "*, †, ‡, §, **, ††, ...": "chicago"},
    **{"ideographTraditional": "甲, 乙, 丙, ..."},
    **dict.fromkeys(("decimalEnclosedCircle", "circleNumDb", "circleNumWdWhite", "circleNumWdBlack"), "①, ②, ③, ..."),
    **dict.fromkeys(("chineseCounting", "chineseCountingThousand", "ea1Chs", "ea1Cht"), "一, 二, 三, ..."),
    **dict.fromkeys(("taiwaneseCounting", "taiwaneseCountingThousand"), "一, 二, 三, ..."),
}
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_CARDINALS = "One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve"
_ORDINALS = "First Second Third Fourth Fifth Sixth Seventh Eighth Ninth Tenth Eleventh Twelfth"
_FEW: dict[str, Sequence[str]] = {  # larger numbers are written in decimal digits
    "One": _CARDINALS.split(),
    "First": _ORDINALS.split(),
    "①, ②, ③, ...": "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳",
    "甲, 乙, 丙, ...": "甲乙丙丁戊己庚辛壬癸",
}
_ALPHABETS = {  # after the last letter, letters are doubled: z, aa, bb
    "lowerLetter": _LATIN,
    "upperLetter": _LATIN.upper(),
    "russianLower": "абвгдежзиклмнопрстуфхцчшщыэюя",
    "russianUpper": "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩЫЭЮЯ",
    "arabicAlpha": "أبتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "arabicAbjad": "أبجدهوزحطيكلمنسعفصقرشتثخذضظغ",
    "ganada": "가나다라마바사아자차카타파하",
    "aiueoFullWidth": "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲン",
    "chicago": "*†‡§",
}

# Characters of fonts that do not use Unicode: font -> code -> character.
_SYMBOLS = {
    "Wingdings": dict(zip(b"o\xa8q\xfex\xfd\xfc\xfb\xe0", "☐☐☐☑☒☒✓✗→", strict=True)),
    "Wingdings 2": dict(zip(b"\xa3RTPO", "☐☑☒✓✗", strict=True)),
    "Symbol": {code: chr(code) for code in b" !#%&()+,-./0123456789:;<=>?[]_{|}"}
    | dict(
        zip(
            b"ABGDEZHQIKLMNXOPRSTUFCYWabgdezhqiklmnxoprstufcyw\xa3\xb3\xb1\xb4\xb0\xb9\xbb\xa5\xb6\xd6\xe5\xf2\xae\xb8\xce"
            b"j@~\xd7\xb7\xba\xb5\xa2\xb2\xd5\xd1\xac\xab\xde\xdb",
            "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩαβγδεζηθικλμνξοπρστυφχψω≤≥±×°≠≈∞∂√∑∫→÷∈ϕ≅∼⋅•≡∝′″∏∇←↔⇒⇔",
            strict=True,
        )
    ),
}


class Raised(str):
    """A superscript, or a piece of one."""

    __slots__ = ()


class Struck(str):
    __slots__ = ()


class Lowered(str):
    __slots__ = ()


SCRIPTS: dict[str, type[str]] = {"superscript": Raised, "subscript": Lowered}
"""Values of `vertAlign` in Office Open XML."""


def joined(pieces: Iterable[str]) -> str:
    """Join pieces of text, with superscripts as in `raised`."""
    forms: dict[type[str], Callable[[str], str]] = {Raised: raised, Struck: _struck}
    texts, last, is_lowered = list[str](), "", False
    groups = [(kind, "".join(group)) for kind, group in groupby(pieces, key=type)]
    for at, (kind, text) in enumerate(groups):
        (slash_kind, slash), (under_kind, under) = [*groups[at + 1 : at + 3], (str, ""), (str, "")][:2]
        if kind is Raised and slash in SLASHES and (slash_kind, under_kind) == (str, Lowered) and under[:1].isdecimal():
            text = f" {text}" if last.isdecimal() and text.isdecimal() else text  # a mixed fraction, such as 3 1/2
        else:
            text = forms.get(kind, str)(text)
        if last.isdecimal() and text[:1].isdecimal() and (is_lowered or kind is Lowered):
            texts.append("_" if kind is Lowered else " ")  # as in 101_2 and log10 100
        texts.append(text)
        last, is_lowered = text[-1:] or last, kind is Lowered
    return "".join(texts)


def _struck(text: str) -> str:
    # Without marks, a struck-through price of 100 before a new price of 80 would become 10080.
    core = text.strip()
    return text.replace(core, f"~~{core}~~") if core else text


def raised(text: str) -> str:
    """Return a superscript as plain text, as in `m²` and `10⁶`. One without digits, such as `®`, is unchanged."""
    core = text.strip()
    # Raised letters more often belong to ordinals (2e, XIXe) than to exponents.
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
    # texts: alternately subscripts and superscripts.
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
        # Returns the text of a part, found by its name (Office Math) or position (MathML).
        found = self.texts(name) or self.texts()[at : at + 1]
        return found[0] if found else ""

    def whole(self) -> str:
        whole, last = "", ""
        for name, text, _ in self.parts:
            whole += _gap(whole[-MAX_RAISED:], text, name in _SIMPLE and last in _SIMPLE) + text
            last = name
        return whole


class Formula:
    """A formula in Office Math or MathML, built from its elements. TeX that MathML contains is used unchanged."""

    def __init__(self) -> None:
        self._open = [_Element("", {})]

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Begin an element. Raises UnreadableError if elements are nested too deeply."""
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


def formulas_as_text(events: Iterable[XMLEvent]) -> Iterator[XMLEvent]:
    # Replaces each formula in Office Math with one text element.
    formula, depth, in_text = Formula(), 0, False
    for event in events:
        step = {"start": 1, "text": 0, "end": -1}[event.kind]
        if step and event.name == "oMath":  # may be nested
            depth += step
            if not depth:
                yield from (XMLEvent("start", "t", {}), XMLEvent("text", formula.text(), {}), XMLEvent("end", "t", {}))
                formula = Formula()
        elif not depth:
            yield event
        elif not step:
            if in_text:
                formula.add(event.name)
        elif step > 0:
            in_text = event.name == "t"
            formula.start(event.name, event.attributes)
        else:
            in_text = False
            formula.end(event.name)


def unicode_text(text: str, font: str, is_private: bool = False) -> str:
    # Converts text in a font that does not use Unicode. is_private: convert only characters of the private use area.
    symbols = _SYMBOLS.get(font)
    if symbols is None:
        return text
    codes = ((ord(each) & 0xFF if "\uf000" <= each <= "\uf0ff" else -1 if is_private else ord(each)) for each in text)
    return "".join(symbols.get(code, each) for code, each in zip(codes, text, strict=True))


def symbol(font: str, code: str) -> str:
    number = int(code, 16) if re.fullmatch("[0-9A-Fa-f]{1,4}", code) else 0
    text = chr(number) if 0x20 <= number < 0xD800 and font not in _SYMBOLS else ""  # above: surrogates, private use
    return _SYMBOLS.get(font, {}).get(number & 0xFF, text)


def numeral(number: int, form: str) -> str:
    # form: a number format of Office Open XML, OpenDocument or HTML; unknown formats are decimal.
    form = _FORMATS.get(form, form)
    if re.fullmatch("0{1,4}1", form):
        return str(number).zfill(len(form))
    if form == "ordinal":
        return f"{number}{'th' if number // 10 % 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
    if number < 1:
        return str(number)
    if number <= len(_FEW.get(form, "")):
        return _FEW[form][number - 1]
    if form in ("a", "A"):
        return _letters(number) if form == "a" else _letters(number).upper()
    if form in ("i", "I") and number < 4000:
        return _roman(number).lower() if form == "i" else _roman(number)
    if form in ("一, 二, 三, ...", "japaneseCounting") and number < 10_000:
        return _chinese(number, form == "japaneseCounting")
    letters = _ALPHABETS.get(form, "")
    doubled, place = divmod(number - 1, len(letters) or 1)
    return letters[place] * (doubled + 1) if letters and doubled < MAX_LABEL else str(number)


def _letters(number: int) -> str:  # z, aa, ab
    text = ""
    while number:
        number, digit = divmod(number - 1, 26)
        text = _LATIN[digit] + text
    return text


def _roman(number: int) -> str:
    places = zip(f"{number:04}", "MCXI", " DLV", " MCX", strict=True)
    return "".join(
        ("", a, a * 2, a * 3, a + b, b, b + a, b + a * 2, b + a * 3, a + c)[int(digit)] for digit, a, b, c in places
    )


def _chinese(number: int, is_japanese: bool) -> str:
    places = zip(f"{number:04}", ("千", "百", "十", ""), strict=True)
    text = "".join("零一二三四五六七八九"[int(digit)] + unit * (digit > "0") for digit, unit in places)
    if is_japanese:
        return re.sub("零|一(?=[十百])", "", text)
    return re.sub("零+", "零", text).strip("零").removeprefix("一" if 10 <= number < 20 else " ")


def slide_label(form: str, number: int) -> str:
    # form: PowerPoint's name for a number format and its punctuation, such as arabicPeriod.
    found = re.fullmatch("([A-Za-z0-9]+?)(Period|ParenR|ParenBoth|Plain|Minus)", form)
    style, punctuation = found.groups() if found else ("", "Period")
    marks = {"Period": "{}.", "ParenR": "{})", "ParenBoth": "({})", "Plain": "{}", "Minus": "{}-"}
    return marks[punctuation].format(numeral(number, style))


@dataclass(slots=True)
class ListLevel:
    form: str = ""
    text: str = ""  # as in Office Open XML, such as `%1.%2`
    start: int = 0
    restarts_after: int = MAX_LEVEL  # an item of a level below this number restarts the numbering
    is_decimal: bool = False


class ListNumbers:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # level -> number of the current item, or of the item that contains it

    def restart(self, level: int) -> None:
        self._numbers = {at: number for at, number in self._numbers.items() if at < level}

    def next(self, levels: Mapping[int, ListLevel], level: int, start: int | None = None) -> str:
        # Numbers an item (from `start`, if given), and returns its label.
        numbers, own = self._numbers, levels.get(level, ListLevel())
        for outer in range(level):  # a level without an item is counted as well
            numbers.setdefault(outer, levels.get(outer, ListLevel()).start)
        numbers[level] = start if start is not None else numbers[level] + 1 if level in numbers else own.start
        for inner in range(level + 1, MAX_LEVEL + 1):
            if level < levels.get(inner, ListLevel()).restarts_after:
                numbers.pop(inner, None)

        def shown(found: re.Match[str]) -> str:
            at = int(found[1]) - 1
            form = levels.get(at, ListLevel()).form
            if at > level or form in ("none", "bullet"):
                return ""
            return numeral(numbers[at], "decimal" if own.is_decimal else form) + found[2]

        return " ".join(re.sub(r"%([1-9])(\.(?=%)|)", shown, own.text[:MAX_LABEL])[:MAX_LABEL].split())
