"""Convert regular expressions in schemas (ECMA-262) to llguidance's dialect, which is that of Rust's regex crate.

A pattern is parsed with the flag `u`, as JSON Schema recommends. If it is valid only without the flag, it is parsed
according to Annex B of ECMA-262. In the result, characters are written as code points, so that none of them has a
special meaning.

Backreferences and lookbehinds are rejected. Lookaheads, word boundaries, and `^` and `$` in the middle are eliminated,
usually with automata (see automata.py). In this folder, "the library" is llguidance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from notso.smollm3.sampling.schemas.automata import (
    ANYTHING,
    LAST,
    WORD,
    Assertion,
    Chars,
    Choice,
    LookaheadNode,
    Node,
    Ranges,
    Repeat,
    Sequence,
    TooLargeError,
    is_whole_match,
    pattern_without_lookaheads,
    plain_pattern,
    shortest_text,
    walk,
)

MAX_NESTED = 64
FEW_REPEATS = 4
MAX_SHORTEST = 200
"""Maximum of `least` in `shortest_match`; larger values are reduced to this."""

MAX_REPEATS = 100_000
"""The library's limit on repetition counts."""

_NOTHING = r"[^\x{0}-\x{10ffff}]"
_SURROGATES = (0xD800, 0xDFFF)
_UNWRITABLE = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))
"""Characters that the library does not support: control characters for which JSON has only numeric escapes, and DEL."""
_UNWRITABLE_CHARACTER = re.compile(f"[{''.join(f'{chr(first)}-{chr(last)}' for first, last in _UNWRITABLE)}]")
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NAMED = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LOOKAROUNDS = {"?=": "a lookahead", "?!": "a lookahead", "?<=": "a lookbehind", "?<!": "a lookbehind"}

_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": WORD,
    "s": (
        *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ),
}


SHOWN_CHARACTERS = 200
"""Maximum number of characters of a pattern or a schema in an error message."""


def shorten(text: str) -> str:
    """Shorten a text for an error message."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


class PatternError(ValueError):
    """The pattern is invalid or not supported. The message is a predicate that follows the name of the pattern."""


class _NotUnicodeError(PatternError):
    """The pattern is not valid with the flag `u`."""


@dataclass(frozen=True, slots=True)
class _Set:
    # A character class: ranges of code points, and Unicode properties in the library's spelling. is_pair: whether the
    # class is one character beyond U+FFFF, which counts as two UTF-16 units without the flag `u`.

    ranges: Ranges
    properties: tuple[str, ...] = ()
    is_negated: bool = False
    is_pair: bool = False


def library_pattern(pattern: str) -> str:
    """Convert a pattern to the library's dialect. Raises PatternError."""
    texts = library_patterns(pattern)
    return texts[0] if len(texts) == 1 else _compile_without_lookaheads(_parse(pattern).search_node)


def _relax_bounds(node: Node) -> Node:
    # Removes large upper bounds of repetitions to reduce the number of states. Shortest texts rarely reach these
    # bounds.
    match node:
        case Sequence(parts):
            return Sequence(tuple(map(_relax_bounds, parts)))
        case Choice(options):
            return Choice(tuple(map(_relax_bounds, options)))
        case Repeat(body, least, most):
            return Repeat(_relax_bounds(body), least, most if most is None or most - least <= FEW_REPEATS else None)
        case LookaheadNode(body, is_negated) if not is_negated:
            return LookaheadNode(_relax_bounds(body), is_negated)
    return node


def has_lookaround(pattern: str) -> bool:
    """Return whether a pattern has a lookahead, a word boundary, or `^` or `$` in the middle. Raises PatternError."""
    return bool(_parse(pattern).automaton_part)


def library_patterns(pattern: str) -> tuple[str, ...]:
    """Return patterns in the library's dialect. `pattern` matches the texts that match all of them. Raises
    PatternError.

    Takes linear time, plus limited time for lookarounds.
    """
    reader = _parse(pattern)
    if not reader.automaton_part:
        return (reader.text,)
    if reader.is_opaque:
        raise PatternError(f"has {reader.automaton_part} together with a Unicode property, which is not supported")
    texts = _split_lookaheads(reader.root)
    return texts if texts is not None else (_compile_without_lookaheads(reader.search_node),)


@lru_cache(maxsize=512)
def shortest_match(patterns: tuple[str, ...], least: int) -> str | None:
    """Return a shortest text of at least `least` characters that matches all patterns (in the library's dialect), or
    None if none is found within the limits. Large upper bounds of repetitions are ignored."""
    parts: list[Node] = [Repeat(Chars(((0, LAST),)), min(least, MAX_SHORTEST), None)]
    try:
        parts += (_relax_bounds(_parse_converted(pattern).search_node) for pattern in patterns)
        lookaheads = (LookaheadNode(Sequence((part, Assertion("$"))), is_negated=False) for part in parts)
        return shortest_text(Sequence((*lookaheads, ANYTHING)))
    except (PatternError, TooLargeError):
        return None


@lru_cache(maxsize=512)
def complement(pattern: str) -> str | None:
    """Return a pattern for the texts that do not match `pattern`, or None if none is found within the limits. Both
    patterns are in the library's dialect."""
    try:
        lookahead = LookaheadNode(_parse_converted(pattern).whole_search_node, is_negated=True)
        return _compile_without_lookaheads(Sequence((lookahead, ANYTHING)))
    except PatternError:
        return None


def matches(pattern: str, text: str) -> bool:
    """Return whether `text` matches `pattern` (in the library's dialect), or False if unknown."""
    try:
        return is_whole_match(_parse_converted(pattern).search_node, text)
    except (PatternError, TooLargeError):
        return False


@lru_cache(maxsize=512)
def exclude_texts(pattern: str, texts: tuple[str, ...]) -> str | None:
    """Like `complement`, but return a pattern for the texts that match `pattern`, except `texts`."""
    try:
        lookaheads = (
            LookaheadNode(_parse_converted(each).whole_search_node, is_negated)
            for each, is_negated in ((_literal_pattern(texts), True), (pattern, False))
        )
        return _compile_without_lookaheads(Sequence((*lookaheads, ANYTHING)))
    except PatternError:
        return None


def _literal_pattern(texts: Iterable[str]) -> str:
    options = ("".join(f"\\x{{{ord(letter):x}}}" for letter in text) for text in texts)
    return f"^(?:{'|'.join(options)})$"


def _parse(pattern: str) -> _Reader:
    try:
        return _Reader(pattern, is_unicode=True)
    except _NotUnicodeError:
        return _Reader(pattern, is_unicode=False)


def _parse_converted(pattern: str) -> _Reader:
    # Raises PatternError for Unicode properties, because only the library knows their characters.
    reader = _Reader(pattern.replace("\\x{", "\\u{"), is_unicode=True)
    if reader.is_opaque:
        raise PatternError("has a Unicode property")
    return reader


def _split_lookaheads(root: Node) -> tuple[str, ...] | None:
    # Returns a pattern without the leading lookaheads, and one pattern per lookahead, or None if they cannot be
    # separated.
    parts = root.parts if isinstance(root, Sequence) else (root,)
    if not parts or parts[0] != Assertion("^"):
        return None
    lookaheads = list(itertools.takewhile(lambda part: isinstance(part, LookaheadNode), parts[1:]))
    rest = parts[1 + len(lookaheads) :]
    if not lookaheads:
        return None
    try:
        texts = [_lookahead_pattern(lookahead) for lookahead in lookaheads]
        return (_anchored_pattern(Sequence(rest)), *texts)
    except TooLargeError:
        return None


def _lookahead_pattern(lookahead: Node) -> str:
    if isinstance(lookahead, LookaheadNode) and not lookahead.is_negated:
        return _anchored_pattern(lookahead.body)
    return _compile_without_lookaheads(Sequence((lookahead, ANYTHING)))


def _anchored_pattern(node: Node) -> str:
    return plain_pattern(node, _class_text) or _compile_without_lookaheads(Sequence((node, ANYTHING)))


def _compile_without_lookaheads(node: Node) -> str:
    try:
        text = pattern_without_lookaheads(node, _class_text)
    except TooLargeError:
        raise PatternError("has more lookarounds than are supported") from None
    if text is None:
        raise PatternError("matches no text that can be generated")
    return f"^(?:{text})$"


def _class_text(ranges: Ranges) -> str:
    text = _class_pattern(_Set(ranges))
    return "" if text == _NOTHING else text


def has_unwritable_characters(text: str) -> bool:
    """Return whether the text has control characters that the grammar cannot express."""
    return _UNWRITABLE_CHARACTER.search(text) is not None


def any_character_except(letters: Iterable[str]) -> str:
    """Return, in the library's dialect, a class of all characters that can be generated, except `letters`."""
    return _class_pattern(_Set(tuple((ord(letter), ord(letter)) for letter in letters), is_negated=True))


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found, at = [], 0
    for first, last in sorted(ranges):
        if first > at:
            found.append((at, first - 1))
        at = max(at, last + 1)
    if at <= LAST:
        found.append((at, LAST))
    return tuple(found)


def _class_pattern(characters: _Set) -> str:
    # Control characters that cannot be generated are left out. If a class contained all of them, the library would
    # accept every escape, including escaped quotes and backslashes.
    ranges, properties = characters.ranges, "".join(characters.properties)
    if properties:
        text, unwritable = ("".join(_range(*each) for each in some) for some in (ranges, _UNWRITABLE))
        return f"[[{'^' if characters.is_negated else ''}{text}{properties}]&&[^{unwritable}]]"
    writable = _writable(_complement(ranges) if characters.is_negated else ranges)
    if len(writable) == 1 and writable[0][0] == writable[0][1] and chr(writable[0][0]) in _LETTERS | _DIGITS:
        return chr(writable[0][0])
    return f"[{''.join(_range(*each) for each in writable)}]" if writable else _NOTHING


def _writable(ranges: Ranges) -> Ranges:
    return _complement((*_complement(ranges), *_UNWRITABLE, _SURROGATES))


def _range(first: int, last: int) -> str:
    return f"\\x{{{first:x}}}" + (f"-\\x{{{last:x}}}" if last > first else "")


class _Part(NamedTuple):
    text: str
    node: Node


def _repetition(quantifier: str) -> tuple[int, int | None]:
    if quantifier in _REPETITIONS:
        return _REPETITIONS[quantifier]
    least, comma, most = quantifier[1:-1].partition(",")
    return int(least), int(most) if most else None if comma else int(least)


class _Reader:
    # Parses a pattern. Raises PatternError, or _NotUnicodeError if the pattern may be valid without the flag `u`.

    def __init__(self, pattern: str, *, is_unicode: bool) -> None:
        self._pattern = pattern
        self._is_unicode = is_unicode
        self._at = 0
        self._groups = 0
        self.automaton_part = ""  # name of a part that needs an automaton, such as "a lookahead", or ""
        self.is_opaque = False  # whether it contains classes whose members only the library knows
        self._names: set[str] = set()
        self._refused: str | None = None  # message about an unsupported part, reported if the syntax is valid
        self._backreferences: list[int] = []
        self._named_backreferences: list[str] = []
        self.text, self.root = self._alternatives(0)
        self._find_anchors(self.root)
        self._check_whole()

    @property
    def search_node(self) -> Node:
        """A node that matches every text that contains a match of the pattern."""
        return Sequence((ANYTHING, self.root, ANYTHING))

    @property
    def whole_search_node(self) -> Node:
        """Like `search_node`, but for lookaheads: matches extend to the end of the text."""
        return Sequence((self.search_node, Assertion("$")))

    def _check_whole(self) -> None:
        if self._at < len(self._pattern):
            raise self._syntax_error("unmatched )")
        if any(number > self._groups for number in self._backreferences):
            self._require_legacy_mode("undefined group number")
        if any(name not in self._names for name in self._named_backreferences):
            self._require_legacy_mode("undefined group name")
            raise self._syntax_error("undefined group name")
        if self._backreferences or self._named_backreferences:
            self._mark_unsupported("a backreference")
        if self._refused is not None:
            raise PatternError(self._refused)

    def _find_anchors(self, root: Node) -> None:
        # The library supports `^` and `$` only at the start and end of a pattern or of its top-level alternatives.
        for option in root.options if isinstance(root, Choice) else (root,):
            parts = list(option.parts if isinstance(option, Sequence) else (option,))
            while parts and parts[0] == Assertion("^"):
                parts.pop(0)
            while parts and parts[-1] == Assertion("$"):
                parts.pop()
            nodes = itertools.chain.from_iterable(map(walk, parts))
            if any(isinstance(node, Assertion) and node.kind in "^$" for node in nodes):
                self.automaton_part = self.automaton_part or "^ or $ in the middle"

    def _peek(self, count: int = 1) -> str:
        return self._pattern[self._at : self._at + count]

    def _accept(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._at)
        self._at += len(text) if is_next else 0
        return is_next

    def _read_while(self, characters: frozenset[str], most: int) -> str:
        end = self._at
        while end < len(self._pattern) and end - self._at < most and self._pattern[end] in characters:
            end += 1
        taken, self._at = self._pattern[self._at : end], end
        return taken

    def _syntax_error(self, why: str) -> Exception:
        if self._is_unicode:
            return _NotUnicodeError(why)
        return PatternError(f"is not an ECMA-262 regular expression: {why}, at character {self._at}")

    def _require_legacy_mode(self, why: str) -> None:
        if self._is_unicode:
            raise _NotUnicodeError(why)

    def _mark_unsupported(self, what: str) -> None:
        self._refused = self._refused or f"has {what}, which is not supported"

    def _alternatives(self, depth: int) -> _Part:
        options = [self._sequence(depth)]
        while self._accept("|"):
            options.append(self._sequence(depth))
        if len(options) == 1:
            return options[0]
        return _Part("|".join(text for text, _ in options), Choice(tuple(node for _, node in options)))

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._pattern) and self._peek() not in "|)":
            parts.append(self._term(depth))
        if len(parts) == 1:
            return parts[0]
        return _Part("".join(text for text, _ in parts), Sequence(tuple(node for _, node in parts)))

    def _term(self, depth: int) -> _Part:
        if self._peek() in "^$" or self._peek(2) in (r"\b", r"\B"):
            if self._accept("\\"):
                self.automaton_part = self.automaton_part or "a word boundary"
            kind = self._peek()
            self._at += 1
            if self._quantifier() is not None:
                raise self._syntax_error("nothing to repeat")
            return _Part(kind if kind in "^$" else "", Assertion(kind))
        if self._accept("("):
            atom: _Part | _Set = self._group(depth + 1)
        else:
            atom = self._atom()
        quantifier = self._quantifier()
        if isinstance(atom, _Set):
            if atom.is_pair and quantifier is not None:
                self._mark_unsupported("a repetition of a lone surrogate")
            self.is_opaque |= bool(atom.properties)
            atom = _Part(self._checked(atom), Chars(_complement(atom.ranges) if atom.is_negated else atom.ranges))
        if quantifier is None:
            return atom
        return _Part(atom.text + quantifier, Repeat(atom.node, *_repetition(quantifier)))

    def _group(self, depth: int) -> _Part:
        if depth > MAX_NESTED:
            raise PatternError(f"is nested more than {MAX_NESTED} levels deep")
        lookaround = next(filter(self._accept, _LOOKAROUNDS), None)
        if lookaround is not None and "<" in lookaround:
            self._mark_unsupported(_LOOKAROUNDS[lookaround])
        elif lookaround is not None:
            self.automaton_part = _LOOKAROUNDS[lookaround]
        elif self._accept("?<"):
            name = self._name()
            if name in self._names:
                raise self._syntax_error("duplicate group name")
            self._names.add(name)
            self._groups += 1
        elif self._accept("?:"):
            pass
        elif self._peek() == "?":
            raise self._syntax_error("undefined group number")
        else:
            self._groups += 1
        inner, node = self._alternatives(depth)
        if not self._accept(")"):
            raise self._syntax_error("unclosed group")
        if lookaround is not None and self._peek() in ("*", "+", "?", "{"):
            if "<" in lookaround and self._quantifier() is not None:
                raise self._syntax_error("nothing to repeat")
            self._require_legacy_mode("a lookahead is repeated")
        if lookaround is not None:
            return _Part("", LookaheadNode(node, lookaround == "?!"))
        return _Part(f"(?:{inner})", node)

    def _name(self) -> str:
        end = self._pattern.find(">", self._at)
        name = self._pattern[self._at : end] if end >= 0 else ""
        if not name.replace("$", "_").isidentifier():
            raise self._syntax_error("invalid group name")
        self._at = end + 1
        return name

    def _quantifier(self) -> str | None:
        # A lazy quantifier is treated as greedy, because both match the same texts.
        quantifier = self._peek()
        if quantifier and quantifier in "*+?":
            self._at += 1
        elif quantifier == "{" and (counts := self._read_counts()) is not None:
            quantifier = counts
        else:
            return None
        self._accept("?")
        return quantifier

    def _read_counts(self) -> str | None:
        start = self._at
        self._at += 1
        least = self._read_while(_DIGITS, len(self._pattern))
        has_comma = self._accept(",")
        most = self._read_while(_DIGITS, len(self._pattern)) if has_comma else least
        if not least or not self._accept("}"):
            self._at = start
            return None
        least, most = least.lstrip("0") or "0", (most.lstrip("0") or "0") if most else ""
        if most and (len(most), most) < (len(least), least):
            raise self._syntax_error("the bounds of a repetition are out of order")
        if any(len(number) > 6 or int(number or 0) > MAX_REPEATS for number in (least, most)):
            self._mark_unsupported(f"more than {MAX_REPEATS:,} repetitions")
            return "{1}"
        return f"{{{least},{most}}}" if has_comma else f"{{{least}}}"

    def _atom(self) -> _Set:
        character = self._peek()
        if character == "[":
            self._at += 1
            return self._class()
        if character == "\\":
            self._at += 1
            return self._escape()
        if character == ".":
            self._at += 1
            return self._utf16_unit_class(_LINE_ENDS, is_negated=True)
        if character in "*+?":
            raise self._syntax_error("nothing to repeat")
        if character in "{}]":
            if character == "{" and self._read_counts() is not None:
                raise self._syntax_error("nothing to repeat")
            self._require_legacy_mode(f"a lone {character}")
        self._at += 1
        return self._single_character(ord(character))

    def _single_character(self, point: int) -> _Set:
        return _Set(((point, point),), is_pair=point > 0xFFFF and not self._is_unicode)

    def _utf16_unit_class(self, ranges: Ranges, properties: tuple[str, ...] = (), *, is_negated: bool = False) -> _Set:
        # Without the flag `u`, a class matches one UTF-16 unit, and therefore no character beyond U+FFFF.
        if self._is_unicode:
            return _Set(ranges, properties, is_negated)
        if any(last > 0xFFFF for _, last in ranges) and not is_negated and ranges[-1][1] != LAST:
            self._mark_unsupported("a lone surrogate")
        found = _complement(ranges) if is_negated else ranges
        return _Set(tuple((first, min(last, 0xFFFF)) for first, last in found if first <= 0xFFFF))

    def _checked(self, characters: _Set) -> str:
        if not characters.properties:
            ranges = _complement(characters.ranges) if characters.is_negated else characters.ranges
            if ranges and not _writable(ranges) and ranges[0][0] < 0x80:
                self._refused = self._refused or "has control characters, which cannot be generated"
        return _class_pattern(characters)

    def _escape(self) -> _Set:
        if self._at >= len(self._pattern):
            raise self._syntax_error("incomplete escape")
        character = self._peek()
        if character in "123456789":
            start, number = self._at, self._read_while(_DIGITS, len(self._pattern))
            if self._is_unicode or (len(number) < 6 and int(number) <= self._all_groups[0]):
                self._backreferences.append(int(number) if len(number) < 6 else 10**6)
                return _Set(((0x78, 0x78),))
            self._at = start
        if character == "k" and (self._is_unicode or self._all_groups[1]):
            self._at += 1
            if not self._accept("<"):
                raise self._syntax_error("a reference without a name")
            self._named_backreferences.append(self._name())
            return _Set(((0x78, 0x78),))
        return self._class_escape(in_class=False)

    @cached_property
    def _all_groups(self) -> tuple[int, bool]:
        count, has_names, at, in_class = 0, False, 0, False
        while at < len(self._pattern):
            character = self._pattern[at]
            if character == "\\":
                at += 1
            elif in_class:
                in_class = character != "]"
            elif character == "[":
                in_class = True
            elif character == "(":
                after = self._pattern[at + 1 : at + 4]
                is_named = after[:2] == "?<" and after[2:] not in ("=", "!")
                has_names |= is_named
                count += is_named or not after.startswith("?")
            at += 1
        return count, has_names

    def _class_escape(self, *, in_class: bool) -> _Set:
        character = self._peek()
        if character.lower() in _CLASSES and character:
            self._at += 1
            return self._utf16_unit_class(_CLASSES[character.lower()], is_negated=character.isupper())
        if character in ("p", "P") and self._is_unicode:
            self._at += 1
            return _Set((), (self._property(character),))
        return self._single_character(self._character(in_class=in_class))

    def _property(self, letter: str) -> str:
        end = self._pattern.find("}", self._at)
        name = self._pattern[self._at + 1 : end] if self._peek() == "{" and end > 0 else ""
        if not name.replace("=", "", 1).replace("_", "").isalnum() or not name.isascii():
            raise self._syntax_error("unknown property")
        self._at = end + 1
        return f"\\{letter}{{{name}}}"

    def _character(self, *, in_class: bool) -> int:
        character = self._peek()
        self._at += 1
        if character in _NAMED:
            return _NAMED[character]
        if character == "b" and in_class:
            return 0x08
        if character == "-" and in_class and self._is_unicode:
            return 0x2D
        if character == "c":
            return self._control(in_class)
        if character == "x":
            return self._numeric_escape(2, ord("x"))
        if character == "u":
            return self._read_unit()
        if character in _DIGITS:
            return self._octal(character)
        if character not in _SYNTAX:
            self._require_legacy_mode(f"\\{character}")
        return ord(character)

    def _control(self, in_class: bool) -> int:
        letter = self._peek()
        if letter in _LETTERS or (in_class and not self._is_unicode and letter in _DIGITS | {"_"} and letter):
            self._at += 1
            return ord(letter) % 32
        self._require_legacy_mode("\\c without a letter")
        self._at -= 1  # a literal backslash, followed by a literal c
        return 0x5C

    def _numeric_escape(self, digits: int, otherwise: int) -> int:
        start = self._at
        number = self._read_while(_HEX, digits)
        if len(number) == digits:
            return int(number, 16)
        self._require_legacy_mode("an escape without a number")
        self._at = start
        return otherwise

    def _read_unit(self) -> int:
        if self._is_unicode and self._accept("{"):
            number = self._read_while(_HEX, len(self._pattern))
            if not number or not self._accept("}") or len(number.lstrip("0")) > 6 or int(number, 16) > LAST:
                raise _NotUnicodeError("invalid character number")
            return int(number, 16)
        point = self._numeric_escape(4, ord("u"))
        if 0xD800 <= point < 0xDC00 and self._peek(2) == "\\u":
            start = self._at
            self._at += 2
            low = self._read_while(_HEX, 4)
            if len(low) == 4 and 0xDC00 <= int(low, 16) <= 0xDFFF:
                return 0x10000 + ((point - 0xD800) << 10) + int(low, 16) - 0xDC00
            self._at = start
        return point

    def _octal(self, first: str) -> int:
        if first == "0" and self._peek() not in _DIGITS:
            return 0
        self._require_legacy_mode("an octal escape")
        if first in "89":
            return ord(first)
        digits = first
        while self._peek() and self._peek() in "01234567" and int(digits + self._peek(), 8) <= 0xFF:
            digits += self._peek()
            self._at += 1
        return int(digits, 8)

    def _class(self) -> _Set:
        is_negated = self._accept("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while True:
            if self._at >= len(self._pattern):
                raise self._syntax_error("unclosed character class")
            if self._accept("]"):
                break
            first = self._member()
            if self._peek() != "-" or self._peek(2) == "-]":
                self._add(first, ranges, properties)
                continue
            self._at += 1
            if self._at >= len(self._pattern):
                raise self._syntax_error("unclosed character class")
            last = self._member()
            if isinstance(first, _Set) or isinstance(last, _Set):
                self._require_legacy_mode("a range of classes")
                for each in (first, 0x2D, last):
                    self._add(each, ranges, properties)
            elif first > last:
                raise self._syntax_error("a range is out of order")
            else:
                ranges.append((first, last))
        merged = _complement(_complement(ranges))
        return self._utf16_unit_class(merged, tuple(properties), is_negated=is_negated)

    def _add(self, member: int | _Set, ranges: list[tuple[int, int]], properties: list[str]) -> None:
        if isinstance(member, int):
            ranges.append((member, member))
        else:
            ranges += _complement(member.ranges) if member.is_negated else member.ranges
            properties += member.properties

    def _member(self) -> int | _Set:
        if not self._accept("\\"):
            self._at += 1
            return ord(self._pattern[self._at - 1])
        if self._at >= len(self._pattern):
            raise self._syntax_error("incomplete escape")
        if self._peek() == "B" or self._peek() == "k":
            self._require_legacy_mode("invalid escape")
        if self._peek() == "k" and self._all_groups[1]:
            raise self._syntax_error("invalid escape")
        found = self._class_escape(in_class=True)
        match found:
            case _Set(((first, last),), (), False) if first == last:
                return first
        return found
