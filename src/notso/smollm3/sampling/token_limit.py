"""Complete structured answers within their token limit.

An ending is a sequence of tokens that completes the answer according to its grammar; the distance to the end is the
length of the shortest ending. Near the limit, as soon as an ending that fits in the remaining tokens is known, a token
is accepted only if such an ending is also found after the token.

Far from the limit, the distance is estimated from the text of the grammar, without a search. A second estimate says by
how much one token can increase the distance, for example by opening an object with required members. The two estimates
determine when a search is necessary. They tend to be too high, so that the search does not start too late. Near the
limit, the last known ending is tried first and usually still works.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from notso.smollm3.sampling.schemas.patterns import shortest_match
from notso.smollm3.sampling.shortest_end import EndingHints, MatcherProtocol, SearchMemory, ShortestEndingSearch

# The following constants are used in estimates.
BYTES_PER_TOKEN = 2
MAX_REPEATS = 4_096
MAX_NAMES = 256
MAX_ORDERS = 256
MAX_STRINGS = 16
FORMAT_TOKENS = 40
MAX_DEPTH = 100  # maximum nesting depth of schemas and references; each level takes up to five interpreter frames
FREE_JUMP = 16
"""Estimated number of containers that one token can open in JSON without a schema."""

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
    """Estimated numbers of tokens."""

    least: float = 0  # length of a short answer
    jump: float = 0  # largest increase of the distance to the end that one token can cause
    most: float = 0  # greatest distance to the end at any point of an answer


@dataclass(frozen=True, slots=True)
class GrammarExtent:
    """Estimates for a grammar, and texts that a search tries."""

    extent: Extent
    names: tuple[bytes, ...]  # `"NAME":` of required members
    strings: tuple[tuple[tuple[str, ...], int], ...] = ()  # for each string, its patterns and minimum length
    formats: tuple[str, ...] = ()
    orders: tuple[dict[bytes, int], ...] = ()  # for each object with required members: `"NAME":` -> position
    answer: GrammarExtent | None = None  # estimates for an answer that may be given instead of tool calls

    def texts(self) -> list[str]:
        """Return short texts that match a string's patterns and minimum length, or a format."""
        texts = [shortest_match(*each) for each in self.strings]
        return [*(text for text in texts if text), *(_FORMAT_TEXTS[name] for name in self.formats)]

    def next_check(self, left: int, distance: float) -> int:
        """Return how many tokens will remain at the next search. Now, `left` remain, and an ending needs `distance`."""
        steps = max(0, math.floor((left - distance - 1) / (1 + self.extent.jump)))
        return int(min(left - steps, self.extent.most + 1))


def grammar_extent(parts: Sequence[dict[str, Any]]) -> GrammarExtent:
    """Estimate the length of answers that follow an llguidance grammar, in linear time."""
    schemas, has_tools = _SchemaExtents(), len(parts) > 1
    extents = [
        schemas.extent_of(part["json_schema"])
        if "json_schema" in part
        else _text_grammar_extent(str(part.get("lark_grammar", "")), is_call=has_tools and part is parts[0])
        for part in parts
    ]
    answers = [part for part in parts if has_tools and part.get("name") == "answer"]
    return GrammarExtent(
        _sum(extents),
        tuple(schemas.names),
        tuple(schemas.strings),
        tuple(schemas.formats),
        tuple(schemas.orders),
        grammar_extent(answers) if answers else None,
    )


def _sum(extents: Iterable[Extent]) -> Extent:
    return Extent(*map(sum, zip(*extents, strict=True)))


def _text_grammar_extent(source: str, is_call: bool) -> Extent:
    # is_call: whether the grammar describes tool calls. It then counts as literal text, because separate parts describe
    # the arguments of calls and the answer.
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


def _member_text(name: object) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode() + b":"


def _value_tokens(value: object) -> float:
    return len(json.dumps(value)) / BYTES_PER_TOKEN + 2


class _SchemaExtents:
    def __init__(self) -> None:
        self.names: dict[bytes, None] = {}
        self.strings: dict[tuple[tuple[str, ...], int], None] = {}
        self.formats: dict[str, None] = {}
        self.orders: list[dict[bytes, int]] = []
        self._depth = 0

    def extent_of(self, document: dict[str, Any]) -> Extent:
        self._sizes: dict[str, float] = {}
        self._definitions = document.get("$defs", {})
        self._extents: dict[int, Extent | None] = {}
        return self._schema_extent(document)

    def _schema_extent(self, schema: Any) -> Extent:
        if not isinstance(schema, dict):
            return Extent(2, FREE_JUMP, math.inf) if schema else Extent()
        if id(schema) in self._extents:
            extent = self._extents[id(schema)]
            return Extent(0, 0, math.inf) if extent is None else extent
        if self._depth >= MAX_DEPTH:
            return Extent(2, FREE_JUMP, math.inf)
        self._extents[id(schema)] = None
        self._depth += 1
        try:
            extent = self._extents[id(schema)] = self._combined_extent(schema)
        finally:
            self._depth -= 1
        return extent

    def _combined_extent(self, schema: dict[str, Any]) -> Extent:
        parts = [self._own_extent(schema)]
        parts += (self._schema_extent(each) for each in schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            if options := [self._schema_extent(each) for each in schema.get(keyword, ())]:
                least, most = min(each.least for each in options), max(each.most for each in options)
                parts.append(Extent(least, max(max(each.jump, each.least) for each in options), most))
        if "$ref" in schema:
            parts.append(self._schema_extent(self._definitions.get(str(schema["$ref"]).rpartition("/")[2], True)))
        return _sum(parts)

    def _own_extent(self, schema: dict[str, Any]) -> Extent:
        if "const" in schema or "enum" in schema:
            sizes = [_value_tokens(value) for value in schema.get("enum", (schema.get("const"),))]
            return Extent(min(sizes), max(sizes), max(sizes))
        kinds = schema.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(kinds or ())
        is_reference = bool(schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"})
        size = 2.0 + schema.get("minLength", 0)
        if "pattern" in schema:
            size += self._pattern_size(str(schema["pattern"]))
        self._record_string(schema)
        size += FORMAT_TOKENS * ("format" in schema) + (20 if kinds & {"number", "integer"} else 0)
        options = []
        if kinds - {"object", "array"}:
            options.append(Extent(size, size, size))
        if "object" in kinds or (not kinds and _OBJECT & schema.keys()):
            options.append(self._object_extent(schema))
        if "array" in kinds or (not kinds and _ARRAY & schema.keys()):
            options.append(self._array_extent(schema))
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

    def _record_string(self, schema: dict[str, Any]) -> None:
        parts, pending = [], [schema]
        while pending:
            parts.append(pending.pop())
            pending += (each for each in parts[-1].get("allOf", ()) if isinstance(each, dict))
        patterns = tuple(str(each["pattern"]) for each in parts if "pattern" in each)
        if (patterns or schema.get("minLength")) and len(self.strings) < MAX_STRINGS:
            self.strings.setdefault((patterns, schema.get("minLength", 0)))
        if schema.get("format") in _FORMAT_TEXTS:
            self.formats.setdefault(schema["format"])

    def _object_extent(self, schema: dict[str, Any]) -> Extent:
        required = set(schema.get("required", ()))
        member_texts = [_member_text(name) for name in (*schema.get("properties", ()), *schema.get("required", ()))]
        if required and len(self.orders) < MAX_ORDERS:
            self.orders.append({name: number for number, name in reversed(list(enumerate(member_texts[:MAX_NAMES])))})
        for name in schema.get("required", ()):
            if len(self.names) < MAX_NAMES:
                self.names.setdefault(_member_text(name))
        least, jump, most = 2.0, 0.0, 0.0
        for name, value in schema.get("properties", {}).items():
            extent, name_tokens = self._schema_extent(value), len(name) / BYTES_PER_TOKEN + 4
            least += name_tokens + extent.least if name in required else 0
            jump = max(jump, name_tokens + extent.jump, name_tokens + extent.least)
            most = max(most, name_tokens + extent.most)
        declared = schema.get("properties", {})
        least += sum(len(name) / BYTES_PER_TOKEN + 6 for name in required if name not in declared)
        others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
        for extent in map(self._schema_extent, others):
            jump, most = max(jump, extent.jump + 4, extent.least + 4), max(most, extent.most + 4)
        least += schema.get("minProperties", 0) * 8
        return Extent(least, max(jump, least), least + most)

    def _array_extent(self, schema: dict[str, Any]) -> Extent:
        first = [self._schema_extent(each) for each in schema.get("prefixItems", ())]
        rest = self._schema_extent(schema.get("items", True))
        count = schema.get("minItems", 0)
        least = 2 + sum(each.least + 1 for each in first[:count]) + max(0, count - len(first)) * (rest.least + 1)
        items = [*first, *([] if schema.get("items") is False else [rest])]
        jump = max((max(each.jump, each.least) + 2 for each in items), default=0)
        return Extent(least, max(least, jump), least + max((each.most for each in items), default=0))


FIRST_STEPS, STEPS = 3_000, 400
"""Maximum numbers of steps in a search while no ending is known, and in a search after a sampled token."""

MAX_STEPS = 20_000
"""Maximum number of search steps per answer. An answer that needs more steps may be cut off at the token limit."""

TRIES = 4
"""After this many rejected tokens, only tokens with which the known ending can begin are allowed."""

HOPELESS, MARGIN = 1.5, 20
"""The first search accepts endings of up to HOPELESS times the number of remaining tokens plus MARGIN. If it finds
none, there is no second search for an ending that fits in the remaining tokens."""

MAX_STRING_ENDS = 500

RETRIES = 1
"""Number of retries after a first search that ran out of steps. A retry is made when half of the remaining tokens have
been used."""


class Pieces(NamedTuple):
    """A vocabulary's end tokens, and the text and the `number_digits` of each token."""

    ends: npt.NDArray[np.intp]
    texts: list[bytes]
    digits: npt.NDArray[np.uint16]


class _Ending(NamedTuple):
    tokens: tuple[int, ...]
    text: bytes


class TokenLimit:
    """Keeps an answer within its limit. Call `permits` for each sampled token and `consume` for each accepted one."""

    def __init__(
        self, endings: ShortestEndingSearch, extent: GrammarExtent, tags: Sequence[int], pieces: Pieces
    ) -> None:
        self._endings = endings
        self._extent = extent
        self._tags = tuple(tags)
        self._texts = pieces.texts
        self._end_ids = pieces.ends
        self._memory = SearchMemory()
        self._check_at: int | None = None
        self._ending: _Ending | None = None
        self._last_ending: _Ending | None = None
        self._next: tuple[int, _Ending | None] | None = None
        self._rejected: set[int] = set()
        self._spent = 0
        self._retries = RETRIES
        self._may_be_missed = False

    @property
    def least_estimate(self) -> float:
        """Estimated length of a short answer in tokens, more likely too high than too low."""
        return self._extent.extent.least

    def exclude_calls(self) -> None:
        """Leave tool calls out of the estimates, because an answer has begun instead of a call."""
        self._extent = self._extent.answer or self._extent

    def distance(self, matcher: MatcherProtocol, most: int, state: JsonState) -> int | None:
        ending = self._first_ending(matcher, most, state)
        return None if ending is None else len(ending.tokens)

    def permits(self, matcher: MatcherProtocol, token: int, left: int, state: JsonState) -> bool:
        """Return whether an ending of up to `left` tokens can follow `token`, which the grammar allows; True if
        unknown.

        If the result is True, call `consume` with `token` before the next `permits`.
        """
        if self._check_at is None:
            self._check_at = self._extent.next_check(left + 1, self._extent.extent.least)
        if left + 1 > self._check_at:
            return True
        if self._ending is None or len(self._ending.tokens) > left + 1:
            self._ending = self._first_ending(matcher, left + 1, state)
            if self._ending is None:
                self._check_at = left // 2 if self._may_be_missed and self._retries else -1
                self._retries -= 1
                return True
        ending = self._ending_after(matcher, self._ending, token, left, state)
        if ending is None:
            self._rejected.add(token)
            return False
        self._next = token, ending
        return True

    def remaining_choices(self, token: int, left: int) -> npt.NDArray[np.intp] | None:
        """Return the tokens to choose from after `token` was rejected, or None for all other tokens."""
        if self._ending is None or (len(self._rejected) < TRIES and len(self._ending.tokens) <= left):
            return None
        if not self._ending.tokens:
            return self._end_ids
        text = b"" if self._has_tags(self._ending) else self._ending.text
        choices = {self._ending.tokens[0]}
        for size in range(1, len(text)):
            ids = self._endings.spell(text[:size]) if size <= 1 or not text[:size].isspace() else []
            if len(ids) == 1 and self._endings.cost(text[size:]) <= left:
                choices.add(ids[0])
            if size >= len(self._texts[self._ending.tokens[0]]):
                break
        return np.array(sorted(choices - self._rejected) or [self._ending.tokens[0]], np.intp)

    def consume(self, token: int, left: int) -> None:
        permitted, self._next = self._next, None
        self._rejected.clear()
        self._last_ending = self._ending or self._last_ending
        self._ending = permitted[1] if permitted is not None and permitted[0] == token else None
        if self._ending is not None:
            self._check_at = self._extent.next_check(left, len(self._ending.tokens))

    def _ending_after(
        self, matcher: MatcherProtocol, ending: _Ending, token: int, left: int, state: JsonState
    ) -> _Ending | None:
        if ending.tokens[:1] == (token,):
            rest = ending.tokens[1:]
            return self._make_ending(rest) if len(rest) <= left else None
        text = self._texts[token]
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return None
        if len(ending.tokens) <= left and self._completes_answer(after, ending.tokens):
            return ending
        if text and ending.text.startswith(text) and not self._has_tags(ending):
            rest = tuple(self._endings.spell(ending.text[len(text) :]))
            if len(rest) <= left and self._completes_answer(after, rest):
                return self._make_ending(rest)
        return self._search(after, left, STEPS, state.state_after(text))

    def _has_tags(self, ending: _Ending) -> bool:
        return any(tag in ending.tokens for tag in self._tags)

    def _completes_answer(self, matcher: MatcherProtocol, tokens: Sequence[int]) -> bool:
        after = matcher.deep_copy()
        return bool(after.try_consume_tokens(list(tokens)) == len(tokens) and after.is_accepting())

    def _first_ending(self, matcher: MatcherProtocol, most: int, state: JsonState) -> _Ending | None:
        # The first search also accepts endings that are too long. If it finds one of these, a second search looks for
        # an ending of up to `most` tokens.
        generous = int(HOPELESS * most) + MARGIN
        ending = self._search(matcher, generous, FIRST_STEPS, state)
        if ending is None or len(ending.tokens) <= most:
            return ending
        ending = self._search(matcher, most, FIRST_STEPS, state)
        self._may_be_missed = False
        return ending

    def _search(self, matcher: MatcherProtocol, most: int, steps: int, state: JsonState) -> _Ending | None:
        steps = min(steps, MAX_STEPS - self._spent)
        if most < 0 or steps <= 0:
            return None
        earlier = self._ending or self._last_ending
        tokens, spent = self._endings.tokens(
            matcher,
            most,
            steps,
            EndingHints(self._tags, self._extent.names, self._extent.orders, self._string_ends, self._memory),
            in_string=state.in_string,
            escaped=state.escaped,
            earlier_ending=b"" if earlier is None or self._has_tags(earlier) else earlier.text,
        )
        self._spent += spent
        self._may_be_missed = spent >= steps
        return None if tokens is None else self._make_ending(tokens)

    @cached_property
    def _string_ends(self) -> list[bytes]:
        texts = (json.dumps(text, ensure_ascii=False)[1:] for text in self._extent.texts())
        ends = {text[at:].encode() for text in texts for at in range(len(text))}
        return sorted(ends, key=lambda end: (len(end), end))[:MAX_STRING_ENDS]

    def _make_ending(self, tokens: Sequence[int]) -> _Ending:
        return _Ending(tuple(tokens), b"".join(self._texts[token] for token in tokens))


MAX_DIGITS = 20
"""Maximum number of digits of a number, which is that of the largest 64-bit integer. This limit prevents endless
numbers."""

_NUMBER = frozenset(b"0123456789.eE+-")
_DIGITS = frozenset(b"0123456789")
_NUMBER_GOES_ON = re.compile(rb"[0-9.eE+-]+")


class JsonState(NamedTuple):
    """Position in a JSON text. digits: number of digits of the current number so far."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def state_after(self, text: bytes) -> JsonState:
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


def number_digits(texts: Sequence[bytes]) -> npt.NDArray[np.uint16]:
    """Return, for each token (V,), how many digits it adds to a number."""
    # A number cannot end with a sign, point or exponent, so the digit that must follow is also counted.
    found = np.zeros(len(texts), np.uint16)
    for token, text in enumerate(texts):
        if text and text[0] in _NUMBER and (number := _NUMBER_GOES_ON.match(text)):
            digits = sum(byte in _DIGITS for byte in number[0])
            found[token] = digits + (number[0][-1] not in _DIGITS)
    return found
