"""Translate GBNF grammars (llama.cpp's notation) to Lark.

A GBNF grammar:

    root ::= "yes" | "no" [.!]?

Each character becomes a separate terminal. GBNF has no lexer, but llguidance (the grammar library) has one, which
always uses the longest match. With terminals of equal length, this rule has no effect.
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
_NEVER = re.compile(r"\{0+(?:,0+)?\}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}


def gbnf_to_lark(source: str) -> str:
    """Translate GBNF to Lark. Raises InvalidRequestError if the grammar is invalid."""
    return _GbnfTranslator(source).lark()


@dataclass(eq=False, slots=True)
class _Node:
    kind: Literal["options", "sequence", "repeat", "name", "text"]
    text: str = ""
    parts: list[_Node] = field(default_factory=list)
    parent: _Node | None = None
    missing: int = 0  # number of parts that must still be marked `can_end` before this node is
    can_end: bool = False  # whether it matches at least one finite text


class _GbnfTranslator:
    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise self._syntax_error(f"{source[at]!r} is not allowed here", at)
            if found.lastgroup != "space":
                self._tokens.append((str(found.lastgroup), found.group(), at))
            at = found.end()
        self._tokens.append(("end", "", at))
        self._at = 0
        self._rules: dict[str, str] = {}
        self._to_mark: list[_Node] = []
        self._uses: dict[str, list[_Node]] = {}

    def lark(self) -> str:
        # Rules are renamed to r0, r1, ..., because some names have a meaning in Lark.
        bodies: dict[str, _Node] = {}
        self._skip_lines()
        while self._kind != "end":
            at = self._tokens[self._at][2]
            name = self._expect("name")
            self._skip_lines()
            self._expect("is")
            self._skip_lines()
            if name in bodies:
                raise self._syntax_error(f"rule {name} is defined twice", at)
            bodies[name] = self._parse_alternatives(0)
            bodies[name].text = name
            if self._kind not in ("line", "end"):
                raise self._syntax_error(f"{self._text!r} is not allowed here")
            self._skip_lines()
        for name in (*self._rules, "root"):
            if name not in bodies:
                raise _grammar_error(f"rule {name[:80]} is not defined")
        self._mark_terminating()
        if not bodies["root"].can_end:
            raise _grammar_error("it matches no text: root never ends")
        start = f"start: {self._rule_name('root')}"
        rules = (f"{self._rule_name(name)}: {_node_to_lark(body)}" for name, body in bodies.items() if body.can_end)
        return "\n".join((start, *rules))

    def _register_node(self, node: _Node) -> _Node:
        for part in node.parts:
            part.parent = node
        node.missing = len(node.parts) if node.kind == "sequence" else 1
        if node.kind == "text" or (node.kind == "sequence" and not node.parts) or _is_optional(node):
            self._to_mark.append(node)
        return node

    def _mark_terminating(self) -> None:
        # Marks the nodes that can end, from the innermost upward. Rules that never end must be left out, because
        # llguidance would expand them forever in the middle of an answer.
        while self._to_mark:
            node = self._to_mark.pop()
            if node.can_end:
                continue
            node.can_end = True
            dependents = [node.parent] if node.parent is not None else self._uses.get(node.text, [])
            for each in dependents:
                each.missing -= 1
                if each.kind != "sequence" or each.missing == 0:
                    self._to_mark.append(each)

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _text(self) -> str:
        return self._tokens[self._at][1]

    def _expect(self, kind: str) -> str:
        found, text, at = self._tokens[self._at]
        if found != kind:
            raise self._syntax_error(f"{kind if kind != 'is' else '::='} is missing", at)
        self._at += 1
        return text

    def _skip_lines(self) -> None:
        while self._kind == "line":
            self._at += 1

    def _rule_name(self, name: str) -> str:
        return self._rules.setdefault(name, f"r{len(self._rules)}")

    def _parse_alternatives(self, depth: int) -> _Node:
        if depth > MAX_NESTED:
            raise self._syntax_error(f"groups are nested more than {MAX_NESTED} levels deep")
        options = [self._parse_sequence(depth)]
        while self._text == "|":
            self._at += 1
            self._skip_lines()
            options.append(self._parse_sequence(depth))
        return self._register_node(_Node("options", parts=options))

    def _parse_sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        repeats = 0
        while True:
            kind, text, at = self._tokens[self._at]
            if kind == "line" and depth:
                self._skip_lines()
            elif kind == "repeat":
                if not parts:
                    raise self._syntax_error(f"{text} has nothing to repeat", at)
                repeats += 1
                if repeats > MAX_NESTED:
                    raise self._syntax_error(f"more than {MAX_NESTED} repetition operators in a row", at)
                self._at += 1
                parts[-1] = self._register_node(_Node("repeat", "".join(text.split()), [parts[-1]]))
            elif kind in ("name", "text", "set") or text in ("(", "."):
                self._at += 1
                repeats = 0
                parts.append(self._parse_part(kind, text, at, depth))
            else:
                return self._register_node(_Node("sequence", parts=parts))

    def _parse_part(self, kind: str, text: str, at: int, depth: int) -> _Node:
        if kind == "name":
            node = _Node("name", text=self._rule_name(text))
            self._uses.setdefault(text, []).append(node)
            return node
        if text == "(":
            inner = self._parse_alternatives(depth + 1)
            if self._text != ")":
                raise self._syntax_error(") is missing")
            self._at += 1
            return inner
        return self._register_node(_Node("text", self._terminal_to_lark(kind, text, at)))

    def _terminal_to_lark(self, kind: str, text: str, at: int) -> str:
        if kind == "set":
            return self._set_to_lark(text[1:-1], at)
        if text == ".":
            return "/(?s:.)/"
        letters = self._parse_letters(text[1:-1], at)
        return f"({' '.join(json.dumps(letter, ensure_ascii=False) for letter, _ in letters)})" if letters else '""'

    def _set_to_lark(self, text: str, at: int) -> str:
        # Characters are written as code points, so that none has a special meaning.
        is_negated = text.startswith("^")
        letters = self._parse_letters(text[is_negated:], at)
        if not letters:
            raise self._syntax_error("the set is empty", at)
        members, place = "", 0
        while place < len(letters):
            is_range = letters[place + 1 : place + 2] == [("-", False)] and place + 2 < len(letters)
            ends = letters[place : place + 3 : 2] if is_range else letters[place : place + 1]
            members += "-".join(f"\\x{{{ord(letter):x}}}" for letter, _ in ends)
            place += 3 if is_range else 1
        return f"/[{'^' if is_negated else ''}{members}]/"

    def _parse_letters(self, text: str, at: int) -> list[tuple[str, bool]]:
        letters = []
        for found in _LETTER.finditer(text):
            number = found["x"] or found["u"] or found["U"]
            plain = found["plain"]
            if plain is not None and plain not in _ESCAPED:
                raise self._syntax_error(f"\\{plain} is not an escape", at)
            if number is not None and (int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) < 0xE000):
                raise self._syntax_error(f"{found.group()} is not a character", at)
            letter = chr(int(number, 16)) if number else _ESCAPED[plain] if plain else found["self"]
            letters.append((letter, found["self"] is None))
        return letters

    def _syntax_error(self, what: str, at: int | None = None) -> InvalidRequestError:
        at = self._tokens[self._at][2] if at is None else at
        line = self._source.count("\n", 0, at) + 1
        return _grammar_error(f"line {line}: {what}")


def _grammar_error(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar is refused: {why}", param="grammar")


def _is_optional(node: _Node) -> bool:
    return node.kind == "repeat" and (node.text in "*?" or node.text.startswith(("{0,", "{0}")))


def _node_to_lark(node: _Node) -> str:
    # Omits parts that never end. Not recursive: repetitions can be nested beyond the interpreter's recursion limit.
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
            can_repeat = each.parts[0].can_end and not _NEVER.fullmatch(each.text)  # Lark does not allow {0}
            text = f"({parts[0]}){each.text}" if can_repeat else '""'
        else:
            text = " ".join(parts) or '""'
        texts[id(each)] = text
    return texts[id(node)]
