"""Which JSON schemas an answer can be held to: every keyword is enforced, or the schema is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn

from notso.smollm3.errors import InvalidRequestError

MAX_DEPTH = 32
MAX_CHARACTERS = 65_536

MAX_DESCENT = 512
"""References times nesting: the library goes down one call for each, and ends the process where its stack ends."""

MAX_PERIOD = 10_000
"""The library keeps a state for every remainder by all `multipleOf` together, powers of ten aside."""

MAX_PATTERN_PROPERTIES = 32
"""In one object: the library combines their patterns with one another."""

_ONE = ("items", "additionalProperties")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")

ENFORCED = frozenset(
    (
        *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *_ONE,
        *_MANY,
        *_NAMED,
    )
)
DESCRIPTIVE = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$comment", "$schema", "$id"),
    )
)
"""Say nothing about which values are valid."""


def checked_schema(source: str, param: str) -> dict[str, Any]:
    """The schema that `source` is as JSON text. Raises InvalidRequestError, which names `param` and what is wrong."""
    if len(source) > MAX_CHARACTERS:
        raise InvalidRequestError(f"the schema is longer than {MAX_CHARACTERS:,} characters", param=param)
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
        source.encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}", param=param) from None
    return check_schema(schema, param)


def check_schema(schema: object, param: str) -> dict[str, Any]:
    """A schema as it is if it can be enforced. Raises InvalidRequestError otherwise."""
    if not isinstance(schema, dict):
        raise InvalidRequestError("the schema must be a JSON object", param=param)
    left: list[tuple[object, str, int]] = [(schema, "", 1)]
    deepest, references, period = 1, 0, 1
    while left:
        each, where, depth = left.pop()
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise InvalidRequestError(f"{where or 'the schema'} must be a schema: an object or a boolean", param=param)
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"the schema is nested deeper than {MAX_DEPTH}", param=param)
        _check_keywords(each, where, param)
        deepest, references = max(deepest, depth), references + ("$ref" in each)
        period = math.lcm(period, _period(each.get("multipleOf")))
        if period > MAX_PERIOD:
            raise InvalidRequestError(f"{where}/multipleOf needs too much memory to be enforced", param=param)
        left += ((inner, f"{where}/{path}", depth + 1) for path, inner in _inner(each))
    if references and deepest * (references + 1) > MAX_DESCENT:
        raise InvalidRequestError(
            f"the schema has {references} references and is nested {deepest} deep; the product may be {MAX_DESCENT}",
            param=param,
        )
    return schema


def _check_keywords(schema: dict[str, Any], where: str, param: str) -> None:
    for keyword in schema:
        if keyword not in ENFORCED and keyword not in DESCRIPTIVE:
            raise InvalidRequestError(f"the schema's keyword {where}/{keyword} is not supported", param=param)
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > 1:  # names that the schema does not list may come twice
        raise InvalidRequestError(f"{where}/minProperties above 1 is not supported; use required", param=param)
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
        raise InvalidRequestError(
            f"{where}/patternProperties may have {MAX_PATTERN_PROPERTIES} members, not {len(patterns)}", param=param
        )


def _period(step: object) -> int:
    """The digits of a `multipleOf` without factors of ten's primes, which cost nothing; 1 where it is no number."""
    if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
        return 1
    digits = abs(int("".join(map(str, Decimal(repr(step)).as_tuple().digits)))) or 1
    for prime in (2, 5):
        while digits % prime == 0:
            digits //= prime
    return digits


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The schemas in a schema, with where they stand."""
    for keyword in _ONE:
        if keyword in schema:
            yield keyword, schema[keyword]
    for keyword in _MANY:
        inner = schema.get(keyword)
        if isinstance(inner, list):
            yield from ((f"{keyword}/{number}", each) for number, each in enumerate(inner))
    for keyword in _NAMED:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            yield from ((f"{keyword}/{name}", each) for name, each in inner.items())


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
