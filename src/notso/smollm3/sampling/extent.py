"""Estimate the length of answers from a grammar's text.

Estimates are rather too large than too small: they decide when to search for the exact distance to the end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from notso.smollm3.sampling.schemas.patterns import shortest_match

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
    names: tuple[bytes, ...]
    strings: tuple[tuple[tuple[str, ...], int], ...] = ()
    formats: tuple[str, ...] = ()
    orders: tuple[dict[bytes, int], ...] = ()

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
    """Estimate from a grammar's text. For tool calls, only its literals count."""
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
    """Estimates for the schemas of a document, cached."""

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
        """Estimate for a pattern: twice its shortest text, if known."""
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
