"""Grammars in GBNF, llama.cpp's notation, told in Lark's.

    root ::= "yes" | "no" [.!]?

Every character becomes a terminal of its own: the library's lexer takes the longest it finds, and where all are of one
length there is nothing to choose.
"""

from __future__ import annotations

import json
import re

from notso.smollm3.errors import InvalidRequestError

MAX_NESTED = 64

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\r\n]*)
      | (?P<line>\r\n?|\n)
      | (?P<name>[a-zA-Z0-9_-]+)
      | (?P<is>::=)
      | (?P<text>"(?:\\.|[^"\\\r\n])*+")
      | (?P<set>\[(?:\\.|[^\]\\\r\n])++\])
      | (?P<repeat>[*+?]|\{[ \t]*[0-9]{1,6}[ \t]*(?:,[ \t]*(?:[0-9]{1,6}[ \t]*)?)?\})
      | (?P<mark>[|().])""",
    re.VERBOSE,
)
_LETTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<plain>.))|(?P<self>.)", re.DOTALL
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}


def lark_of_gbnf(source: str, param: str) -> str:
    """The same grammar in Lark's notation. Raises InvalidRequestError, which says in which line it is wrong."""
    return _Translation(source, param).lark()


class _Translation:
    def __init__(self, source: str, param: str) -> None:
        self._source = source
        self._param = param
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise self._fault(at, f"{source[at]!r} cannot stand here")
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found.group(), at))
            at = found.end()
        self._tokens.append(("end", "", at))
        self._at = 0
        self._rules: dict[str, str] = {}

    def lark(self) -> str:
        """All rules, each by a number: names mean something in Lark."""
        bodies: dict[str, str] = {}
        self._skip_lines()
        while self._kind != "end":
            at = self._tokens[self._at][2]
            name = self._take("name")
            self._skip_lines()
            self._take("is")
            self._skip_lines()
            if name in bodies:
                raise self._fault(at, f"{name} is there twice")
            bodies[name] = self._options(0)
            if self._kind not in ("line", "end"):
                raise self._fault(self._tokens[self._at][2], f"{self._tokens[self._at][1]!r} cannot stand here")
            self._skip_lines()
        for name in (*self._rules, "root"):
            if name not in bodies:
                raise InvalidRequestError(f"the grammar is refused: there is no rule {name[:80]}", param=self._param)
        lines = [f"start: {self._rule('root')}"]
        return "\n".join((*lines, *(f"{self._rule(name)}: {body}" for name, body in bodies.items())))

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _take(self, kind: str) -> str:
        found, text, at = self._tokens[self._at]
        if found != kind:
            raise self._fault(at, f"{kind if kind != 'is' else '::='} is missing")
        self._at += 1
        return text

    def _skip_lines(self) -> None:
        while self._kind == "line":
            self._at += 1

    def _rule(self, name: str) -> str:
        return self._rules.setdefault(name, f"r{len(self._rules)}")

    def _options(self, nested: int) -> str:
        if nested > MAX_NESTED:
            raise self._fault(self._tokens[self._at][2], f"it is nested deeper than {MAX_NESTED}")
        options = [self._sequence(nested)]
        while self._tokens[self._at][1] == "|":
            self._at += 1
            self._skip_lines()
            options.append(self._sequence(nested))
        return " | ".join(options)

    def _sequence(self, nested: int) -> str:
        parts: list[str] = []
        repeats = 0
        while True:
            kind, text, at = self._tokens[self._at]
            if kind == "line" and nested:
                self._skip_lines()
            elif kind == "repeat":
                if not parts:
                    raise self._fault(at, f"{text} repeats nothing")
                repeats += 1
                if repeats > MAX_NESTED:
                    raise self._fault(at, f"it is repeated more than {MAX_NESTED} times over")
                self._at += 1
                parts[-1] = f"({parts[-1]}){''.join(text.split())}"
            elif kind in ("name", "text", "set") or text in ("(", "."):
                self._at += 1
                repeats = 0
                parts.append(self._part(kind, text, at, nested))
            else:
                return " ".join(parts) or '""'

    def _part(self, kind: str, text: str, at: int, nested: int) -> str:
        if kind == "name":
            return self._rule(text)
        if kind == "text":
            letters = self._letters(text[1:-1], at)
            return (
                "(" + " ".join(json.dumps(letter, ensure_ascii=False) for letter, _ in letters) + ")"
                if letters
                else '""'
            )
        if kind == "set":
            return self._set(text[1:-1], at)
        if text == ".":
            return "/(?s:.)/"
        inner = self._options(nested + 1)
        if self._tokens[self._at][1] != ")":
            raise self._fault(self._tokens[self._at][2], ") is missing")
        self._at += 1
        return f"({inner})"

    def _set(self, text: str, at: int) -> str:
        """A set of characters, written by number so that none means anything else."""
        is_negated = text.startswith("^")
        letters = self._letters(text[is_negated:], at)
        if not letters:
            raise self._fault(at, "the set is empty")
        shown = "".join(
            "-" if letter == "-" and not is_escaped and 0 < place < len(letters) - 1 else f"\\x{{{ord(letter):x}}}"
            for place, (letter, is_escaped) in enumerate(letters)
        )
        return f"/[{'^' if is_negated else ''}{shown}]/"

    def _letters(self, text: str, at: int) -> list[tuple[str, bool]]:
        """Each character, and whether it was escaped."""
        letters = []
        for found in _LETTER.finditer(text):
            number = found["x"] or found["u"] or found["U"]
            plain = found["plain"]
            if plain is not None and plain not in _ESCAPED:
                raise self._fault(at, f"\\{plain} is no escape")
            if number is not None and (int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) < 0xE000):
                raise self._fault(at, f"{found.group()} is no character")
            letter = chr(int(number, 16)) if number else _ESCAPED[plain] if plain else found["self"]
            letters.append((letter, found["self"] is None))
        return letters

    def _fault(self, at: int, what: str) -> InvalidRequestError:
        line = self._source.count("\n", 0, at) + 1
        return InvalidRequestError(f"the grammar is refused: line {line}: {what}", param=self._param)
