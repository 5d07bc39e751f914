"""Strings of structured output that quote a source: `{"type": "string", "x-quote-of": NAME}`.

Such a string is a passage of the source with this name, from the start of a word to the end of a word or a punctuation
mark, written with JSON's escapes. It may be null if the type allows it. It may be empty if the schema has
`"default": ""`, or if the source contains no words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.quote_index import QUOTE_BYTES, QuoteIndex, QuoteLimits
from notso.smollm3.sampling.quotes import Ids, PinnedReading, Quotation, QuoteManager, QuoteVocabulary
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.values.request_options import QUOTE_OF, Grammar, QuoteSource, RequestOptions

FIELD = QuoteLimits(least_words=1, least_characters=1)
COMBINABLE = frozenset({QUOTE_OF, "type", "maxLength", "default", "description", "title", "examples"})
"""Keywords that can be combined with x-quote-of."""
_CLOSER = re.compile(rb'"[\s,}\]]*')
_OPENING_WITH_TEXT = re.compile(rb'"[\s\S]')
_VALUE_WITHIN = re.compile(rb'[:,\[]\s*"[\s\S]')

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class QuotedField:
    """A string that quotes a source. may_be_empty: the string can be ""."""

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


class QuotedFields:
    """Constrains the quoted fields of one answer to match their sources."""

    # fields: keyed by the Python `id()` of the subschema that describes the string.
    def __init__(
        self, vocabulary: QuoteVocabulary, schema: Mapping[str, Any], fields: Mapping[int, QuotedField]
    ) -> None:
        self._vocabulary = vocabulary
        self._schema = schema
        self._fields = fields
        self._position = JsonPosition()
        self._open: Quotation | None = None
        self._field: QuotedField | None = None
        self._is_empty = True

    @property
    def is_quoting(self) -> bool:
        return self._open is not None

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
        for part in _subschemas_at(self._schema, self._schema, path):
            if (field := self._fields.get(id(part))) is not None:
                return field
        return None

    @cached_property
    def _closers(self) -> Ids:
        return self._matching_tokens(lambda text: _CLOSER.fullmatch(text) is not None)

    @cached_property
    def _opening(self) -> Ids:
        return self._matching_tokens(lambda text: _OPENING_WITH_TEXT.search(text) is not None)

    @cached_property
    def _values_within(self) -> Ids:
        return self._matching_tokens(lambda text: _VALUE_WITHIN.search(text) is not None)

    def _matching_tokens(self, matches: Any) -> Ids:
        quoting = ((text, each) for text, each in self._vocabulary.ids.items() if b'"' in text)
        return np.array([each for text, each in quoting if matches(text)], np.intp)


def quoted_fields(
    options: RequestOptions, quotes: QuoteManager, pinned: PinnedReading | None = None
) -> tuple[RequestOptions, QuotedFields | None]:
    """Return options without x-quote-of in the schema, and the constraint on quoted fields, if any.

    Raises InvalidRequestError for an unknown source or an unsupported use of x-quote-of.
    """
    grammar = options.grammar
    if grammar is None or grammar.kind != "json_schema" or QUOTE_OF not in grammar.source:
        return options, None
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError):
        return options, None  # the error is reported when the schema is checked
    if options.tools and options.tool_choice != "none":
        raise InvalidRequestError(f"{QUOTE_OF} cannot be combined with tools", param="grammar")
    fields = {
        id(part): _field(part, options.sources, quotes, pinned)
        for part in _walk_objects(schema)
        if isinstance(part.get(QUOTE_OF), str)
    }
    if not fields:
        return options, None
    source = json.dumps(_strip_quote_keywords(schema), ensure_ascii=False)
    plain = replace(options, grammar=Grammar("json_schema", source), sources=())
    return plain, QuotedFields(quotes.vocabulary, schema, fields)


def _field(
    part: Mapping[str, Any], sources: Sequence[QuoteSource], quotes: QuoteManager, pinned: PinnedReading | None
) -> QuotedField:
    types = part.get("type")
    named = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
    if "string" not in named or not named <= {"string", "null"}:
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
    # No quotation has more than QUOTE_BYTES characters, and lengths of 2**31 or more would overflow in the index.
    limits = replace(FIELD, most_length=min(most, QUOTE_BYTES))
    index = quotes.index(text, limits, escaped=True, pinned=pinned)
    return QuotedField(index, part.get("default") == "" or not index.whole.high)


def _walk_objects(schema: Any) -> Iterator[dict[str, Any]]:
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield each
            pending += each.values()
        elif isinstance(each, list):
            pending += each


def _strip_quote_keywords(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strip_quote_keywords(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    removed = {QUOTE_OF, "maxLength"} if isinstance(schema.get(QUOTE_OF), str) else set()
    return {name: _strip_quote_keywords(value) for name, value in schema.items() if name not in removed}


def _subschemas_at(
    document: Any, schema: Any, path: Path, seen: frozenset[int] = frozenset()
) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict) or (id(schema) in seen):
        return
    seen |= {id(schema)}
    for keyword in ("allOf", "anyOf", "oneOf"):
        for inner in schema.get(keyword) or ():
            yield from _subschemas_at(document, inner, path, seen)
    for keyword in ("then", "else"):
        yield from _subschemas_at(document, schema.get(keyword), path, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target = document
        for name in reference.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        yield from _subschemas_at(document, target, path, seen)
    if not path:
        yield schema
        return
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        prefix = schema.get("prefixItems") or []
        inner = prefix[first] if first < len(prefix) else schema.get("items")
    else:
        inner = (schema.get("properties") or {}).get(first, schema.get("additionalProperties"))
    yield from _subschemas_at(document, inner, rest)
