"""Simplify closed schemas to what the library can compile.

It intersects a reference with the keywords next to it, and a declared name with the patterns it matches, which fails if
one refers to itself. The result allows the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from notso.smollm3.sampling.schemas.keywords import MANY, NAMED, ONE
from notso.smollm3.sampling.schemas.negation import AUTOMATON_STEPS, TYPES, Negation, Schema, all_of, any_of, type_of
from notso.smollm3.sampling.schemas.patterns import matches, without

_KINDS = frozenset((*TYPES, "integer"))
_PLAIN = {
    "array": frozenset(("type", "items", "minItems", "maxItems")),
    "object": frozenset(("type", "properties", "required", "additionalProperties")),
}
"""Keywords of schemas that are intersected."""


class Simplifier:
    """Simplifies the schema of one document and its definitions. `spend` is called for each step."""

    def __init__(self, definitions: dict[str, Schema], spend: Callable[[int], None]) -> None:
        self._definitions = definitions
        self._spend = spend
        self._negation = Negation(self._target, spend)
        self._made: dict[int, tuple[Schema, Schema]] = {}  # by identity, because subschemas are shared
        self._kinds: dict[str, frozenset[str]] = {}
        self._intersecting: set[tuple[str, str]] = set()

    def simplified(self, schema: Schema) -> tuple[Schema, dict[str, Schema]]:
        """Return the schema and the definitions."""
        definitions = {name: self._simplified(each) for name, each in self._definitions.items()}
        return self._simplified(schema), definitions

    def _target(self, reference: str) -> Schema | None:
        return self._definitions.get(reference.rpartition("/")[2])

    def _simplified(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        if id(schema) not in self._made:
            self._spend(1)
            self._made[id(schema)] = schema, self._remade(schema)
        return self._made[id(schema)][1]

    def _remade(self, schema: dict[str, Any]) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for keyword, value in self._with_names_apart(self._without_implied_type(schema)).items():
            if keyword == "additionalProperties" and (value is True or value == {}):
                continue  # it has kept the object open
            if keyword in ONE:
                held[keyword] = self._simplified(value)
            elif keyword in MANY:
                held[keyword] = [self._simplified(each) for each in value]
            elif keyword in NAMED:
                held[keyword] = {name: self._simplified(each) for name, each in value.items()}
            else:
                held[keyword] = value
        return held

    def _without_implied_type(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Remove `type` if the targets of the references next to it have no other types."""
        if "type" not in schema or not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
            return schema
        rest = {keyword: value for keyword, value in schema.items() if keyword != "type"}
        return rest if self._kinds_of(rest) <= _declared(schema["type"]) else schema

    def _with_names_apart(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Exclude declared names from patterns with references, which the library would intersect."""
        if not schema.get("properties") or not any(map(_has_reference, schema.get("patternProperties", {}).values())):
            return schema
        properties, patterns = dict(schema["properties"]), {}
        for pattern, each in schema["patternProperties"].items():
            self._spend(AUTOMATON_STEPS)
            names = [name for name in properties if matches(pattern, name)] if _has_reference(each) else []
            rest = without(pattern, tuple(names)) if names else None
            if rest is not None:
                simple = self._simplified(each)
                properties |= {name: self._intersection(self._simplified(properties[name]), simple) for name in names}
            patterns[pattern if rest is None else rest] = each
        return {**schema, "properties": properties, "patternProperties": patterns}

    def _intersection(self, one: Schema, other: Schema) -> Schema:
        """Return a schema of the values that match both, without alternatives that none does."""
        self._spend(1)
        if one == other:
            return one
        if isinstance(one, bool) or isinstance(other, bool):
            return all_of([one, other])
        if self._negation.are_disjoint(one, other):
            return False
        for mine, theirs in ((one, other), (other, one)):
            if mine.keys() == {"anyOf"}:
                return any_of(self._intersection(option, theirs) for option in mine["anyOf"])
        if _are_plain("array", one, other):
            items = self._intersection(one.get("items", True), other.get("items", True))
            sizes = {"minItems": max, "maxItems": min}
            bounds = {key: [each[key] for each in (one, other) if key in each] for key in sizes}
            held = {key: sizes[key](found) for key, found in bounds.items() if found}
            return {"type": "array", "items": items, **held}
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
        """Return the types that the values may have; "integer" stands for whole numbers, "number" for all."""
        self._spend(1)
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
            self._kinds[name] = _KINDS  # of a circular reference
            self._kinds[name] = self._kinds_of(self._definitions.get(name, True))
        return self._kinds[name]


def _are_plain(kind: str, *schemas: dict[str, Any]) -> bool:
    return all(schema.get("type") == kind and schema.keys() <= _PLAIN[kind] for schema in schemas)


def _has_reference(schema: Schema) -> bool:
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if "$ref" in each:
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def _declared(types: str | list[str]) -> frozenset[str]:
    return _with_integers([types] if isinstance(types, str) else types)


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    found = frozenset(types)
    return found | {"integer"} if "number" in found else found
