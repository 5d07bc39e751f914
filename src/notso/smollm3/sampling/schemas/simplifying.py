"""Close and simplify schemas, so that the library (llguidance) can compile them.

First, objects that declare properties are closed: no other names are allowed, because a model could otherwise keep
adding names without end. Objects stay open if `additionalProperties` requires it, or if there would not be enough names
for `minProperties`.

Closed schemas are then simplified; the result allows the same values, except numbers beyond LARGEST_BOUND. The library
intersects a reference with the keywords next to it, and the schema of a declared property with the schemas of patterns
that match its name. This fails if one of these schemas is recursive, so the intersections are computed here where
possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from decimal import ROUND_FLOOR, Decimal
from typing import Any

from notso.smollm3.sampling.schemas.negation import AUTOMATON_STEPS, TYPES, Negation, Schema, all_of, any_of, type_of
from notso.smollm3.sampling.schemas.patterns import exclude_texts, matches

_OBJECTS = frozenset(("properties", "patternProperties", "additionalProperties", "required", "minProperties"))
_COMBINED = ("allOf", "anyOf", "oneOf")

ONE = ("items", "additionalProperties")
MANY = ("anyOf", "allOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties")
"""Keywords with a schema (ONE), a list of schemas (MANY), or a mapping of names to schemas (NAMED)."""

VALUES = frozenset(
    (
        *("type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
"""Supported keywords without subschemas."""

REWRITTEN = frozenset(
    (
        *("$ref", "format", "not", "if", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"),
    )
)
"""Keywords that are replaced by supported keywords if possible."""

SILENT = frozenset(("then", "else", "minContains", "maxContains", "additionalItems"))
"""Keywords that only modify other keywords."""

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$comment", "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary"),
        *("$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Annotations, which do not constrain values."""

REFUSED = frozenset(("$dynamicRef", "$recursiveRef"))
"""Unsupported keywords that constrain values. Schemas with them are refused."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"format": "hostname", "pattern": "^(?:-?[a-zA-Z0-9.])+$", "maxLength": 253},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}
"""The enforced formats, expressed in keywords of the library. Other formats are annotations, as in the standard.

Dates and times follow RFC 3339, but without leap seconds and the year 0; the library itself would allow February 29 in
any year. Host names cannot have adjacent hyphens, which would start an encoded label.
"""

MAX_PATTERN_PROPERTIES = 32
"""Maximum number of patterns per object. The library computes the intersections of all patterns of an object."""

_KINDS = frozenset((*TYPES, "integer"))
_PLAIN = {
    "array": frozenset(("type", "items", "minItems", "maxItems")),
    "object": frozenset(("type", "properties", "required", "additionalProperties")),
}
"""Schemas of a type are intersected only if they have no keywords besides these."""


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

LARGEST_BOUND = 2**63 - 1024
"""The largest double below 2**63. Ranges are narrowed to it and its negative, because the library rejects or changes
bounds beyond them. Exceptions: upper bounds of integers, and bounds next to `enum` or `const`."""

SMALLEST_BOUND = "1e-18"
"""Replaces an exclusive bound of 0. It has no more than MAX_DIGITS digits (see token_limit.py)."""


def _readable_bounds(schema: dict[str, Any]) -> dict[str, int | float]:
    # Avoids bounds that the library handles incorrectly: it rounds bounds of more than 15 digits, treats some exclusive
    # bounds as inclusive (0 in 0 < x < 0.5), and refuses ranges of large numbers that have only one bound.
    types = _declared(schema.get("type", "number"))
    is_integer = "integer" in types and "number" not in types
    bounds: dict[str, float] = {}
    for sign, name, limit in ((1, "inimum", LARGEST_BOUND), (-1, "aximum", 2**63 if is_integer else LARGEST_BOUND)):
        for key in ("m" + name, "exclusiveM" + name):
            if key in schema:
                bound, is_exclusive = _next_bound(sign * schema[key], key[0] == "e", is_integer)
                read = "exclusiveM" + name if is_exclusive else "m" + name
                bounds[read] = sign * max(bound, -limit, sign * bounds.get(read, -math.inf * sign))
    low, high = bounds.get("minimum", 0), bounds.get("maximum", 0)
    if low >= 10**18:
        largest = 2**63 if is_integer and low <= LARGEST_BOUND else LARGEST_BOUND
        bounds["maximum"] = min(bounds.get("maximum", largest), largest)
    if high <= -(10**18):
        bounds.setdefault("minimum", -LARGEST_BOUND)
    return bounds


def _next_bound(bound: float, is_exclusive: bool, is_integer: bool) -> tuple[int | float, bool]:
    # Returns the lower bound, starting from `bound`, that the library enforces exactly, and whether it is exclusive.
    if is_integer:
        bound = math.floor(bound) + 1 if is_exclusive else math.ceil(bound)
    if bound > LARGEST_BOUND or bound <= 1 - 2**63:
        return 2**63 if bound > 0 else -(2**63), False
    if is_integer:
        number = float(bound)
        return int(math.nextafter(number, math.inf) if number < bound else number), False
    exact = Decimal(repr(bound)).normalize()
    if len(exact.as_tuple().digits) <= 15 and not (is_exclusive and (bound >= 0 or bound <= -(2**53))):
        return bound, is_exclusive
    unit = Decimal(1).scaleb(exact.adjusted() - 14) if bound else Decimal(SMALLEST_BOUND)
    steps = (exact / unit).to_integral_value(ROUND_FLOOR) + 1
    if Decimal(float(steps * unit)) <= exact:  # above 2**53
        steps += 1
    return float(steps * unit), False


class ObjectCloser:
    """Closes the schema of one document and its definitions."""

    # A definition that alone describes a value is closed separately. If several schemas describe the same value, they
    # are closed together, and their references lead to copies of definitions that stay open.
    # declared: Python `id()`s of the values of `properties`, except in conditions, which only test objects.
    # negation: resolves references to the open definitions.
    # refusal: returns the error for a `oneOf` with options that overlap.

    def __init__(
        self,
        definitions: dict[str, Schema],
        declared: Container[int],
        negation: Negation,
        refusal: Callable[[list[Schema]], Exception],
        spend: Callable[[], None],
    ) -> None:
        self._open = definitions
        self._negation = negation
        self._refusal = refusal
        self._declared = declared
        self._count_steps = spend
        self._pending: list[tuple[str, bool]] = []
        self._closed: dict[str, Schema] = {}
        self._seen: set[str] = set()

    def closed(self, schema: Schema) -> tuple[Schema, dict[str, Schema]]:
        result = self._close_alone(schema)
        while self._pending:
            name, is_part = self._pending.pop()
            target = self._open.get(name, True)
            if is_part:
                self._closed[f"{name}_part"] = self._keep_open(target)
            else:
                self._closed[name] = self._close_alone(target)
        return result, self._closed

    def _reference(self, reference: str, *, is_part: bool) -> str:
        name = reference.rpartition("/")[2]
        new_name = f"{name}_part" if is_part else name
        if new_name not in self._seen:
            self._seen.add(new_name)
            self._pending.append((name, is_part))
        return f"#/$defs/{new_name}"

    def _close_alone(self, schema: Schema) -> Schema:
        self._count_steps()
        if not isinstance(schema, dict):
            return schema
        applied = [keyword for keyword in (*_COMBINED, "$ref") if keyword in schema]
        if not applied:
            return {**self._close_subschemas(schema), **self._closing_keywords(schema)}
        if len(applied) == 1 and not _OBJECTS & schema.keys():
            keyword = applied[0]
            if keyword == "$ref":
                return {**schema, "$ref": self._reference(schema["$ref"], is_part=False)}
            if keyword != "allOf" or len(schema["allOf"]) == 1:
                options = [self._close_alone(each) for each in schema[keyword]]
                closed = self._close_subschemas(schema) | {keyword: options}
                return self._exclusive(schema, closed, list(map(self._closing_schema, schema.get("oneOf", ()))))
        rest = self._closing_keywords(schema)
        return {**self._keep_branches_open(schema, rest), **rest}

    def _exclusive(self, schema: dict[str, Any], closed: dict[str, Any], closings: list[Schema]) -> dict[str, Any]:
        # Excludes from each closed option the values that also match another option before it is closed, because
        # `oneOf` rejects such values.
        if "oneOf" not in closed:
            return closed
        common = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        excluded = self._negation.exclusions(schema["oneOf"], is_exact=False, common=common, closings=closings)
        if excluded is None:
            raise self._refusal(schema["oneOf"])
        options = any_of(all_of([option, *more]) for option, more in zip(closed.pop("oneOf"), excluded, strict=True))
        return {**closed, "allOf": [*closed.get("allOf", ()), options]}

    def _closing_schema(self, schema: Schema) -> Schema:
        return self._closing_keywords(schema) or True if isinstance(schema, dict) else True

    def _keep_open(self, schema: Schema) -> Schema:
        self._count_steps()
        return self._keep_branches_open(schema) if isinstance(schema, dict) else schema

    def _keep_branches_open(self, schema: dict[str, Any], rest: dict[str, Any] | None = None) -> dict[str, Any]:
        closed = self._close_subschemas(schema)
        for keyword in _COMBINED:
            if keyword in schema:
                closed[keyword] = [self._keep_open(each) for each in schema[keyword]]
        if "$ref" in schema:
            closed["$ref"] = self._reference(schema["$ref"], is_part=True)
        return self._exclusive(schema, closed, [rest or True] * len(schema.get("oneOf", ())))

    def _close_subschemas(self, schema: dict[str, Any]) -> dict[str, Any]:
        closed = dict(schema)
        for keyword in ("properties", "patternProperties"):
            if keyword in schema:
                closed[keyword] = {name: self._close_alone(each) for name, each in schema[keyword].items()}
        for keyword in ("additionalProperties", "items"):
            if keyword in schema:
                closed[keyword] = self._close_alone(schema[keyword])
        if "prefixItems" in schema:
            closed["prefixItems"] = [self._close_alone(each) for each in schema["prefixItems"]]
        return closed

    def _closing_keywords(self, schema: dict[str, Any]) -> dict[str, Any]:
        names: dict[str, None] = {}
        required: dict[str, None] = {}
        declares, least = False, 0
        for part in self._parts(schema, set()):
            if "additionalProperties" in part:
                return {}
            declares |= id(part.get("properties")) in self._declared
            names |= dict.fromkeys(part.get("properties", {}))
            required |= dict.fromkeys(part.get("required", ()))
            least = max(least, part.get("minProperties", 0))
        names |= required
        if not declares or (least > len(names) and "patternProperties" not in schema):
            return {}
        own = self._close_subschemas({"properties": schema.get("properties", {})})["properties"]
        return {
            "properties": {**own, **{name: True for name in names if name not in own}},
            "additionalProperties": False,
        }

    def _parts(self, schema: Schema, followed: set[str]) -> Iterator[dict[str, Any]]:
        self._count_steps()
        if not isinstance(schema, dict):
            return
        yield schema
        for keyword in _COMBINED:
            for each in schema.get(keyword, ()):
                yield from self._parts(each, followed)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            yield from self._parts(self._open.get(reference.rpartition("/")[2], True), followed)


class Simplifier:
    """Simplifies the schema of one document and its definitions. `spend` is called for each step."""

    def __init__(self, definitions: dict[str, Schema], spend: Callable[[int], None]) -> None:
        self._definitions = definitions
        self._count_steps = spend
        self._negation = Negation(self._target, spend)
        self._results: dict[int, tuple[Schema, Schema]] = {}  # by id(), because subschemas are shared
        self._kinds: dict[str, frozenset[str]] = {}
        self._intersecting: set[tuple[str, str]] = set()

    def simplified(self, schema: Schema) -> tuple[Schema, dict[str, Schema]]:
        definitions = {name: self._simplified(each) for name, each in self._definitions.items()}
        return self._simplified(schema), definitions

    def _target(self, reference: str) -> Schema | None:
        return self._definitions.get(reference.rpartition("/")[2])

    def _simplified(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        if id(schema) not in self._results:
            self._count_steps(1)
            self._results[id(schema)] = schema, self._rebuilt(schema)
        return self._results[id(schema)][1]

    def _rebuilt(self, schema: dict[str, Any]) -> dict[str, Any]:
        simplified: dict[str, Any] = {}
        is_range = not schema.keys() & {"const", "enum"}
        for keyword, value in self._with_disjoint_names(self._without_implied_type(schema)).items():
            if keyword == "additionalProperties" and (value is True or value == {}):
                continue  # this was needed only to keep the object open
            if keyword in ONE:
                simplified[keyword] = self._simplified(value)
            elif keyword in MANY:
                simplified[keyword] = [self._simplified(each) for each in value]
            elif keyword in NAMED:
                simplified[keyword] = {name: self._simplified(each) for name, each in value.items()}
            elif keyword not in BOUNDS or not is_range:
                simplified[keyword] = value
        return simplified | _readable_bounds(schema) if is_range else simplified

    def _without_implied_type(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "type" not in schema or not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
            return schema
        rest = {keyword: value for keyword, value in schema.items() if keyword != "type"}
        return rest if self._kinds_of(rest) <= _declared(schema["type"]) else schema

    def _with_disjoint_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        # Intersects the schema of each declared property with the schemas of patterns that match its name, and excludes
        # the name from these patterns. The library cannot do this if one of the schemas is recursive.
        if not schema.get("properties") or not any(map(_has_reference, schema.get("patternProperties", {}).values())):
            return schema
        properties, patterns = dict(schema["properties"]), {}
        for pattern, each in schema["patternProperties"].items():
            self._count_steps(AUTOMATON_STEPS)
            names = [name for name in properties if matches(pattern, name)] if _has_reference(each) else []
            rest = exclude_texts(pattern, tuple(names)) if names else None
            if rest is not None:
                simple = self._simplified(each)
                properties |= {name: self._intersection(self._simplified(properties[name]), simple) for name in names}
            patterns[pattern if rest is None else rest] = each
        return {**schema, "properties": properties, "patternProperties": patterns}

    def _intersection(self, one: Schema, other: Schema) -> Schema:
        self._count_steps(1)
        if one == other:
            return one
        if isinstance(one, bool) or isinstance(other, bool):
            return all_of([one, other])
        if self._negation.are_disjoint(one, other):
            return False
        for union, operand in ((one, other), (other, one)):
            if union.keys() == {"anyOf"}:
                return any_of(self._intersection(option, operand) for option in union["anyOf"])
        if _are_plain("array", one, other):
            items = self._intersection(one.get("items", True), other.get("items", True))
            sizes = {"minItems": max, "maxItems": min}
            bounds = {key: [each[key] for each in (one, other) if key in each] for key in sizes}
            limits = {key: sizes[key](found) for key, found in bounds.items() if found}
            return {"type": "array", "items": items, **limits}
        targets = self._plain_target(one), self._plain_target(other)
        pair = str(one.get("$ref")), str(other.get("$ref"))
        if pair in self._intersecting or not _are_plain("object", *targets):
            return all_of([one, other])
        self._intersecting.add(pair)
        try:
            return self._intersection_of_objects(*targets)
        finally:
            self._intersecting.discard(pair)

    def _intersection_of_objects(self, one: dict[str, Any], other: dict[str, Any]) -> Schema:
        names = dict.fromkeys((*one.get("properties", ()), *other.get("properties", ())))
        rests = one.get("additionalProperties", True), other.get("additionalProperties", True)
        properties = {
            name: self._intersection(
                *(each.get("properties", {}).get(name, rest) for each, rest in zip((one, other), rests, strict=True))
            )
            for name in names
        }
        return {
            "type": "object",
            "properties": properties,
            "required": list(dict.fromkeys((*one.get("required", ()), *other.get("required", ())))),
            "additionalProperties": self._intersection(*rests),
        }

    def _plain_target(self, schema: dict[str, Any]) -> dict[str, Any]:
        target = self._target(schema["$ref"]) if schema.keys() == {"$ref"} else schema
        return target if isinstance(target, dict) else schema

    def _kinds_of(self, schema: Schema) -> frozenset[str]:
        # Returns the possible types; "number" includes "integer".
        self._count_steps(1)
        if not isinstance(schema, dict):
            return _KINDS if schema else frozenset()
        kinds = _KINDS
        if "type" in schema:
            kinds &= _declared(schema["type"])
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            kinds &= _with_integers(map(type_of, values))
        for each in schema.get("allOf", ()):
            kinds &= self._kinds_of(each)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                kinds &= frozenset().union(*map(self._kinds_of, schema[keyword]))
        if "$ref" in schema:
            kinds &= self._kinds_of_definition(schema["$ref"].rpartition("/")[2])
        return kinds

    def _kinds_of_definition(self, name: str) -> frozenset[str]:
        if name not in self._kinds:
            self._kinds[name] = _KINDS  # used if the reference is circular
            self._kinds[name] = self._kinds_of(self._definitions.get(name, True))
        return self._kinds[name]


def _are_plain(kind: str, *schemas: dict[str, Any]) -> bool:
    return all(schema.get("type") == kind and schema.keys() <= _PLAIN[kind] for schema in schemas)


def _has_reference(schema: Schema) -> bool:
    pending: list[Any] = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            if "$ref" in each:
                return True
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return False


def _declared(types: str | list[str]) -> frozenset[str]:
    return _with_integers([types] if isinstance(types, str) else types)


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    found = frozenset(types)
    return found | {"integer"} if "number" in found else found
