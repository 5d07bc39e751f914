"""Translation of GBNF grammars (llama.cpp's notation) to Lark.

    root ::= "yes" | "no" [.!]?

Each character becomes a separate terminal. Unlike GBNF, the lexer of llguidance (the grammar library) always uses the
longest match, which makes no difference if all terminals have the same length.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal

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
    """Translate to Lark. Raises InvalidRequestError, which names the line."""
    return _Translation(source, param).lark()


@dataclass(eq=False, slots=True)
class _Node:
    kind: Literal["options", "sequence", "repeat", "name", "text"]
    text: str = ""
    parts: list[_Node] = field(default_factory=list)
    parent: _Node | None = None
    missing: int = 0
    can_end: bool = False  # matches some finite text


class _Translation:
    def __init__(self, source: str, param: str) -> None:
        self._source = source
        self._param = param
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise self._fault(at, f"{source[at]!r} is not allowed here")
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found.group(), at))
            at = found.end()
        self._tokens.append(("end", "", at))
        self._at = 0
        self._rules: dict[str, str] = {}
        self._ending: list[_Node] = []
        self._uses: dict[str, list[_Node]] = {}

    def lark(self) -> str:
        # Rules are renamed to r0, r1, ..., because some names have a meaning in Lark.
        bodies: dict[str, _Node] = {}
        self._skip_lines()
        while self._kind != "end":
            at = self._tokens[self._at][2]
            name = self._take("name")
            self._skip_lines()
            self._take("is")
            self._skip_lines()
            if name in bodies:
                raise self._fault(at, f"rule {name} is defined twice")
            bodies[name] = self._options(0)
            bodies[name].text = name
            if self._kind not in ("line", "end"):
                raise self._fault(self._tokens[self._at][2], f"{self._tokens[self._at][1]!r} is not allowed here")
            self._skip_lines()
        for name in (*self._rules, "root"):
            if name not in bodies:
                raise self._refusal(f"rule {name[:80]} is not defined")
        self._find_ends()
        if not bodies["root"].can_end:
            raise self._refusal("it matches no text: root never ends")
        lines = [f"start: {self._rule('root')}"]
        written = (f"{self._rule(name)}: {_written(body)}" for name, body in bodies.items() if body.can_end)
        return "\n".join((*lines, *written))

    def _made(self, node: _Node) -> _Node:
        for part in node.parts:
            part.parent = node
        node.missing = len(node.parts) if node.kind == "sequence" else 1
        if node.kind == "text" or (node.kind == "sequence" and not node.parts) or _may_be_left_out(node):
            self._ending.append(node)
        return node

    def _find_ends(self) -> None:
        # Marks the nodes that can end, from the texts upward. Rules that never end must be left out, because llguidance
        # would expand them forever in the middle of an answer.
        while self._ending:
            node = self._ending.pop()
            if node.can_end:
                continue
            node.can_end = True
            after = [node.parent] if node.parent is not None else self._uses.get(node.text, [])
            for each in after:
                each.missing -= 1
                if each.kind != "sequence" or each.missing == 0:
                    self._ending.append(each)

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

    def _options(self, nested: int) -> _Node:
        if nested > MAX_NESTED:
            raise self._fault(self._tokens[self._at][2], f"groups are nested more than {MAX_NESTED} levels deep")
        options = [self._sequence(nested)]
        while self._tokens[self._at][1] == "|":
            self._at += 1
            self._skip_lines()
            options.append(self._sequence(nested))
        return self._made(_Node("options", parts=options))

    def _sequence(self, nested: int) -> _Node:
        parts: list[_Node] = []
        repeats = 0
        while True:
            kind, text, at = self._tokens[self._at]
            if kind == "line" and nested:
                self._skip_lines()
            elif kind == "repeat":
                if not parts:
                    raise self._fault(at, f"{text} has nothing to repeat")
                repeats += 1
                if repeats > MAX_NESTED:
                    raise self._fault(at, f"more than {MAX_NESTED} repetition operators in a row")
                self._at += 1
                parts[-1] = self._made(_Node("repeat", "".join(text.split()), [parts[-1]]))
            elif kind in ("name", "text", "set") or text in ("(", "."):
                self._at += 1
                repeats = 0
                parts.append(self._part(kind, text, at, nested))
            else:
                return self._made(_Node("sequence", parts=parts))

    def _part(self, kind: str, text: str, at: int, nested: int) -> _Node:
        if kind == "name":
            self._rule(text)
            node = _Node("name", text=self._rule(text))
            self._uses.setdefault(text, []).append(node)
            return node
        if text == "(":
            inner = self._options(nested + 1)
            if self._tokens[self._at][1] != ")":
                raise self._fault(self._tokens[self._at][2], ") is missing")
            self._at += 1
            return inner
        return self._made(_Node("text", self._terminal(kind, text, at)))

    def _terminal(self, kind: str, text: str, at: int) -> str:
        if kind == "set":
            return self._set(text[1:-1], at)
        if text == ".":
            return "/(?s:.)/"
        letters = self._letters(text[1:-1], at)
        return f"({' '.join(json.dumps(letter, ensure_ascii=False) for letter, _ in letters)})" if letters else '""'

    def _set(self, text: str, at: int) -> str:
        # Characters are written as code points, so that none has a special meaning.
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
        letters = []
        for found in _LETTER.finditer(text):
            number = found["x"] or found["u"] or found["U"]
            plain = found["plain"]
            if plain is not None and plain not in _ESCAPED:
                raise self._fault(at, f"\\{plain} is not an escape")
            if number is not None and (int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) < 0xE000):
                raise self._fault(at, f"{found.group()} is not a character")
            letter = chr(int(number, 16)) if number else _ESCAPED[plain] if plain else found["self"]
            letters.append((letter, found["self"] is None))
        return letters

    def _fault(self, at: int, what: str) -> InvalidRequestError:
        line = self._source.count("\n", 0, at) + 1
        return self._refusal(f"line {line}: {what}")

    def _refusal(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"the grammar is refused: {why}", param=self._param)


def _may_be_left_out(node: _Node) -> bool:
    return node.kind == "repeat" and (node.text in "*?" or node.text.startswith(("{0,", "{0}")))


def _written(node: _Node) -> str:
    # Omits parts that never end. Not recursive, because repetitions can be nested beyond the interpreter's recursion
    # limit.
    order, open_nodes = list[_Node](), [node]
    while open_nodes:
        order.append(open_nodes.pop())
        open_nodes += order[-1].parts
    texts: dict[int, str] = {}
    for each in reversed(order):
        parts = [texts[id(part)] for part in each.parts]
        if each.kind in ("name", "text"):
            text = each.text
        elif each.kind == "options":
            shown = " | ".join(shown for shown, part in zip(parts, each.parts, strict=True) if part.can_end)
            text = f"({shown})" if each.parent is not None else shown
        elif each.kind == "repeat":
            text = f"({parts[0]}){each.text}" if each.parts[0].can_end else '""'
        else:
            text = " ".join(parts) or '""'
        texts[id(each)] = text
    return texts[id(node)]
