"""Schemas in the library's keywords, compared with `jsonschema` value by value."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from typing import Any

import jsonschema
import pytest

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.grammar import GrammarCompiler, grammar_part
from notso.smollm3.sampling.schemas import rewriting
from notso.smollm3.sampling.schemas.json_schema import EnforcedSchema, enforced_schema
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.request_options import Grammar

SCALARS = [None, True, False, 0, 1, 2, 7, -3, 1.5, "", "a", "b", "ab", "abc", "2023-02-29", "2024-02-29"]
ARRAYS: list[Any] = [list(each) for size in range(4) for each in itertools.product((1, 2, "a"), repeat=size)]
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in itertools.combinations("abc", size)
    for values in itertools.product((1, "x"), repeat=size)
]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS]

EXACT: dict[str, dict[str, Any]] = {
    "not of types": {"not": {"type": ["string", "array"]}},
    "not of values": {"not": {"enum": ["a", "abc", 1, None, True]}},
    "not of bounds": {"not": {"minimum": 1, "type": "number"}},
    "not of lengths": {"not": {"allOf": [{"minLength": 2}, {"minItems": 2}, {"maxProperties": 0}]}},
    "not of names": {"not": {"required": ["a", "b"]}},
    "not of properties": {"not": {"type": "object", "properties": {"a": {"type": "number"}}}},
    "not of a reference": {"not": {"$ref": "#/$defs/few"}, "$defs": {"few": {"allOf": [{"maximum": 2}, {"const": 1}]}}},
    "if, then, else": {
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"properties": {"c": False}},
    },
    "if, else": {"if": {"type": "string"}, "else": {"type": ["object", "null"]}},
    "dependencies": {"dependencies": {"a": ["b"], "c": {"properties": {"b": {"type": "string"}}}}},
    "required together": {"dependentRequired": {"a": ["b", "c"], "b": ["a"]}},
    "schemas together": {"dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"const": 1}}}}},
    "names by a list": {"propertyNames": {"enum": ["a", "c"]}},
    "names by a pattern": {"propertyNames": {"pattern": "^[ab]$"}, "properties": {"a": {"const": 1}, "c": {}}},
    "names by length": {"propertyNames": {"maxLength": 0}},
    "names of no type": {"propertyNames": {"type": "number"}},
    "one of overlapping numbers": {"oneOf": [{"type": "number", "maximum": 1}, {"type": "number", "minimum": 0}]},
    "one of closed objects": {
        "oneOf": [
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
            {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
        ]
    },
    "one of objects that differ in a name": {
        "required": ["a"],
        "additionalProperties": True,
        "oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "x"}}}],
    },
    "one of references": {
        "oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}],
        "$defs": {
            "one": {"type": "object", "required": ["a"], "properties": {"a": {}}, "additionalProperties": False},
            "other": {"type": "object", "required": ["b"], "properties": {"b": {}}, "additionalProperties": False},
        },
    },
    "a type next to references": {
        "type": "object",
        "anyOf": [{"$ref": "#/$defs/one"}],
        "$defs": {
            "one": {
                "type": "object",
                "maxProperties": 1,
                "additionalProperties": {"anyOf": [{"type": "number"}, {"$ref": "#"}]},
            }
        },
    },
    "a name that matches a pattern": {
        "type": "object",
        "patternProperties": {".": {"anyOf": [{"type": "number"}, {"$ref": "#"}]}},
        "properties": {"a": {"anyOf": [{"const": 1}, {"$ref": "#"}]}},
    },
    "a pattern in two spellings": {"patternProperties": {"^a": {"type": "number"}, "^\\u0061": {"const": 1}}},
    "one of two names": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "contained": {"contains": {"const": 2}},
    "contained among few": {"contains": {"type": "string"}, "maxItems": 2},
    "unique of values": {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
    "unique, so many": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
    "unique when alone": {"type": "array", "maxItems": 1, "uniqueItems": True},
    "no others": {
        "$ref": "#/$defs/base",
        "properties": {"b": {}},
        "unevaluatedProperties": False,
        "$defs": {"base": {"properties": {"a": {"type": "number"}}}},
    },
    "others of a kind": {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": {"type": "string"}},
    "no other items": {"prefixItems": [True, {"const": 2}], "unevaluatedItems": False},
    "two names at least": {
        "properties": {"a": {}, "b": {}, "c": {}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "dates": {"type": "string", "format": "date"},
    "an unknown format": {"format": "colour", "type": "string"},
    "an anchor": {"items": {"$ref": "#number"}, "$defs": {"n": {"$anchor": "number", "type": "number"}}},
    "a name of its own": {
        "$id": "https://example.com/a.json",
        "items": {"$ref": "b.json"},
        "$defs": {"b": {"$id": "b.json", "type": "number"}},
    },
    "a reference alone, as draft 7 has it": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": {"$ref": "#/definitions/n", "maximum": 1},
        "definitions": {"n": {"type": "number"}},
    },
    "items in turn, as draft 7 has it": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [{"const": 1}],
        "additionalItems": {"type": "string"},
    },
    "exclusive, as draft 4 has it": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "minimum": 1,
        "exclusiveMinimum": True,
    },
}
NARROWER: dict[str, dict[str, Any]] = {
    "two contained": {"contains": {"const": 2}, "minContains": 2},
    "one name at least": {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
    "one of which one is excluded in part": {
        "type": "object",
        "properties": {"b": {}},
        "oneOf": [
            {"properties": {"a": {"multipleOf": 3}, "c": {"type": "string"}}},
            {"properties": {"a": {"multipleOf": 2}, "c": {"const": 1}}},
        ],
    },
    "known by a branch": {
        "anyOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 1}}}],
        "unevaluatedProperties": False,
    },
}
"""Schemas for which some valid values cannot be generated, by name."""


@pytest.fixture(scope="module")
def grammars(small_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer)


def takes(grammars: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], value: Any) -> bool:
    """Return whether an answer may be this value, with its properties in any order."""
    source = json.dumps(schema)
    orders = [dict(each) for each in itertools.permutations(value.items())] if isinstance(value, dict) else [value]
    return any(takes_text(grammars, tokenizer, source, json.dumps(order)) for order in orders)


def takes_text(grammars: GrammarCompiler, tokenizer: Tokenizer, source: str, text: str) -> bool:
    matcher = grammars.matcher([grammar_part(Grammar("json_schema", source))], "grammar")
    return bool(matcher.try_consume_all(tokenizer.encode(text)) and matcher.may_end)


def valid(schema: dict[str, Any], value: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # In newer drafts, jsonschema ignores `dependencies`.
    if "dependencies" in schema:
        kind = jsonschema.Draft7Validator
    return bool(kind(schema, format_checker=jsonschema.FormatChecker(["date"])).is_valid(value))


@pytest.mark.parametrize("name", EXACT)
def test_grammar_accepts_exactly_the_valid_values(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str
) -> None:
    schema = EXACT[name]
    for value in VALUES:
        assert takes(grammars, small_tokenizer, schema, value) == valid(schema, value), value
    assert sum(valid(schema, value) for value in VALUES) > 0


@pytest.mark.parametrize("name", EXACT)
def test_grammar_accepts_valid_and_rejects_invalid_values(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str
) -> None:
    """Up to four valid and four other values of each schema, because the test above runs for only some of them by
    default."""
    schema = EXACT[name]
    for is_valid in (True, False):
        values = [value for value in VALUES if valid(schema, value) == is_valid]
        few = [values[at * len(values) // 4] for at in range(4)] if len(values) > 4 else values
        for value in few:
            assert takes(grammars, small_tokenizer, schema, value) == is_valid, value


@pytest.mark.parametrize(
    ("bounds", "valid_texts", "invalid_texts"),
    [
        ('"exclusiveMinimum": 0, "maximum": 0.5', ["0.1", "0.5", "0.00001"], ["0", "0.0", "-0", "0.51"]),
        ('"exclusiveMinimum": -0.5, "exclusiveMaximum": 0', ["-0.1", "-0.49"], ["-0", "0", "-0.5"]),
        ('"exclusiveMinimum": 1, "exclusiveMaximum": 1.4', ["1.1", "1.39"], ["1", "1.0", "1.4"]),
        ('"exclusiveMinimum": -1, "exclusiveMaximum": 1', ["0", "0.9", "-0.99", "0.999999"], ["1", "-1", "1.0"]),
        ('"exclusiveMaximum": -1.7201070565248253', ["-1.8", "-2"], ["-1.7201070565248253", "-1.7"]),
        ('"maximum": 46947737593416357', ["46947737593416000", "1"], ["46947737593416358", "46947737593416357.5"]),
        ('"minimum": 1e18', ["1000000000000000000"], ["999999999999999999", "1"]),
        ('"maximum": -4611686018427387904', ["-4611686018427390000"], ["-4611686018427387903", "-5"]),
    ],
)
def test_bounds_of_numbers_hold(
    grammars: GrammarCompiler,
    small_tokenizer: Tokenizer,
    bounds: str,
    valid_texts: list[str],
    invalid_texts: list[str],
) -> None:
    """The same bounds in one object, in two, and behind a reference."""
    first, _, rest = bounds.partition(", ")
    sources = [f'{{"type": "number", {bounds}}}', f'{{"type": ["number", "null"], {bounds}}}']
    sources += [f'{{"$ref": "#/$defs/a", "$defs": {{"a": {{"type": "number", {first}}}}}, {rest or first}}}']
    sources += [f'{{"allOf": [{{"type": "number"}}, {{{first}}}, {{{rest}}}]}}']
    for source in sources:
        for text in [*valid_texts, *invalid_texts]:
            assert takes_text(grammars, small_tokenizer, source, text) == (text in valid_texts), (source, text)


@pytest.mark.parametrize(
    ("bounds", "valid_texts", "invalid_texts"),
    [
        ('"exclusiveMinimum": 1e16', ["10000000000000002"], ["10000000000000000", "9999999999999999"]),
        ('"exclusiveMaximum": 3.5e18', ["3499999999999999488", "7"], ["3500000000000000000"]),
        ('"minimum": 308579134426324572', ["308579134426324608"], ["308579134426324571"]),
        ('"maximum": -986980075380282639', ["-986980075380282752"], ["-986980075380282638", "0"]),
        ('"minimum": 5988658166813005497', ["5988658166813006848"], ["5988658166813005496", "10000000000000000000"]),
    ],
)
def test_bounds_of_integers_hold(
    grammars: GrammarCompiler,
    small_tokenizer: Tokenizer,
    bounds: str,
    valid_texts: list[str],
    invalid_texts: list[str],
) -> None:
    for source in (f'{{"type": "integer", {bounds}}}', f'{{"type": ["integer", "null"], {bounds}}}'):
        for text in [*valid_texts, *invalid_texts]:
            assert takes_text(grammars, small_tokenizer, source, text) == (text in valid_texts), (source, text)


@pytest.mark.parametrize("bound", ['"minimum": 1e30', '"minimum": 1e19, "maximum": 1e20', '"maximum": -1e19'])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_ranges_beyond_64_bits_are_refused(grammars: GrammarCompiler, kind: str, bound: str) -> None:
    source = f'{{"type": "object", "properties": {{"a": {{"type": "{kind}", {bound}}}}}, "required": ["a"]}}'
    with pytest.raises(InvalidRequestError, match="no value satisfies /properties/a"):
        grammars.matcher([grammar_part(Grammar("json_schema", source))], "grammar")


@pytest.mark.parametrize("name", NARROWER)
def test_narrower_grammars_accept_only_valid_values(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str
) -> None:
    schema = NARROWER[name]
    taken = [value for value in VALUES if takes(grammars, small_tokenizer, schema, value)]
    assert len(taken) > 2
    assert all(valid(schema, value) for value in taken)


def test_null_keywords_count_as_absent() -> None:
    """Go, Java and C# write absent keywords as null."""
    empty = {"required": None, "enum": None, "items": None, "format": None, "$ref": None, "oneOf": None, "not": None}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "string", **empty}, **empty | {"items": {"type": "string"}}},
            "enum": {"enum": [None, 1], "default": None, "description": None},
            "const": {"const": None},
        },
        **empty | {"required": ["a"]},
        "$defs": None,
    }
    plain = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "string"}},
            "enum": {"enum": [None, 1]},
            "const": {"const": None},
        },
        "required": ["a"],
    }
    assert enforced_schema(schema, "grammar") == enforced_schema(plain, "grammar")
    for name in ("enum", "default", "example", "examples", "other"):
        nullable = {
            "components": {"schemas": {name: {"type": "string", **empty}}},
            "$ref": f"#/components/schemas/{name}",
        }
        plain = {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}
        assert enforced_schema(nullable, "grammar").schema == enforced_schema(plain, "grammar").schema
    kept = {"const": {"a": None}}
    assert enforced_schema(kept, "grammar").schema == kept
    with pytest.raises(InvalidRequestError, match="/properties/items must be a schema"):
        enforced_schema({"properties": {"items": None}}, "grammar")


def test_keywords_without_effect_are_reported() -> None:
    schema = {
        "title": "described",
        "x-order": 3,
        "properties": {"a": {"nullable": True, "format": "byte", "x-order": 4, "then": {"odd": 1}}},
        "default": {"uncounted": 1},
    }
    held = enforced_schema(schema, "grammar")
    closed = {"properties": {"a": {}}, "additionalProperties": False}
    assert held == EnforcedSchema(closed, ("x-order", "nullable", "format: byte"))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"dependentRequired": {str(n): ["x"] for n in range(40)}}, "too large"),
        ({"oneOf": [{"properties": {f"p{n}": {"const": n}}} for n in range(900)]}, "too many combinations"),
        ({"allOf": [{"anyOf": [{"minLength": n} for n in range(900)]}] * 3}, "too large"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": list(range(400))}}, "uniqueItems"),
        ({"unevaluatedProperties": False, "allOf": [{"anyOf": [{}, {"properties": {}}]}] * 30}, "cases|combinations"),
        ({"unevaluatedProperties": False, "$ref": "#"}, "circular"),
        (
            {
                "properties": {f"p{n}": {"unevaluatedProperties": False, "$ref": "#/$defs/long"} for n in range(200)},
                "$defs": {"long": {"anyOf": [dict.fromkeys(map(str, range(10_000)), 0)]}},
            },
            "too long to enforce",
        ),
        ({"anyOf": [{"contains": {"unevaluatedProperties": False, "$ref": "#"}}]}, "circular|nested"),
        (
            {"properties": {"a": {"oneOf": [{"not": {"$ref": "#"}}, {"not": {"$ref": "#"}}]}}},
            "is not supported for this schema",
        ),
        ({"properties": {f"p{n}": {} for n in range(40)}, "minProperties": 20, "type": "object"}, "minProperties"),
        ({"properties": {f"p{n}": {} for n in range(65)}, "minProperties": 1}, "require more than 64 alternatives"),
        ({"properties": {"a": {}}, "minProperties": 2}, "above the number of declared properties"),
    ],
)
def test_hostile_schemas_are_refused(grammars: GrammarCompiler, schema: dict[str, Any], told: str) -> None:
    """Rejected by counting, without measuring time: each grows faster than its length."""
    with pytest.raises(InvalidRequestError, match=told):
        grammars.matcher([grammar_part(Grammar("json_schema", json.dumps(schema)))], "grammar")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "elephant"},
        {"type": []},
        {"type": 5},
        {"required": "a"},
        {"required": [1]},
        {"enum": 5},
        {"anyOf": {}},
        {"anyOf": []},
        {"properties": []},
        {"properties": {"a": 5}},
        {"dependentRequired": []},
        {"dependentRequired": {"a": [1]}},
        {"pattern": 5},
        {"pattern": "("},
        {"minLength": -1},
        {"minLength": "1"},
        {"minimum": "1"},
        {"$ref": 5},
        {"$ref": "#/nowhere"},
        {"$ref": "#/%ff/~2"},
        {"$ref": "http://[/"},
        {"$ref": "#/prefixItems/" + "9" * 5000, "prefixItems": [{}]},
        {"contains": {}, "minContains": "x"},
        {"unevaluatedProperties": False, "allOf": 5},
        {"unevaluatedProperties": False, "anyOf": {"a": 1}},
        {"unevaluatedProperties": False, "properties": 5},
        {"uniqueItems": True, "items": {"enum": [[1]]}},
        {"not": {"enum": [{"a": 1}]}},
        {"minProperties": 1.5},
    ],
)
def test_invalid_schemas_are_refused(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        grammars.matcher([grammar_part(Grammar("json_schema", json.dumps(schema)))], "grammar")


def test_pointers_do_not_grow_while_branches_are_rewritten() -> None:
    name = "x" * 100_000
    tracemalloc.start()
    with pytest.raises(InvalidRequestError):
        enforced_schema({"anyOf": [{"properties": {name: {"unevaluatedProperties": False, "$ref": "#"}}}]}, "grammar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * len(name)


def test_required_contained_items_are_limited_before_they_are_listed() -> None:
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="too long to enforce"):
        enforced_schema({"contains": {}, "minContains": 1_000_000}, "grammar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(2_000))}},
        {"type": "object", "minProperties": 1_000, "properties": {f"p{n}": {} for n in range(2_000)}},
    ],
)
def test_huge_numbers_of_combinations_are_not_computed(monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]) -> None:
    found: list[int] = []
    comb = math.comb
    monkeypatch.setattr(math, "comb", lambda *of: found.append(comb(*of)) or found[-1])
    with pytest.raises(InvalidRequestError, match=r"uniqueItems|alternatives"):
        enforced_schema(schema, "grammar")
    assert max(found) < 2**100


def test_one_of_options_are_compared_before_objects_are_closed(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer
) -> None:
    """Options are compared before they are closed: values with `x` match the second option, too, so they match both."""
    schema = {"oneOf": [{"required": ["a", "x"]}, {"required": ["a"], "properties": {"a": {"multipleOf": 3}}}]}
    assert takes(grammars, small_tokenizer, schema, {"a": 3})
    assert not takes(grammars, small_tokenizer, schema, {"a": 3, "x": 1})


def test_overlapping_one_of_options_are_refused_by_pointer() -> None:
    overlapping = {"oneOf": [{"format": "uri"}, {"enum": ["."]}]}
    with pytest.raises(InvalidRequestError, match="several options of /properties/p/oneOf may match the same value"):
        enforced_schema({"properties": {"p": overlapping}}, "grammar")


def test_exponential_schemas_are_refused_with_bounded_memory() -> None:
    names = {f"p{n}": {} for n in range(2_000)}
    either = [{"anyOf": [{}, {}]}] * 15
    schema = {"allOf": [{"properties": names, "allOf": either}], "unevaluatedProperties": False}
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=r"too long to enforce|more than 64 cases"):
        enforced_schema(schema, "grammar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def test_pattern_count_limit_is_checked_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a thousand patterns takes seconds."""
    read: list[str] = []
    monkeypatch.setattr(rewriting, "has_lookaround", read.append)
    names = {"^" + "a" * length: True for length in range(33)}
    with pytest.raises(InvalidRequestError, match="patternProperties has 33 members; at most 32 are supported"):
        enforced_schema({"patternProperties": names}, "tools")
    assert not read
