"""Compute complements of schemas if the supported keywords can express them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from notso.smollm3.sampling.schemas.patterns import any_character_except, complement, has_unwritable_characters

Schema: TypeAlias = bool | dict[str, Any]

TYPES = ("null", "boolean", "number", "string", "array", "object")
AUTOMATON_STEPS = 5_000
"""Number of steps that are counted for building a pattern's automaton."""

MAX_EXCLUDED_STRINGS = 100
MAX_EXCLUDED_LENGTH = 100
"""With more or longer strings, the complement would be too large."""

_BOUNDS = {  # bound: (type, complementary bound)
    "minimum": ("number", "exclusiveMaximum"),
    "maximum": ("number", "exclusiveMinimum"),
    "exclusiveMinimum": ("number", "maximum"),
    "exclusiveMaximum": ("number", "minimum"),
}
_SIZES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
}


def any_of(options: Iterable[Schema]) -> Schema:
    """Return the union of schemas."""
    parts: list[Schema] = []
    for option in options:
        if option is True or option == {}:
            return True
        if option is not False:
            parts.append(option)
    return parts[0] if len(parts) == 1 else {"anyOf": parts} if parts else False


def all_of(schemas: Iterable[Schema]) -> Schema:
    """Return the intersection of schemas."""
    parts: list[Schema] = []
    for schema in schemas:
        if schema is False:
            return False
        if schema is not True and schema != {}:
            parts.append(schema)
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True


def all_types_except(types: Iterable[str]) -> Schema:
    """Return a schema that allows all types except `types`; "integer" is not a type here."""
    remaining = [name for name in TYPES if name not in set(types)]
    return {"type": remaining} if remaining else False


def type_of(value: object) -> str:
    """Return the JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


class Negation:
    """Negates and compares schemas.

    resolve: returns the target of a `$ref`, or None while a circular target is being rewritten. spend: called with a
    number of steps; raises if the total is too large.
    """

    def __init__(self, resolve: Callable[[str], Schema | None], spend: Callable[[int], None]) -> None:
        self._resolve = resolve
        self._count_steps = spend
        self._following: set[str] = set()
        self._complements: set[str] = set()

    def of(self, schema: Schema, names: Iterable[str] | None = None, *, is_exact: bool = True) -> Schema | None:
        """Return the schema of exactly the values that `schema` rejects, or None if it cannot be expressed.

        names: the only property names that objects can have. is_exact: if False, the result may accept only some of the
        rejected values, or none.
        """
        self._count_steps(1)
        if isinstance(schema, bool):
            return not schema
        options: list[Schema] = []
        for keyword, value in schema.items():
            if keyword == "additionalProperties" and names is not None and "patternProperties" not in schema:
                others: dict[str, Schema] = {name: value for name in names if name not in schema.get("properties", ())}
                negated = self._negate_properties(others, is_exact)
            else:
                negated = self._negate_keyword(keyword, value, names, is_exact)
            if negated is not None:
                options.append(negated)
            elif is_exact:
                return None
        return any_of(options)

    def _negate_keyword(self, keyword: str, value: Any, names: Iterable[str] | None, is_exact: bool) -> Schema | None:
        match keyword:
            case "$ref":
                return self._negate_reference(value, names, is_exact)
            case "anyOf" | "allOf":
                inner = [self.of(each, names, is_exact=is_exact) for each in value]
                negated = [each for each in inner if each is not None]
                if len(negated) < len(inner):
                    return None
                return all_of(negated) if keyword == "anyOf" else any_of(negated)
            case "type":
                kinds = [value] if isinstance(value, str) else value
                if "integer" in kinds and "number" not in kinds:
                    return None
                return all_types_except(kinds)
            case "const":
                return _all_values_except([value])
            case "enum":
                return _all_values_except(value)
            case "required":
                return any_of({"type": "object", "properties": {name: False}} for name in value)
            case "properties":
                return self._negate_properties(value, is_exact)
            case "pattern":
                if value not in self._complements:
                    self._complements.add(value)
                    self._count_steps(AUTOMATON_STEPS)
                others = complement(value)
                return None if others is None else {"type": "string", "pattern": others}
            case "maxProperties" if value == 0:
                return {"type": "object", "minProperties": 1}
        if keyword in _BOUNDS and not isinstance(value, bool):
            kind, opposite = _BOUNDS[keyword]
            return {"type": kind, opposite: value}
        if keyword in _SIZES and isinstance(value, int):
            kind, opposite, step = _SIZES[keyword]
            return {"type": kind, opposite: value + step} if value + step >= 0 else False
        return None

    def _negate_reference(self, reference: str, names: Iterable[str] | None, is_exact: bool) -> Schema | None:
        target = self._resolve(reference) if reference not in self._following else None
        if target is None:
            return None
        self._following.add(reference)
        try:
            return self.of(target, names, is_exact=is_exact)
        finally:
            self._following.discard(reference)

    def _negate_properties(self, properties: dict[str, Schema], is_exact: bool) -> Schema | None:
        options: list[Schema] = []
        for name, schema in properties.items():
            negated = self.of(schema)
            if negated is None and is_exact:
                return None
            if negated:
                options.append({"type": "object", "required": [name], "properties": {name: negated}})
        return any_of(options)

    def closed_names(self, schema: Schema) -> list[str] | None:
        """Return the only property names that a schema allows, or None if it may allow others."""
        self._count_steps(1)
        if not isinstance(schema, dict):
            return None
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            return list(schema.get("properties", ()))
        parts = list(schema.get("allOf", ()))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._following:
            self._following.add(reference)
            try:
                return self.closed_names(self._resolve(reference) or False)
            finally:
                self._following.discard(reference)
        return next((names for names in map(self.closed_names, parts) if names is not None), None)

    def exclusions(
        self, options: Sequence[Schema], *, is_exact: bool, common: Schema = True, closings: Sequence[Schema] = ()
    ) -> list[list[Schema]] | None:
        """Return, for each option of a `oneOf`, schemas that exclude overlapping options, or None if impossible."""
        # is_exact: whether every value that matches exactly one option must remain allowed.
        # common: a schema that all values must also match.
        # closings: for each option, a schema that its values must also match.
        found: list[list[Schema]] = []
        for number, option in enumerate(options):
            closing = closings[number] if closings else True
            whole = all_of([common, option, closing])
            excluded: list[Schema] = []
            for other in (*options[:number], *options[number + 1 :]):
                if self.are_disjoint(whole, other):
                    continue
                names = self.closed_names(whole)
                negated = self.of(other, names)
                if negated is None and not is_exact:
                    negated = self.of(other, names, is_exact=False) or None
                if negated is None:
                    return None
                excluded.append(negated)
            found.append(excluded)
        return found

    def are_disjoint(self, one: Schema, other: Schema) -> bool:
        self._count_steps(1)
        before = set(self._following)
        try:
            one_parts, other_parts = self._conjuncts(one), self._conjuncts(other)
            return one_parts is None or other_parts is None or self._are_conjuncts_disjoint(one_parts, other_parts)
        finally:
            self._following = before

    def _are_conjuncts_disjoint(self, one_parts: list[dict[str, Any]], other_parts: list[dict[str, Any]]) -> bool:
        parts = [*one_parts, *other_parts]
        shared = set(TYPES).intersection(*map(_types, parts))
        if not shared:
            return True
        listed = [[values for values in map(_values, side) if values is not None] for side in (one_parts, other_parts)]
        for values, others in itertools.product(*listed):
            if not any(_are_equal(value, each) for value in values for each in others):
                return True
        for side, opposite in ((one_parts, other_parts), (other_parts, one_parts)):
            for options in (part["anyOf"] for part in side if "anyOf" in part):
                if all(self.are_disjoint(option, {"allOf": opposite}) for option in options):
                    return True
        if shared != {"object"}:
            return False
        names = dict.fromkeys(name for part in parts for name in part.get("required", ()))
        return any(self.are_disjoint(_properties(one_parts, name), _properties(other_parts, name)) for name in names)

    def _conjuncts(self, schema: Schema) -> list[dict[str, Any]] | None:
        # Returns all schemas that a value must satisfy: the schema, its `allOf` members and the targets of `$ref`.
        # Returns None if one of them is False. Adds the references that it follows to `_following`.
        found: list[dict[str, Any]] = []
        pending = [schema]
        while pending:
            self._count_steps(1)
            each = pending.pop()
            if each is False:
                return None
            if each is True:
                continue
            found.append(each)
            pending += each.get("allOf", ())
            reference = each.get("$ref")
            if isinstance(reference, str) and reference not in self._following:
                target = self._resolve(reference)
                if target is not None:
                    self._following.add(reference)
                    pending.append(target)
        return found


def _types(schema: dict[str, Any]) -> set[str]:
    found = set(TYPES)
    names = schema.get("type")
    if isinstance(names, str | list):
        listed = [names] if isinstance(names, str) else names
        found &= {"number" if name == "integer" else name for name in listed if isinstance(name, str)}
    values = _values(schema)
    return found if values is None else found & {type_of(value) for value in values}


def _values(schema: dict[str, Any]) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _are_equal(one: object, other: object) -> bool:
    # In JSON, true is not equal to 1. The contents of arrays and objects are not compared: two arrays or two objects
    # count as equal.
    if isinstance(one, list | dict) and isinstance(other, list | dict):
        return type(one) is type(other)
    return type_of(one) == type_of(other) and one == other


def _properties(parts: Iterable[dict[str, Any]], name: str) -> Schema:
    return all_of(_property(part, name) for part in parts)


def _property(schema: dict[str, Any], name: str) -> Schema:
    found: Schema | None = schema.get("properties", {}).get(name)
    if found is None and "patternProperties" not in schema:
        found = schema.get("additionalProperties")
    return True if found is None else found


def _all_values_except(values: Sequence[Any]) -> Schema | None:
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(type_of(value), []).append(value)
    if kinds.keys() & {"array", "object"}:
        return None
    options = [all_types_except(kinds)]
    if len(set(kinds.get("boolean", []))) == 1:
        options.append({"const": not kinds["boolean"][0]})
    if "number" in kinds:
        options += _numbers_between(sorted(set(kinds["number"])))
    if "string" in kinds:
        pattern = pattern_excluding(kinds["string"])
        if pattern is None:
            return None
        options.append({"type": "string", "pattern": pattern})
    return any_of(options)


def _numbers_between(numbers: list[float]) -> Iterator[Schema]:
    yield {"type": "number", "exclusiveMaximum": numbers[0]}
    for low, high in itertools.pairwise(numbers):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": "number", "exclusiveMinimum": numbers[-1]}


def pattern_excluding(strings: Sequence[str]) -> str | None:
    """Return a regular expression for all texts except `strings`, or None if it would be too large or impossible."""
    if len(strings) > MAX_EXCLUDED_STRINGS or any(len(text) > MAX_EXCLUDED_LENGTH for text in strings):
        return None
    if has_unwritable_characters("".join(strings)):
        return None
    return f"^(?:{_suffix_pattern(sorted(set(strings)))})$"


def _suffix_pattern(strings: Sequence[str]) -> str:
    rests: dict[str, list[str]] = {}
    for text in strings:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    options = [f"{any_character_except(rests)}[\\s\\S]*" if rests else "[\\s\\S]+"]
    options += (f"{_escaped(letter)}(?:{_suffix_pattern(rest)})" for letter, rest in rests.items())
    if "" not in strings:
        options.append("")
    return "|".join(options)


def _escaped(letter: str) -> str:
    return letter if letter.isalnum() else f"\\u{{{ord(letter):x}}}"
