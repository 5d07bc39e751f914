"""Strings in structured output that quote a source: `{"type": "string", "x-quote-of": NAME}`.

Such a string is a passage of the source with this name, from the start of a word to the end of a word or a punctuation
mark, written with JSON's escapes. It may be null if the type allows it, and empty if the schema has `"default": ""` or
the source contains no words.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.quote_index import QUOTE_BYTES, QuoteIndex, QuoteLimits
from notso.smollm3.sampling.quotes import (
    CACHED_BYTES,
    Ids,
    PinnedReading,
    Quotation,
    QuoteManager,
    QuoteVocabulary,
)
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.sampling.schemas.rewriting import References
from notso.smollm3.values.request_options import QUOTE_OF, Grammar, QuoteSource, RequestOptions

FIELD = QuoteLimits(least_words=1, least_characters=1)
INDEX_COST = 4_096
"""Fixed cost of building an index, as the number of bytes that could be indexed in the same time."""
COMBINABLE = frozenset({QUOTE_OF, "type", "maxLength", "default", "description", "title", "examples"})
"""Keywords that can be combined with x-quote-of."""
_CLOSER = re.compile(rb'"[\s,}\]]*')
_OPENING_WITH_TEXT = re.compile(rb'"[\s\S]')
_VALUE_WITHIN = re.compile(rb'[:,\[]\s*"[\s\S]')

# x-quote-of cannot be enforced in the subschemas of these keywords.
_UNENFORCED = frozenset({"contains", "if", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties"})
_UNENFORCED_NAMED = frozenset({"dependencies", "dependentSchemas", "patternProperties"})

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class QuotedField:
    """A string that quotes a source."""

    index: QuoteIndex
    may_be_empty: bool


class JsonPosition:
    """Position in a JSON text: the path of the unfinished value, or of the next one."""

    def __init__(self) -> None:
        self._containers: list[list[Any]] = []  # [key or index, whether a key comes next]
        self._string: bytearray | None = None
        self.is_escaped = False
        self._is_key = False

    @property
    def path(self) -> Path:
        return tuple(each[0] for each in self._containers)

    @property
    def in_value_string(self) -> bool:
        return self._string is not None and not self._is_key

    @property
    def expects_value(self) -> bool:
        return self._string is None and not (self._containers and self._containers[-1][1])

    def consume(self, text: bytes) -> None:
        for byte in text:
            if self._string is not None:
                self._consume_in_string(self._string, byte)
            elif byte == ord('"'):
                self._string, self._is_key = bytearray(b'"'), not self.expects_value
            elif byte in b"{[":
                self._containers.append(["", True] if byte == ord("{") else [0, False])
            elif byte in b"}]" and self._containers:
                self._containers.pop()
            elif self._containers and byte == ord(":"):
                self._containers[-1][1] = False
            elif self._containers and byte == ord(","):
                top = self._containers[-1]
                if isinstance(top[0], int):
                    top[0] += 1
                else:
                    top[1] = True

    def _consume_in_string(self, string: bytearray, byte: int) -> None:
        string.append(byte)
        if self.is_escaped:
            self.is_escaped = False
        elif byte == ord("\\"):
            self.is_escaped = True
        elif byte == ord('"'):
            if self._is_key and self._containers:
                self._containers[-1][0] = json.loads(string.decode("utf-8", "replace"))
            self._string = None


class QuotableSchema:
    """The subschemas of a document in which x-quote-of is enforced."""

    # The document may be invalid, because it is checked later; keywords without effect are never checked.
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._references = References(document, "grammar")

    def parts_at(self, path: Path) -> Collection[dict[str, Any]]:
        # Each subschema is visited once, because chains of references can reach it in exponentially many ways.
        parts = self._parts_of([self._document])
        for name in path:
            parts = self._parts_of(_inner_at(part, name) for part in parts)
        return parts

    def fields(self) -> Iterator[dict[str, Any]]:
        # Yields the subschemas with x-quote-of. Raises InvalidRequestError if one cannot be enforced.
        pending: list[tuple[Any, str]] = [(self._document, "")]
        seen: set[tuple[int, bool]] = set()
        while pending:
            each, unenforced = pending.pop()
            if not isinstance(each, dict) or (id(each), bool(unenforced)) in seen:
                continue
            seen.add((id(each), bool(unenforced)))
            if isinstance(each.get(QUOTE_OF), str):
                if unenforced:
                    raise InvalidRequestError(f"{QUOTE_OF} is not supported in {unenforced}", param="grammar")
                yield each
            pending += ((inner, unenforced) for inner in (*self._same_value(each), *_inner(each)))
            pending += ((each[keyword], keyword) for keyword in _UNENFORCED & each.keys())
            if each.get("patternProperties"):  # the names that a pattern matches are not known here
                pending.append((each.get("additionalProperties"), "additionalProperties next to patternProperties"))
            for keyword in _UNENFORCED_NAMED & each.keys():
                pending += ((inner, keyword) for inner in _values(each[keyword]))

    def _parts_of(self, schemas: Iterable[Any]) -> Collection[dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        pending = deque(schemas)
        while pending:
            each = pending.popleft()
            if isinstance(each, dict) and id(each) not in parts:
                parts[id(each)] = each
                pending += self._same_value(each)
        return parts.values()

    def _same_value(self, schema: dict[str, Any]) -> Iterator[Any]:
        for keyword in ("allOf", "anyOf", "oneOf"):
            yield from _values(schema.get(keyword))
        yield from (schema.get("then"), schema.get("else"))
        if "$ref" in schema:
            with contextlib.suppress(InvalidRequestError):
                yield self._references.target(schema, "")


class QuotedFields:
    """Constrains the quoted fields of one answer to match their sources."""

    # fields: keyed by the Python `id()` of the subschema that describes the string.
    def __init__(self, vocabulary: QuoteVocabulary, schema: QuotableSchema, fields: Mapping[int, QuotedField]) -> None:
        self._vocabulary = vocabulary
        self._schema = schema
        self._fields = fields
        self._position = JsonPosition()
        self._open: Quotation | None = None
        self._field: QuotedField | None = None
        self._is_empty = True

    def narrow(self, allowed: npt.NDArray[np.bool_], logits: Floats) -> npt.NDArray[np.bool_]:
        """Return the mask (V,) of the tokens in `allowed` that the sources permit."""
        if self._open is None:
            narrowed = allowed.copy()
            narrowed[self._values_within] = False
            if self._position.expects_value and self._field_at(self._position.path) is not None:
                narrowed[self._opening] = False
            return narrowed
        permitted = np.zeros_like(allowed)
        permitted[self._open.allowed_tokens(np.where(allowed, logits[: len(allowed)], -np.inf))] = True
        may_be_empty = self._is_empty and self._field is not None and self._field.may_be_empty
        if may_be_empty or (not self._is_empty and self._open.may_end):
            permitted[self._closers] = True
        return allowed & permitted

    def consume(self, text: bytes) -> None:
        if self._open is not None and (self._position.is_escaped or not text.startswith(b'"')):
            self._open.consume(text)
            self._is_empty = False
        self._position.consume(text)
        if not self._position.in_value_string:
            self._open = self._field = None
        elif self._open is None and (field := self._field_at(self._position.path)) is not None:
            self._field, self._is_empty = field, True
            self._open = Quotation(field.index, self._vocabulary)

    def _field_at(self, path: Path) -> QuotedField | None:
        parts = self._schema.parts_at(path)
        return next((self._fields[id(part)] for part in parts if id(part) in self._fields), None)

    @cached_property
    def _closers(self) -> Ids:
        return self._matching_tokens(_CLOSER.fullmatch)

    @cached_property
    def _opening(self) -> Ids:
        return self._matching_tokens(_OPENING_WITH_TEXT.search)

    @cached_property
    def _values_within(self) -> Ids:
        return self._matching_tokens(_VALUE_WITHIN.search)

    def _matching_tokens(self, match: Callable[[bytes], object]) -> Ids:
        quoting = ((text, each) for text, each in self._vocabulary.ids.items() if b'"' in text)
        return np.array([each for text, each in quoting if match(text)], np.intp)


def quoted_fields(
    options: RequestOptions, quotes: QuoteManager, pinned: PinnedReading | None = None
) -> tuple[RequestOptions, QuotedFields | None]:
    """Return options without x-quote-of in the schema, and the constraint on quoted fields, if any.

    Raises InvalidRequestError.
    """
    grammar = options.grammar
    if grammar is None or grammar.kind != "json_schema" or QUOTE_OF not in grammar.source:
        return options, None
    try:
        document = json.loads(grammar.source)
    except ValueError:
        return options, None  # the error is reported when the schema is checked
    except RecursionError:
        raise InvalidRequestError("the schema is nested too deeply", param="grammar") from None
    if not isinstance(document, dict):
        return options, None
    if options.tools and options.tool_choice != "none":
        raise InvalidRequestError(f"{QUOTE_OF} cannot be combined with tools", param="grammar")
    schema = QuotableSchema(document)
    parts = list(schema.fields())
    if not parts:
        return options, None
    try:
        source = json.dumps(_strip_quote_keywords(document, {id(part) for part in parts}), ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError("the schema is nested too deeply", param="grammar") from None
    needed = {id(part): _quotable(part, options.sources) for part in parts}
    distinct = set(needed.values())
    costs = {text: len(text.encode("utf-8", "surrogatepass")) + INDEX_COST for text, _ in distinct}
    if sum(costs[text] for text, _ in distinct) - sum(costs.values()) > CACHED_BYTES:
        raise InvalidRequestError(
            f"strings with {QUOTE_OF} have too many different values of maxLength for the length of their documents",
            param="grammar",
        )
    indexes = {each: quotes.index(*each, escaped=True, pinned=pinned) for each in distinct}
    fields = {}
    for part in parts:
        index = indexes[needed[id(part)]]
        fields[id(part)] = QuotedField(index, part.get("default") == "" or not index.whole.high)
    plain = replace(options, grammar=Grammar("json_schema", source), sources=())
    return plain, QuotedFields(quotes.vocabulary, schema, fields)


def _quotable(part: Mapping[str, Any], sources: Sequence[QuoteSource]) -> tuple[str, QuoteLimits]:
    types = part.get("type")
    named = types if isinstance(types, list) else [types]
    if "string" not in named or any(each not in ("string", "null") for each in named):
        raise InvalidRequestError(f'{QUOTE_OF} requires the type "string" or ["string", "null"]', param="grammar")
    for keyword in part:
        if keyword not in COMBINABLE:
            raise InvalidRequestError(f"{QUOTE_OF} cannot be combined with {keyword}", param="grammar")
    most = part.get("maxLength", 0)
    if type(most) is not int or most < 0:
        raise InvalidRequestError("maxLength must be a whole number", param="grammar")
    source = next((each for each in sources if each.name == part[QUOTE_OF]), None)
    if source is None:
        names = ", ".join(each.name for each in sources) or "none"
        raise InvalidRequestError(f"{QUOTE_OF} does not name a document; available: {names}", param="grammar")
    text = source.text if most or "maxLength" not in part else ""
    # A limit that no quotation reaches is left out, so that fields that differ only in such limits share an index. A
    # limit of 2**31 or more would overflow in the index.
    return text, replace(FIELD, most_length=most if most < min(QUOTE_BYTES, len(text)) else 0)


def _strip_quote_keywords(schema: Any, fields: Collection[int]) -> Any:
    # fields: id() of each subschema with x-quote-of. Other objects may be data, such as a value of `enum`.
    if isinstance(schema, list):
        return [_strip_quote_keywords(each, fields) for each in schema]
    if not isinstance(schema, dict):
        return schema
    removed = {QUOTE_OF, "maxLength"} if id(schema) in fields else set()
    return {name: _strip_quote_keywords(value, fields) for name, value in schema.items() if name not in removed}


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    yield from _values(schema.get("properties"))
    yield from _values(schema.get("prefixItems"))
    items = schema.get("items")
    yield from _values(items) if isinstance(items, list) else (items,)
    yield from (schema.get("additionalProperties"), schema.get("additionalItems"))


def _inner_at(schema: dict[str, Any], name: str | int) -> Any:
    if isinstance(name, int):
        items = schema.get("items")
        is_list = isinstance(items, list)  # possible in draft 2019-09 and older
        first = _values(items if is_list else schema.get("prefixItems"))
        return first[name] if name < len(first) else schema.get("additionalItems") if is_list else items
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties")


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
