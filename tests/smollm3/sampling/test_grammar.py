"""Grammars: which are accepted, error messages for others, and the allowed tokens."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling import grammar
from notso.smollm3.sampling.grammar import GrammarCompiler, Matcher, arguments_part, grammar_part
from notso.smollm3.sampling.schemas.json_schema import MAX_CHARACTERS, MAX_OPTIONAL, enforced_schema
from notso.smollm3.sampling.schemas.rewriting import MAX_DEPTH
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.request_options import Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(small_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer)


def matcher(grammars: GrammarCompiler, kind: Any, source: str = "") -> Matcher:
    return grammars.matcher([grammar_part(Grammar(kind, source))], "grammar")


def wander(made: Matcher, tokenizer: Tokenizer, chance: random.Random, most: int = 4000) -> str:
    """Return a random text of the grammar, drawn token by token."""
    tokens: list[int] = []
    while not made.is_over:
        allowed = np.flatnonzero(made.allowed())
        ends = tokenizer.end_ids.intersection(allowed.tolist())
        if ends and chance.random() < 0.2:
            break
        token = chance.choice([int(token) for token in allowed if token not in ends])
        assert token not in tokenizer.special_ids
        made.consume(token)
        tokens.append(token)
        assert len(tokens) < most
    return tokenizer.decode(tokens)


def test_random_text_of_a_schema_grammar_is_valid(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    chance = random.Random(1)
    for _ in range(30):
        found = json.loads(wander(matcher(grammars, "json_schema", json.dumps(PERSON)), small_tokenizer, chance))
        assert set(found) == {"name", "age"}
        assert isinstance(found["name"], str) and len(found["name"]) <= 8
        assert type(found["age"]) is int and 0 <= found["age"] <= 150


def test_equal_grammars_are_compiled_once(small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = GrammarCompiler(small_tokenizer), []
    create = GrammarCompiler._create_matcher

    def record(compiler: GrammarCompiler, parts: Any) -> Any:
        compiled.append(parts)
        return create(compiler, parts)

    monkeypatch.setattr(GrammarCompiler, "_create_matcher", record)
    first, second = (matcher(grammars, "regex", "[0-9]") for _ in range(2))
    first.consume(small_tokenizer.encode("7")[0])
    assert first.is_over and not second.is_over and len(compiled) == 1
    for number in range(grammar.MAX_COMPILED):
        matcher(grammars, "regex", f"[0-9]{number}")
    matcher(grammars, "regex", "[0-9]")
    assert len(compiled) == grammar.MAX_COMPILED + 2


def test_tokens_of_a_matching_text_are_allowed(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    """The tokenizer's tokens of a matching text are allowed, and the end is allowed where the text may end."""
    text = '{"name": "Zoë 🦜", "age": 7}'
    made = matcher(grammars, "json_schema", json.dumps(PERSON))
    for token in small_tokenizer.encode(text):
        allowed = made.allowed()
        assert allowed[token]
        assert not allowed[sorted(small_tokenizer.end_ids)].any()
        made.consume(token)
    assert made.is_over
    number = matcher(grammars, "regex", "[0-9]+")
    number.consume(small_tokenizer.encode("7")[0])
    assert not number.is_over
    assert number.allowed()[sorted(small_tokenizer.end_ids)].all()


def test_regex_with_slashes_and_quotes_is_matched(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    made = matcher(grammars, "regex", 'a/b"\n[/]')
    assert made.try_consume_all(small_tokenizer.encode('a/b"\n/'))
    assert made.is_over


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"(?=.*\d)(?=.*[a-z])[a-z0-9]{3,5}", ["a1b", "12c45"], ["abc", "123", "a1", "a1b2c3"]),
        (r"foo(?!bar)[a-z]*", ["foo", "foobaz"], ["foobar", "foobarn"]),
        (r"\bcat\b", ["cat"], ["cats", "a cat"]),
    ],
)
def test_regex_supports_lookahead_and_word_boundaries(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, pattern: str, matching: list[str], other: list[str]
) -> None:
    for text in (*matching, *other):
        made = matcher(grammars, "regex", pattern)
        assert (made.try_consume_all(small_tokenizer.encode(text)) and made.may_end) == (text in matching), text


def test_takes_all_accepts_only_a_matching_prefix(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    assert matcher(grammars, "regex", "abc").try_consume_all(small_tokenizer.encode("ab"))
    assert not matcher(grammars, "regex", "abc").try_consume_all(small_tokenizer.encode("xb"))


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("json_schema", "", "not JSON"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"minimum": NaN}', "not JSON"),
        ("json_schema", '{"const": "\\ud800"}', "not JSON"),
        ("json_schema", '{"unknown \\ud800": 1}', "not JSON"),
        ("json_schema", '{"properties": {"a": {"not": {"multipleOf": 2}}}}', "is not supported for this schema"),
        ("json_schema", '{"anyOf": [{"if": {"multipleOf": 3}, "then": {}}]}', "/anyOf/0/if is not supported"),
        ("json_schema", '{"$dynamicRef": "#a"}', "/$dynamicRef is not supported"),
        (
            "json_schema",
            '{"type": "object", "minProperties": 2}',
            "minProperties above the number of declared properties",
        ),
        ("json_schema", '{"items": 5}', "/items must be a schema"),
        ("json_schema", '{"type": "elephant"}', "refused"),
        ("json_schema", '{"$ref": "http://example.com/a"}', "cannot be resolved within the schema"),
        ("json_schema", '{"$ref": "http://[/#/a"}', "cannot be resolved within the schema"),
        ("json_schema", f'{{"$ref": "#/anyOf/{"9" * 5000}", "anyOf": []}}', "cannot be resolved within the schema"),
        ("json_schema", '{"enum": []}', "/enum has an invalid value"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems is supported only if the items can have only a few"),
        (
            "json_schema",
            '{"oneOf": [{"type": "integer"}, {"multipleOf": 3}]}',
            "may match the same value",
        ),
        ("json_schema", '{"minimum": "5", "exclusiveMinimum": true}', "/minimum has an invalid value"),
        ("json_schema", f'{{"multipleOf": 1{"0" * 400}}}', "/multipleOf has an invalid value"),
        ("json_schema", '{"contains": {}, "maxContains": 2}', "/maxContains is not supported"),
        ("json_schema", '{"const": "a\\u0000b"}', "/const contains control characters"),
        (
            "json_schema",
            '{"enum": [1, [9007199254740993]]}',
            "/enum contains the number 9007199254740993, which cannot",
        ),
        ("json_schema", f'{{"const": -1{"2" * 400}}}', "/const contains the number -122"),
        ("json_schema", '{"pattern": "a\\\\x00b"}', "/pattern has control characters"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "matches no text"),
        ("json_schema", " " * (MAX_CHARACTERS + 1), "longer than"),
        ("json_schema", "[" * 60_000, "not JSON"),
        ("regex", "(", "refused"),
        ("regex", "(?=a)b", "matches no text"),
        ("regex", "(?<=a)b", "has a lookbehind"),
        ("regex", r"(a)\1", "has a backreference"),
        ("json_schema", '{"type": "string", "minLength": 1e999}', "is too large"),
        (
            "json_schema",
            json.dumps({"allOf": [{"pattern": f".*a.{{{n}}}.*"} for n in range(40)]}),
            "patterns apply to the same value",
        ),
        (
            "json_schema",
            json.dumps({"allOf": [{"properties": {"a": {"pattern": f"a{n}"}}} for n in range(40)]}),
            "patterns apply to the same value",
        ),
        (
            "json_schema",
            json.dumps({"$defs": {"a": {"pattern": "a"}}, "allOf": [{"$ref": "#/$defs/a"}, {"pattern": "b"}] * 9}),
            "patterns apply to the same value",
        ),
        ("lark", "start: T\nT: " + " & ".join(f"/(.|\\n)*a.{{{n}}}&/" for n in range(40)), "more than 10 terminals"),
        ("lark", 'start: %json {"type": "string"}', "%json is not supported"),
        ("gbnf", 'root ::= "a"' + "*" * 100_000, "more than 64 repetition operators in a row"),
        ("regex", "a" * (grammar.MAX_GRAMMAR_CHARACTERS + 1), "longer than"),
        ("lark", "start: nothing", "refused"),
        ("lark", "", "refused"),
        ("lark", "\ud800", "not valid Unicode"),
        ("lark", "start: <|im_end|>", "refused"),  # users' grammars must not contain control tokens
        ("lark", "start: <|im_start|> /a/", "refused"),
        ("lark", "start: <[0-5]>", "refused"),
    ],
)
def test_unsupported_grammars_are_refused(grammars: GrammarCompiler, kind: Any, source: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match="(?s).*" + told.replace("$", r"\$")) as caught:
        matcher(grammars, kind, source)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 400


def chain(links: int) -> dict[str, Any]:
    """Return a schema whose definitions form a chain of references."""
    definitions = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(links)}
    return {"$defs": {**definitions, f"a{links}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def test_reference_chain_length_is_limited(grammars: GrammarCompiler) -> None:
    """The longest accepted chain recurses deeper than an ordinary thread's stack allows."""
    with pytest.raises(InvalidRequestError, match=r"depth \* \(definitions \+ 1\) is limited to"):
        grammars.matcher([grammar_part(Grammar("json_schema", json.dumps(chain(2_100))))], "grammar")
    with pytest.raises(InvalidRequestError, match=r"depth \* \(definitions \+ 1\) is limited to"):
        arguments_part({"type": "object", **chain(2_100)}, "tool")
    grammars.matcher([grammar_part(Grammar("json_schema", json.dumps(chain(2_000))))], "grammar")
    with pytest.raises(InvalidRequestError, match="longer than"):
        arguments_part({"description": "x" * (MAX_CHARACTERS + 1)}, "tool")
    with pytest.raises(InvalidRequestError, match="not JSON"):
        arguments_part({"const": {1, 2}}, "tool")


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "multipleOf": 99_989}, "multipleOf"),
        ({"allOf": [{"multipleOf": 311}, {"multipleOf": 313}]}, "multipleOf"),
        ({"patternProperties": {f"^[a-z ]*k{i}$": {} for i in range(33)}}, "patternProperties"),
        ({"items": {"properties": {f"p{i}": {} for i in range(MAX_OPTIONAL + 1)}}}, "consecutive optional properties"),
    ],
)
def test_expensive_schemas_are_refused(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        grammar_part(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("more", [{}, {"additionalProperties": {"type": "string"}}])
def test_many_optional_properties_can_be_generated(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, more: dict[str, Any]
) -> None:
    named: dict[str, Any] = {f"p{i}": {"type": "integer"} for i in range(2 * MAX_OPTIONAL + 1)}
    item = {"type": "object", "properties": named, "required": [f"p{MAX_OPTIONAL}"], **more}
    created = matcher(grammars, "json_schema", json.dumps({"type": "array", "items": item}))
    last = 2 * MAX_OPTIONAL
    assert created.try_consume_all(small_tokenizer.encode(f'[{{"p0": 1, "p{MAX_OPTIONAL}": 2, "p{last}": 3}}]'))


def test_names_required_elsewhere_are_not_optional(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    many = {"properties": {f"p{i}": {"type": "integer"} for i in range(MAX_OPTIONAL + 1)}}
    schema = {"$ref": "#/$defs/many", "required": ["p9"], "$defs": {"many": many}}
    created = matcher(grammars, "json_schema", json.dumps({"type": "object", **schema}))
    assert created.try_consume_all(small_tokenizer.encode('{"p0": 1, "p9": 2}'))
    matcher(grammars, "json_schema", json.dumps({"type": "string", **many}))


def test_too_many_alternatives_are_explained(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    options = [
        {"type": "object", "properties": {f"{letter}{i}": {"type": "integer"} for i in range(MAX_OPTIONAL)}}
        for letter in "ab"
    ]
    created = matcher(grammars, "json_schema", json.dumps({"anyOf": options}))
    with pytest.raises(InvalidRequestError, match="consecutive optional properties"):
        created.consume(small_tokenizer.encode("{")[0])


@pytest.mark.parametrize("step", [1, 0.01, 0.25, 5, 100_000, 1e-6, 360])
def test_ordinary_multiple_of_values_are_accepted(grammars: GrammarCompiler, step: float) -> None:
    grammars.matcher([grammar_part(Grammar("json_schema", json.dumps({"multipleOf": step})))], "grammar")


def test_schema_depth_is_limited() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_DEPTH - 1):
        schema = {"type": "array", "items": schema}
    assert enforced_schema(schema, "grammar").schema == schema
    with pytest.raises(InvalidRequestError, match="more than 32 levels deep"):
        enforced_schema({"items": schema}, "grammar")


def test_annotation_keywords_are_accepted(grammars: GrammarCompiler) -> None:
    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Person",
        "description": "not",
        "$defs": {"not": {"type": "integer", "default": {"not": 1}, "examples": [{"if": 1}]}},
        "properties": {"not": {"$ref": "#/$defs/not"}, "if": {"const": {"then": 1}}, "else": {"enum": [{"not": {}}]}},
        "additionalProperties": True,
    }
    matcher(grammars, "json_schema", json.dumps(described))


def test_grammar_that_exceeds_lexer_states_raises(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 500)
    made = matcher(grammars, "regex", "(?s)(.*a.{60})|(.*b.{50})|(.*c.{40})")
    chance, letters = random.Random(2), [small_tokenizer.encode(letter)[0] for letter in "abcd"]
    with pytest.raises(InvalidRequestError, match="can no longer follow its grammar"):
        for _ in range(1000):
            made.allowed()
            made.consume(chance.choice(letters))


def test_official_vocabulary_allows_only_matching_tokens(official_tokenizer: Tokenizer) -> None:
    """Of 128,256 tokens, exactly the matching ones are allowed, no special or unused ones, and masks are fast."""
    grammars = GrammarCompiler(official_tokenizer)
    chance = random.Random(4)
    for _ in range(5):
        json.loads(wander(matcher(grammars, "json_schema", json.dumps(PERSON)), official_tokenizer, chance))
    made = matcher(grammars, "json_object")
    for token in official_tokenizer.encode('{"first": {"second": ["Grüße 🦜", 1.5, null]}, "third": true}'):
        assert made.allowed()[token]
        made.consume(token)
    assert made.is_over
    anything = matcher(grammars, "regex", "(?s).+").allowed()
    barred = official_tokenizer.special_ids | official_tokenizer.unused_ids
    assert not anything[sorted(barred)].any()
    assert anything.sum() > 100_000
    started = time.thread_time()
    made = matcher(grammars, "json_object")
    for token in official_tokenizer.encode('{"text": "' + "and so on " * 30):
        made.allowed()
        made.consume(token)
    assert time.thread_time() - started < 2.0  # about 20 microseconds per mask; the limit allows for a busy machine
