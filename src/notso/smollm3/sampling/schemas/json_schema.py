"""Check JSON schemas and rewrite them. A schema with a known constraint that cannot be enforced is rejected."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.schemas.negation import Schema
from notso.smollm3.sampling.schemas.rewriting import DATA, MAX_DEPTH, SchemaRewriter
from notso.smollm3.sampling.schemas.simplifying import MANY, MAX_PATTERN_PROPERTIES, NAMED, ONE
from notso.smollm3.strict_json import refuse_constant

MAX_CHARACTERS = 2**20
"""Maximum length of a schema in a request."""

MAX_REWRITTEN = 2**22
"""Maximum number of keywords, names and values in a rewritten schema."""

MAX_DESCENT = 4_096
"""Maximum of a schema's depth * (number of definitions + 1). The library (llguidance) recurses into each definition,
and a stack overflow would kill the process."""

MAX_PERIOD = 10_000
"""Maximum least common multiple of all `multipleOf` values, after their factors 2 and 5 are removed. The library keeps
a state for each possible remainder."""

MAX_INTERSECTED = 10
"""Maximum number of patterns that apply to the same text. Each pattern doubles the work of the library, and its memory
is not limited."""

MAX_OPTIONAL = 240
"""Maximum number of consecutive optional properties of an object. The library allows at most 1,000 alternatives at each
position of an answer (MAX_ROW_ITEMS in grammar.py), and each such property uses four."""

CACHED_SCHEMAS, CACHED_CHARACTERS = 8, 32_768
"""Up to CACHED_SCHEMAS schemas of up to CACHED_CHARACTERS characters are cached, because clients repeat them. Longer
schemas are read one at a time, because reading a schema takes a hundred times its size in memory."""

_LARGE = threading.Lock()


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """A schema with supported keywords, and the ignored keywords and formats (as `format: x`)."""

    schema: dict[str, Any]
    ignored: tuple[str, ...] = ()


def ignored_keywords(source: str) -> tuple[str, ...]:
    """Return the keywords and formats that `checked_schema` ignores. Raises InvalidRequestError."""
    return checked_schema(source).ignored


def checked_schema(source: str) -> EnforcedSchema:
    """Parse a request's schema and rewrite it with supported keywords. Raises InvalidRequestError."""
    if len(source) > MAX_CHARACTERS:
        raise InvalidRequestError(f"the schema is longer than {MAX_CHARACTERS:,} characters", param="grammar")
    if len(source) <= CACHED_CHARACTERS:
        return _read_cached(source)
    with _LARGE:
        return _read(source)


def _read(source: str) -> EnforcedSchema:
    try:
        schema = json.loads(source, parse_constant=refuse_constant, parse_float=_finite)
        source.encode()
        if "\\u" in source:  # escapes can stand for lone surrogates, which error messages and headers cannot contain
            json.dumps(schema, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}", param="grammar") from None
    return enforced_schema(schema, "grammar")


_read_cached = lru_cache(maxsize=CACHED_SCHEMAS)(_read)


def enforced_schema(document: object, param: str) -> EnforcedSchema:
    """Rewrite a schema with supported keywords. Raises InvalidRequestError if it cannot be enforced."""
    if not isinstance(document, dict):
        raise InvalidRequestError("the schema must be a JSON object", param=param)
    rewriter = SchemaRewriter(_without_null_keywords(document), param)
    schema, definitions = rewriter.rewrite_document()
    if schema is False:
        raise InvalidRequestError("the schema is refused: no value satisfies it", param=param)
    rewritten: dict[str, Any] = {**({} if schema is True else schema)}
    if (problem := _size_problem(rewritten, definitions)) is not None:
        raise InvalidRequestError(problem, param=param)
    return EnforcedSchema(rewritten | ({"$defs": definitions} if definitions else {}), tuple(rewriter.ignored))


_NAMED = frozenset((*NAMED, "$defs", "definitions", "dependencies", "dependentSchemas"))


def _without_null_keywords(schema: Any, depth: int = 1) -> Any:
    # Clients in Go, Java and C# often write absent keywords as null, so keywords with null are dropped, except `const`.
    # Schemas that are nested too deeply are refused later. An object under `enum` or `default` is treated as a schema,
    # because a `$ref` can lead to it.
    if isinstance(schema, list):
        return [_without_null_keywords(each, depth) for each in schema]
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "const" or (keyword in DATA and not isinstance(value, dict)):
            kept[keyword] = value
        elif keyword in _NAMED and isinstance(value, dict):
            kept[keyword] = {name: _without_null_keywords(each, depth + 1) for name, each in value.items()}
        else:
            kept[keyword] = _without_null_keywords(value, depth + 1)
    return {keyword: value for keyword, value in kept.items() if value is not None or keyword == "const"}


def _size_problem(schema: Schema, definitions: dict[str, Schema]) -> str | None:
    # The library expands shared subschemas, so each occurrence of a subschema counts toward the size.
    sizes: dict[int, tuple[int, int]] = {}
    deepest, size, period = 1, 0, 1
    patterns_of: dict[int, int] = {}
    whole = schema, *definitions.values()
    required = {name for each in whole for inner in _iter_subschemas(each) for name in inner.get("required", ())}
    for each in whole:
        for inner in _iter_subschemas(each):
            period = math.lcm(period, _period(inner.get("multipleOf")))
            if period > MAX_PERIOD:
                return "multipleOf needs too much memory to be enforced"
            patterns = len(inner.get("patternProperties", ()))
            if patterns > MAX_PATTERN_PROPERTIES:
                return f"patternProperties has {patterns} members; at most {MAX_PATTERN_PROPERTIES} are supported"
            if (optional := _longest_optional_run(inner, required)) > MAX_OPTIONAL:
                return (
                    f"an object has {optional} consecutive optional properties; at most {MAX_OPTIONAL} are supported: "
                    "require some of them"
                )
        if _intersected(each, definitions, patterns_of) > MAX_INTERSECTED:
            return f"more than {MAX_INTERSECTED} patterns apply to the same value"
        own, depth = _extent(each, sizes)
        deepest, size = max(deepest, depth), size + own
    if size > MAX_REWRITTEN:
        return "the schema is too large: it has too many combinations"
    if definitions and deepest * (len(definitions) + 1) > MAX_DESCENT:
        return (
            f"the schema has {len(definitions)} referenced definitions and a depth of {deepest}; "
            f"depth * (definitions + 1) is limited to {MAX_DESCENT}"
        )
    return None


def _iter_subschemas(schema: Schema) -> Iterator[dict[str, Any]]:
    pending: list[Schema] = [schema]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if isinstance(each, dict) and id(each) not in seen:
            seen.add(id(each))
            yield each
            pending += _inner(each)


def _longest_optional_run(schema: dict[str, Any], required: set[str]) -> int:
    # required: the names that any subschema requires, because several subschemas can describe the same object.
    run = longest = 0
    for name, each in schema.get("properties", {}).items() if "object" in schema.get("type", "object") else ():
        run = 0 if name in required else run + (each is not False)
        longest = max(longest, run)
    return longest


def _extent(schema: Schema, cache: dict[int, tuple[int, int]]) -> tuple[int, int]:
    if not isinstance(schema, dict):
        return 1, 1
    if id(schema) not in cache:
        extents = [_extent(inner, cache) for inner in _inner(schema)]
        own = sum(1 + (len(value) if isinstance(value, list | dict) else 1) for value in schema.values())
        cache[id(schema)] = own + sum(size for size, _ in extents), 1 + max((depth for _, depth in extents), default=0)
    return cache[id(schema)]


def _intersected(schema: Schema, definitions: dict[str, Schema], patterns_of: dict[int, int]) -> int:
    pending: list[tuple[Schema, bool]] = [(schema, False)]
    while pending:
        each, parts_are_counted = pending.pop()
        if not isinstance(each, dict) or (id(each) in patterns_of and not parts_are_counted):
            continue
        target = definitions.get(str(each.get("$ref")).rpartition("/")[2], True)
        if not parts_are_counted:
            patterns_of[id(each)] = 0  # used if the schema refers to itself
            pending += [(each, True), (target, False), *((inner, False) for inner in _inner(each))]
            continue
        own = {keyword: value for keyword, value in each.items() if keyword not in ("allOf", "anyOf", "oneOf")}
        most = max((patterns_of.get(id(inner), 0) for inner in _inner(own)), default=0)
        most = max(most, int("pattern" in each)) + patterns_of.get(id(target), 0)
        most += sum(patterns_of.get(id(inner), 0) for inner in each.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            most += max((patterns_of.get(id(inner), 0) for inner in each.get(keyword, ())), default=0)
        patterns_of[id(each)] = most
    return patterns_of.get(id(schema), 0)


def _inner(schema: dict[str, Any]) -> Iterator[Schema]:
    for keyword, value in schema.items():
        if keyword in ONE:
            yield value
        elif keyword in MANY:
            yield from value
        elif keyword in NAMED:
            yield from value.values()


def _period(step: object) -> int:
    # Factors of 2 and 5 are left out, because the library needs no states for them.
    if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
        return 1
    digits = abs(int("".join(map(str, Decimal(repr(step)).as_tuple().digits)))) or 1
    for prime in (2, 5):
        while digits % prime == 0:
            digits //= prime
    return digits


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is too large")
    return value
