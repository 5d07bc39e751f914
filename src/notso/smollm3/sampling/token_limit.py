"""End answers within their token limit: near it, a token is allowed only if an end remains within reach.

Far from the limit nothing is computed: the grammar gives an estimate of how many tokens one token can add to the
distance to the end, and the distance is searched again only after that many. Near the limit the last known ending is
tried first; usually it still works.

The length of answers is estimated from a grammar's text. Estimates are rather too large than too small: they decide
when to search for the exact distance to the end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from notso.smollm3.sampling.schemas.patterns import shortest_match
from notso.smollm3.sampling.shortest_end import Follower, SearchMemory, ShortestEnd
from notso.smollm3.text.tokenizer import Tokenizer

BYTES_PER_TOKEN = 2
MAX_REPEATS = 4_096
MAX_NAMES = 256
MAX_ORDERS = 256
MAX_STRINGS = 16
FORMAT_TOKENS = 40
MAX_DEPTH = 100  # of nested schemas, with references; each takes up to five of the interpreter's frames
FREE_JUMP = 16
"""Containers of free JSON that one token may open."""

_OBJECT = frozenset(("properties", "required", "additionalProperties", "patternProperties", "minProperties"))
_ARRAY = frozenset(("items", "prefixItems", "minItems"))

_FORMAT_TEXTS = {
    "duration": "P0D",
    "email": "a@a",
    "hostname": "a",
    "ipv4": "0.0.0.0",
    "ipv6": "::",
    "uri": "a:",
    "uuid": "00000000-0000-0000-0000-000000000000",
}

_REPEATED = re.compile(r"\{([0-9]{1,6})")


class Extent(NamedTuple):
    """Tokens of a short answer, of what one token may require, and of the shortest end from anywhere."""

    least: float = 0
    jump: float = 0
    most: float = 0


@dataclass(frozen=True, slots=True)
class GrammarExtent:
    """Facts about a grammar.

    names: `"NAME":` of required members. strings: patterns and minimum lengths. formats: of strings.
    orders: of the members of objects.
    """

    extent: Extent
    names: tuple[bytes, ...]  # `"NAME":` of required members
    strings: tuple[tuple[tuple[str, ...], int], ...] = ()  # patterns and minimum length of each
    formats: tuple[str, ...] = ()  # of strings
    orders: tuple[dict[bytes, int], ...] = ()  # of the members of objects

    def texts(self) -> list[str]:
        """Return short texts for strings with a pattern, a length or a format."""
        found = [shortest_match(*each) for each in self.strings]
        return [*(text for text in found if text), *(_FORMAT_TEXTS[name] for name in self.formats)]

    def next_check(self, left: int, distance: float) -> int:
        """Return at how many remaining tokens an end, now `distance` of `left` tokens away, may be out of reach."""
        steps = max(0, math.floor((left - distance - 1) / (1 + self.extent.jump)))
        return int(min(left - steps, self.extent.most + 1))


def grammar_extent(parts: Sequence[dict[str, Any]]) -> GrammarExtent:
    """Estimate an answer's length from the library's grammars, in time linear in their text."""
    names: dict[bytes, None] = {}
    strings: dict[tuple[tuple[str, ...], int], None] = {}
    formats: dict[str, None] = {}
    orders: list[dict[bytes, int]] = []
    total = Extent()
    for part in parts:
        if "json_schema" in part:
            each = _Schemas(part["json_schema"], names, strings, formats, orders).extent
        else:
            each = _of_text(str(part.get("lark_grammar", "")), is_call=len(parts) > 1)
        total = Extent(*(one + other for one, other in zip(total, each, strict=True)))
    return GrammarExtent(total, tuple(names), tuple(strings), tuple(formats), tuple(orders))


def _of_text(source: str, is_call: bool) -> Extent:
    # For tool calls, only its literals count.
    size = len(source) / BYTES_PER_TOKEN + 8
    if is_call:
        return Extent(size, size, size)
    size += _repeats(source)
    return Extent(size, min(size, MAX_REPEATS), math.inf)


def _repeats(pattern: str) -> int:
    product = 1
    for count in _REPEATED.findall(pattern):
        product = min(MAX_REPEATS, product * max(1, int(count)))
    return product


def _member(name: object) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode() + b":"


def _text(value: object) -> float:
    return len(json.dumps(value)) / BYTES_PER_TOKEN + 2


class _Schemas:
    def __init__(
        self,
        document: dict[str, Any],
        names: dict[bytes, None],
        strings: dict[tuple[tuple[str, ...], int], None],
        formats: dict[str, None],
        orders: list[dict[bytes, int]],
    ) -> None:
        self._strings, self._formats = strings, formats
        self._orders = orders
        self._sizes: dict[str, float] = {}
        self._definitions = document.get("$defs", {})
        self._known: dict[int, Extent | None] = {}
        self._depth = 0
        self._names = names
        self.extent = self._of(document)

    def _of(self, schema: Any) -> Extent:
        if not isinstance(schema, dict):
            return Extent(2, FREE_JUMP, math.inf) if schema else Extent()
        if id(schema) in self._known:
            found = self._known[id(schema)]
            return Extent(0, 0, math.inf) if found is None else found
        if self._depth >= MAX_DEPTH:
            return Extent(2, FREE_JUMP, math.inf)
        self._known[id(schema)] = None
        self._depth += 1
        try:
            found = self._known[id(schema)] = self._sum(schema)
        finally:
            self._depth -= 1
        return found

    def _sum(self, schema: dict[str, Any]) -> Extent:
        parts = [self._own(schema)]
        parts += (self._of(each) for each in schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            if options := [self._of(each) for each in schema.get(keyword, ())]:
                least, most = min(each.least for each in options), max(each.most for each in options)
                parts.append(Extent(least, max(max(each.jump, each.least) for each in options), most))
        if "$ref" in schema:
            parts.append(self._of(self._definitions.get(str(schema["$ref"]).rpartition("/")[2], True)))
        return Extent(*map(sum, zip(*parts, strict=True)))

    def _own(self, schema: dict[str, Any]) -> Extent:
        if "const" in schema or "enum" in schema:
            sizes = [_text(value) for value in schema.get("enum", (schema.get("const"),))]
            return Extent(min(sizes), max(sizes), max(sizes))
        kinds = schema.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(kinds or ())
        is_reference = bool(schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"})
        size = 2.0 + schema.get("minLength", 0)
        if "pattern" in schema:
            size += self._pattern_size(str(schema["pattern"]))
        self._note_text(schema)
        size += FORMAT_TOKENS * ("format" in schema) + (20 if kinds & {"number", "integer"} else 0)
        options = []
        if kinds - {"object", "array"}:
            options.append(Extent(size, size, size))
        if "object" in kinds or (not kinds and _OBJECT & schema.keys()):
            options.append(self._object(schema))
        if "array" in kinds or (not kinds and _ARRAY & schema.keys()):
            options.append(self._array(schema))
        if not kinds and not is_reference:
            options.append(Extent(size, max(size, FREE_JUMP), math.inf))
        if not options:
            return Extent()
        return Extent(
            *(choose(values) for choose, values in zip((min, max, max), zip(*options, strict=True), strict=True))
        )

    def _pattern_size(self, pattern: str) -> float:
        if pattern not in self._sizes:
            short = shortest_match((pattern,), 0) if len(self._sizes) < MAX_STRINGS else None
            long = len(pattern) / BYTES_PER_TOKEN + _repeats(pattern)
            self._sizes[pattern] = long if short is None else 2.0 * len(short) + 8
        return self._sizes[pattern]

    def _note_text(self, schema: dict[str, Any]) -> None:
        parts, left = [], [schema]
        while left:
            parts.append(left.pop())
            left += (each for each in parts[-1].get("allOf", ()) if isinstance(each, dict))
        patterns = tuple(str(each["pattern"]) for each in parts if "pattern" in each)
        if (patterns or schema.get("minLength")) and len(self._strings) < MAX_STRINGS:
            self._strings.setdefault((patterns, schema.get("minLength", 0)))
        if schema.get("format") in _FORMAT_TEXTS:
            self._formats.setdefault(schema["format"])

    def _object(self, schema: dict[str, Any]) -> Extent:
        required = set(schema.get("required", ()))
        written = [_member(name) for name in (*schema.get("properties", ()), *schema.get("required", ()))]
        if required and len(self._orders) < MAX_ORDERS:
            self._orders.append({name: number for number, name in reversed(list(enumerate(written[:MAX_NAMES])))})
        for name in schema.get("required", ()):
            if len(self._names) < MAX_NAMES:
                self._names.setdefault(_member(name))
        least, jump, most = 2.0, 0.0, 0.0
        for name, value in schema.get("properties", {}).items():
            each, own = self._of(value), len(name) / BYTES_PER_TOKEN + 4
            least += own + each.least if name in required else 0
            jump, most = max(jump, own + each.jump, own + each.least), max(most, own + each.most)
        declared = schema.get("properties", {})
        least += sum(len(name) / BYTES_PER_TOKEN + 6 for name in required if name not in declared)
        others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
        for each in map(self._of, others):
            jump, most = max(jump, each.jump + 4, each.least + 4), max(most, each.most + 4)
        least += schema.get("minProperties", 0) * 8
        return Extent(least, max(jump, least), least + most)

    def _array(self, schema: dict[str, Any]) -> Extent:
        first = [self._of(each) for each in schema.get("prefixItems", ())]
        rest = self._of(schema.get("items", True))
        count = schema.get("minItems", 0)
        least = 2 + sum(each.least + 1 for each in first[:count]) + max(0, count - len(first)) * (rest.least + 1)
        listed = [*first, *([] if schema.get("items") is False else [rest])]
        jump = max((max(each.jump, each.least) + 2 for each in listed), default=0)
        return Extent(least, max(least, jump), least + max((each.most for each in listed), default=0))


FIRST_STEPS, STEPS = 3_000, 400
"""Texts per search: for the first one of an answer, and for each later token."""

MAX_STEPS = 20_000
"""Search steps per answer. An answer that needs more may be cut."""

TRIES = 4
"""Rejected tokens after which only the known ending is allowed."""

HOPELESS, MARGIN = 1.5, 20
"""The search for another end is skipped if the first takes HOPELESS times the remaining tokens plus MARGIN."""


MAX_STRING_ENDS = 500

RETRIES = 1
"""After an inconclusive search, the next one follows when half of the remaining tokens are used."""


class Pieces(NamedTuple):
    """Facts about a vocabulary. ends: end tokens; texts: by token; digits: from `number_digits`."""

    ends: npt.NDArray[np.intp]
    texts: list[bytes]
    digits: npt.NDArray[np.uint16]


class _Way(NamedTuple):
    tokens: tuple[int, ...]
    text: bytes


class TokenLimit:
    """Limit of one answer in its grammar. `permits` is called for each drawn token, `take` for each accepted one."""

    def __init__(self, ends: ShortestEnd, extent: GrammarExtent, tags: Sequence[int], pieces: Pieces) -> None:
        self._ends = ends
        self._extent = extent
        self._tags = tuple(tags)
        self._texts = pieces.texts
        self._end_ids = pieces.ends
        self._memory = SearchMemory()
        self._check_at: int | None = None
        self._way: _Way | None = None
        self._before: _Way | None = None  # the last known one
        self._next: tuple[int, _Way | None] | None = None
        self._turned_down: set[int] = set()
        self._spent = 0
        self._retries = RETRIES
        self._may_be_missed = False

    @property
    def least_estimate(self) -> float:
        """Estimated tokens of a short answer, rather too many."""
        return self._extent.extent.least

    def distance(self, matcher: Follower, most: int, state: JsonState) -> int | None:
        """Return the fewest tokens to the end, as far as found; None if there is no end within `most`."""
        way = self._first_way(matcher, most, state)
        return None if way is None else len(way.tokens)

    def permits(self, matcher: Follower, token: int, left: int, state: JsonState) -> bool:
        """Whether an end is within `left` tokens after `token`, which the grammar allows.

        If so, `take` must be called with it before the next call.
        """
        if self._check_at is None:
            self._check_at = self._extent.next_check(left + 1, self._extent.extent.least)
        if left + 1 > self._check_at:
            return True
        if self._way is None or len(self._way.tokens) > left + 1:
            self._way = self._first_way(matcher, left + 1, state)
            if self._way is None:
                self._check_at = left // 2 if self._may_be_missed and self._retries else -1
                self._retries -= 1
                return True
        way = self._behind(matcher, self._way, token, left, state)
        if way is None:
            self._turned_down.add(token)
            return False
        self._next = token, way
        return True

    def left_to_choose(self, token: int, left: int) -> npt.NDArray[np.intp] | None:
        """Return the tokens to choose from after `token` was rejected; None for all others."""
        if self._way is None or (len(self._turned_down) < TRIES and len(self._way.tokens) <= left):
            return None
        if not self._way.tokens:
            return self._end_ids
        text = b"" if self._has_tags(self._way) else self._way.text
        found = {self._way.tokens[0]}
        for size in range(1, len(text)):
            ids = self._ends.spell(text[:size]) if size <= 1 or not text[:size].isspace() else []
            if len(ids) == 1 and self._ends.cost(text[size:]) <= left:
                found.add(ids[0])
            if size >= len(self._texts[self._way.tokens[0]]):
                break
        return np.array(sorted(found - self._turned_down) or [self._way.tokens[0]], np.intp)

    def take(self, token: int, left: int) -> None:
        known, self._next = self._next, None
        self._turned_down.clear()
        self._before = self._way or self._before
        self._way = known[1] if known is not None and known[0] == token else None
        if self._way is not None:
            self._check_at = self._extent.next_check(left, len(self._way.tokens))

    def _behind(self, matcher: Follower, known: _Way, token: int, left: int, state: JsonState) -> _Way | None:
        if known.tokens[:1] == (token,):
            rest = known.tokens[1:]
            return self._way_of(rest) if len(rest) <= left else None
        text = self._texts[token]
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return None
        if len(known.tokens) <= left and self._leads_to_end(after, known.tokens):
            return known
        if text and known.text.startswith(text) and not self._has_tags(known):
            rest = tuple(self._ends.spell(known.text[len(text) :]))
            if len(rest) <= left and self._leads_to_end(after, rest):
                return self._way_of(rest)
        return self._search(after, left, STEPS, state.behind(text))

    def _has_tags(self, way: _Way) -> bool:
        return any(tag in way.tokens for tag in self._tags)

    def _leads_to_end(self, matcher: Follower, tokens: Sequence[int]) -> bool:
        after = matcher.deep_copy()
        return bool(after.try_consume_tokens(list(tokens)) == len(tokens) and after.is_accepting())

    def _first_way(self, matcher: Follower, most: int, state: JsonState) -> _Way | None:
        # A quick ending, or else one that is searched for.
        far = int(HOPELESS * most) + MARGIN
        way = self._search(matcher, far, FIRST_STEPS, state)
        if way is None or len(way.tokens) <= most:
            return way
        way = self._search(matcher, most, FIRST_STEPS, state)
        self._may_be_missed = False
        return way

    def _search(self, matcher: Follower, most: int, steps: int, state: JsonState) -> _Way | None:
        steps = min(steps, MAX_STEPS - self._spent)
        if most < 0 or steps <= 0:
            return None
        before = self._way or self._before
        tokens, spent = self._ends.tokens(
            matcher,
            most,
            steps,
            in_string=state.in_string,
            escaped=state.escaped,
            tags=self._tags,
            names=self._extent.names,
            orders=self._extent.orders,
            texts=self._string_ends,
            memory=self._memory,
            known=b"" if before is None or self._has_tags(before) else before.text,
        )
        self._spent += spent
        self._may_be_missed = spent >= steps
        return None if tokens is None else self._way_of(tokens)

    @cached_property
    def _string_ends(self) -> list[bytes]:
        texts = (json.dumps(text, ensure_ascii=False)[1:] for text in self._extent.texts())
        ends = {text[at:].encode() for text in texts for at in range(len(text))}
        return sorted(ends, key=lambda end: (len(end), end))[:MAX_STRING_ENDS]

    def _way_of(self, tokens: Sequence[int]) -> _Way:
        return _Way(tuple(tokens), b"".join(self._texts[token] for token in tokens))


MAX_DIGITS = 16
"""Maximum digits of a number: the precision of a double, and an end to repeated digits."""

_NUMBER = frozenset(b"0123456789.eE+-")
_DIGITS = frozenset(b"0123456789")
_NUMBER_GOES_ON = re.compile(rb"[0-9.eE+-]+")


class JsonState(NamedTuple):
    """Position in a JSON text. digits: of the current number."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def behind(self, text: bytes) -> JsonState:
        in_string, escaped, digits = self
        for byte in text:
            if escaped:
                escaped = False
            elif byte == 0x22:
                in_string, digits = not in_string, 0
            elif in_string:
                escaped = byte == 0x5C
            elif byte in _DIGITS:
                digits += 1
            elif byte not in _NUMBER:
                digits = 0
        return JsonState(in_string, escaped, digits)


def number_digits(tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:
    """Return, for each token (V,), the digits with which it continues a number."""
    found = np.zeros(tokenizer.vocab_size, np.uint16)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text and text[0] in _NUMBER and (number := _NUMBER_GOES_ON.match(text)):
            digits = sum(byte in _DIGITS for byte in number[0])
            found[token] = digits + (number[0][-1] not in _DIGITS)
    return found
