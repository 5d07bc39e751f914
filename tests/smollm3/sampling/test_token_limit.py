"""Structured answers end: within their token limit if possible, and without a limit after a finite length."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from notso.smollm3 import Engine
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling import token_limit
from notso.smollm3.sampling.grammar import GrammarCompiler, grammar_part
from notso.smollm3.sampling.structured_output import GrammarOutput, StructuredOutput, structured_output_for
from notso.smollm3.sampling.token_limit import grammar_extent
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.messages import Message
from notso.smollm3.values.request_options import Grammar, RequestOptions, ToolName
from notso.smollm3.values.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def grammars(small_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer)


def draw(
    output: StructuredOutput, tokenizer: Tokenizer, limit: int, seed: int, most: int | None = None
) -> tuple[str, bool]:
    """Return an answer of uniformly drawn tokens, or its first `most`, and whether it ended within its limit."""
    chance, tokens = np.random.default_rng(seed), []
    while len(tokens) < (most or limit) and not output.is_over:
        logits = output.restrict(chance.standard_normal(tokenizer.vocab_size).astype(np.float32), False)
        left = limit - len(tokens) - 1
        token = int(logits.argmax())
        while not output.permits(token, False, left):
            logits = output.narrow(logits, token, left)
            token = int(logits.argmax())
        tokens.append(token)
        output.consume(token, False, left)
        if token in tokenizer.end_ids:
            return tokenizer.decode(tokens), True
    return tokenizer.decode(tokens), output.is_over or output.is_whole


def structured(grammars: GrammarCompiler, tokenizer: Tokenizer, options: RequestOptions) -> StructuredOutput:
    found = structured_output_for(options, tokenizer, grammars, may_think=False, started="")
    assert found is not None
    return found


def of_schema(schema: Any) -> RequestOptions:
    return RequestOptions(grammar=Grammar("json_schema", json.dumps(schema)), thinking=False)


def takes(grammars: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    matcher = grammars.matcher([grammar_part(Grammar("json_schema", json.dumps(schema)))], "grammar")
    return matcher.try_consume_all(tokenizer.encode(text)) and matcher.may_end


# ---------------------------------------------------------------- with a limit


def record(required: Sequence[str] = (), /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": record(
            ["value", "next", "children"],
            value=INTEGER,
            next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}},
        )
    },
}
LIMITED: dict[str, tuple[dict[str, Any], str]] = {
    "any value": ({}, "0"),
    "any object": ({"type": "object"}, "{}"),
    "any array": ({"type": "array"}, "[]"),
    "a string": (STRING, '""'),
    "an integer": (INTEGER, "0"),
    "open members": ({**record(["a"], a=STRING), "additionalProperties": True}, '{"a":""}'),
    "members of a kind": ({**record(["a"], a=STRING), "additionalProperties": INTEGER}, '{"a":""}'),
    "pydantic's default": (
        record(["name", "age"], name=STRING, age=INTEGER, tags={"type": "array", "items": STRING}),
        '{"name":"","age":0}',
    ),
    "nested": (record(["a"], a=record(["b"], b=record(["c"], c=STRING))), '{"a":{"b":{"c":""}}}'),
    "many members": (
        record([f"p{n}" for n in range(9)], **{f"p{n}": INTEGER for n in range(9)}),
        json.dumps({f"p{n}": 0 for n in range(9)}, separators=(",", ":")),
    ),
    "optional members": (record(["p7"], **{f"p{n}": record(["x"], x=STRING) for n in range(12)}), '{"p7":{"x":""}}'),
    "a tree": (TREE, '{"value":0,"next":null,"children":[]}'),
    "a long string": (record(["a"], a={"type": "string", "minLength": 30}), json.dumps({"a": "a" * 30})),
    "many items": ({"type": "array", "items": INTEGER, "minItems": 12}, "[0,0,0,0,0,0,0,0,0,0,0,0]"),
    "items of objects": (
        {"type": "array", "items": record(["x", "y"], x=NUMBER, y=NUMBER), "minItems": 2},
        '[{"x":0,"y":0},{"x":0,"y":0}]',
    ),
    "a long branch": (
        {"anyOf": [record([f"p{n}" for n in range(30)], **{f"p{n}": STRING for n in range(30)}), {"type": "null"}]},
        "null",
    ),
    "a long value": ({"enum": ["a" * 100, "b"]}, '"b"'),
    "a tagged union": (
        {
            "anyOf": [
                record(["kind", "radius"], kind={"const": "circle"}, radius=NUMBER),
                record(
                    ["kind", "points"],
                    kind={"const": "polygon"},
                    points={"type": "array", "items": NUMBER, "minItems": 20},
                ),
            ]
        },
        '{"kind":"circle","radius":0}',
    ),
    "a date": (record(["a"], a={"type": "string", "format": "date-time"}), '{"a":"2024-01-01T00:00:00Z"}'),
    "an address": (record(["a"], a={"type": "string", "format": "email"}), '{"a":"a@b"}'),
    "a pattern": (record(["a"], a={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}), '{"a":"AAA-0000"}'),
    "a pattern somewhere": (record(["a"], a={"type": "string", "pattern": "needle"}), '{"a":"needle"}'),
    "a lookahead": (
        record(["a"], a={"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-z]).{8,}$"}),
        '{"a":"1aaaaaaa"}',
    ),
    "a multiple": ({"type": "integer", "minimum": 100_000, "multipleOf": 7}, "100002"),
}
"""By name: a schema, and a short matching text. With a limit of at least that text's tokens, an answer can end."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param(name, more, marks=[] if (i + j) % 3 == 0 or more == 0 else [pytest.mark.long("engine")])
        for i, name in enumerate(LIMITED)
        for j, more in enumerate((0, 1, 4, 30))
    ],
)
def test_answer_ends_within_its_limit_if_possible(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str, more: int
) -> None:
    schema, short = LIMITED[name]
    jsonschema.validate(json.loads(short), schema)
    limit = len(small_tokenizer.encode(short)) + more
    for seed in range(2):
        text, ended = draw(structured(grammars, small_tokenizer, of_schema(schema)), small_tokenizer, limit, seed)
        assert ended, text
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[a-z]{5,}[0-9]{2}"),
        ("gbnf", 'root ::= "(" root ")" | "x"'),
        ("lark", 'start: "a" start "b" | "c"'),
        ("choice", '["a very long choice of many words", "b"]'),
    ],
)
def test_other_grammar_kinds_end_within_the_limit(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, kind: Any, source: str
) -> None:
    options = RequestOptions(grammar=Grammar(kind, source), thinking=False)
    for seed in range(4):
        output = structured(grammars, small_tokenizer, options)
        text, ended = draw(output, small_tokenizer, 20, seed)
        assert ended or not isinstance(output, GrammarOutput) or output._matcher.may_end, text


WEATHER = {"function": {"name": "weather", "parameters": record(["city", "days"], city=STRING, days=INTEGER)}}


@pytest.mark.parametrize("choice", ["required", ToolName("weather")])
def test_tool_call_ends_within_its_limit(grammars: GrammarCompiler, small_tokenizer: Tokenizer, choice: Any) -> None:
    options = RequestOptions(tools=[WEATHER], tool_choice=choice, thinking=False)
    for seed in range(4):
        text, ended = draw(structured(grammars, small_tokenizer, options), small_tokenizer, 60, seed)
        assert ended, text


def test_text_answer_with_tools_is_not_taken_for_json(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    """It may have more than twenty digits, and it is not complete just because it may end."""
    options = RequestOptions(grammar=Grammar("regex", "[0-9]{1,40}"), tools=[WEATHER], thinking=False)
    output, seven = structured(grammars, small_tokenizer, options), small_tokenizer.encode("7")[0]
    for _ in range(39):
        assert np.isfinite(output.restrict(np.zeros(small_tokenizer.vocab_size, np.float32), False)[seven])
        output.consume(seven, False)
        assert not output.is_whole


def test_long_text_answer_with_tools_is_not_begun_near_the_limit(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer
) -> None:
    """Unlike the text of a call, a text answer can be much longer than its grammar."""
    options = RequestOptions(grammar=Grammar("regex", "a[0-9]{999}|c"), tools=[WEATHER], thinking=False)
    output = structured(grammars, small_tokenizer, options)
    assert not output.permits(small_tokenizer.encode("a")[0], False, 200)
    assert output.permits(small_tokenizer.encode("c")[0], False, 200)


@pytest.mark.parametrize("limit", [100, pytest.param(600, marks=pytest.mark.long("engine"))])
def test_nested_text_answer_ends_with_tools_as_without(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, limit: int
) -> None:
    """The length of tool calls does not matter after the first token of the answer."""
    deeper, spent = small_tokenizer.encode("a")[0], []
    for tools in (None, [WEATHER]):
        grammar = Grammar("lark", 'start: "a" start "b" | "c"')
        output = structured(grammars, small_tokenizer, RequestOptions(grammar=grammar, tools=tools, thinking=False))
        preferred = np.zeros(small_tokenizer.vocab_size, np.float32)
        preferred[deeper] = 1
        for left in reversed(range(limit)):
            logits = output.restrict(preferred.copy(), False)
            while not output.permits(token := int(logits.argmax()), False, left):
                logits = output.narrow(logits, token, left)
            output.consume(token, False, left)
            if output.is_over:
                break
        assert output.is_over
        assert isinstance(output, GrammarOutput) and output._matcher._limit is not None
        spent.append(output._matcher._limit._spent)
    assert spent[1] <= 1.05 * spent[0]  # 14 % more where the length of calls is added, 0.4 % where it is not


def test_number_in_a_call_beside_a_text_answer_is_limited(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer
) -> None:
    options = RequestOptions(grammar=Grammar("regex", "[0-9]{1,40}"), tools=[WEATHER], thinking=False)
    output, opening = structured(grammars, small_tokenizer, options), small_tokenizer.tool_call_open_id
    seven, begun = small_tokenizer.encode("7")[0], '\n{"name": "weather", "arguments": {"city": "a", "days": '
    assert opening is not None
    for token in [opening, *small_tokenizer.encode(begun), *[seven] * 20]:
        assert np.isfinite(output.restrict(np.zeros(small_tokenizer.vocab_size, np.float32), False)[token])
        output.consume(token, False)
    assert not np.isfinite(output.restrict(np.zeros(small_tokenizer.vocab_size, np.float32), False)[seven])


def test_answer_that_cannot_end_within_its_limit_is_truncated(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer
) -> None:
    """Its tokens are the same as without a limit."""
    options = of_schema({"type": "array", "items": INTEGER, "minItems": 200})
    cut, ended = draw(structured(grammars, small_tokenizer, options), small_tokenizer, 20, 1)
    assert not ended
    assert draw(structured(grammars, small_tokenizer, options), small_tokenizer, 2_000, 1, most=20)[0] == cut


def test_no_search_is_done_far_from_the_limit(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    output = structured(grammars, small_tokenizer, of_schema(record(["a"], a=STRING)))
    draw(output, small_tokenizer, 100_000, 1)
    assert isinstance(output, GrammarOutput) and output._matcher._limit is not None
    assert output._matcher._limit._spent == 0


def test_search_near_the_limit_is_bounded(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    wide = {f"p{n}": {"type": "string", "minLength": n} for n in range(12)}
    schema = record(list(wide), **wide)
    for limit in (50, 300):
        output = structured(grammars, small_tokenizer, of_schema(schema))
        draw(output, small_tokenizer, limit, 1)
        assert isinstance(output, GrammarOutput) and output._matcher._limit is not None
        assert output._matcher._limit._spent <= 20_000


def test_search_steps_of_an_answer_are_limited(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is so low that it is reached."""
    monkeypatch.setattr(token_limit, "MAX_STEPS", 60)
    output = structured(grammars, small_tokenizer, of_schema(record(["a", "b"], a=STRING, b=STRING)))
    draw(output, small_tokenizer, 24, 1)
    assert isinstance(output, GrammarOutput) and output._matcher._limit is not None
    assert 0 < output._matcher._limit._spent <= 60


# ---------------------------------------------------------------- with a model


def answers(engine: Engine, schema: Any, limit: int, **options: Any) -> list[tuple[str, str | None]]:
    found = []
    for seed in range(20):
        messages = [Message("user", f"What is {20 + seed} + 48?")]
        params = SamplingParams(max_tokens=limit, seed=seed)
        grammar = Grammar("json_schema", json.dumps(schema))
        events = list(engine.generate(messages, params, RequestOptions(grammar=grammar, **options)))
        found.append(("".join(each.text for each in events if each.kind == "text"), events[-1].finish_reason))
    return found


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        (
            record(
                ["answer", "kind"], answer={**INTEGER, "minimum": 0, "maximum": 999}, kind={"enum": ["sum", "product"]}
            ),
            300,
        ),
        (record(["a"], a=INTEGER), 400),
        (INTEGER, 400),
        ({"type": "object"}, 60),
    ],
    ids=["pydantic's default object", "an unbounded integer", "an integer alone", "any object"],
)
def test_demo_model_ends_twenty_of_twenty_answers(demo_engine: Engine, schema: Any, limit: int) -> None:
    for text, reason in answers(demo_engine, schema, limit, thinking=False):
        assert reason == "stop", text
        jsonschema.validate(json.loads(text), schema)


def test_reasoning_leaves_enough_tokens_for_the_answer(demo_engine: Engine) -> None:
    schema = record(["a", "b"], a=INTEGER, b=STRING)
    for text, reason in answers(demo_engine, schema, 22):
        assert reason == "stop", text
        jsonschema.validate(json.loads(text), schema)


# ---------------------------------------------------------------- closed objects and short numbers

CLOSED: dict[str, tuple[Any, str, bool]] = {
    "declared": (record(["a"], a=INTEGER), '{"a":1}', True),
    "another": (record(["a"], a=INTEGER), '{"a":1,"b":2}', False),
    "said open": ({**record(["a"], a=INTEGER), "additionalProperties": True}, '{"a":1,"b":2}', True),
    "said of a kind": ({**record(["a"], a=INTEGER), "additionalProperties": INTEGER}, '{"a":1,"b":2}', True),
    "unevaluated": ({**record(["a"], a=INTEGER), "unevaluatedProperties": True}, '{"a":1,"b":2}', True),
    "nothing declared": ({"type": "object"}, '{"a":1,"b":2}', True),
    "a required name": (record(["a", "b"], a=INTEGER), '{"a":1,"b":2}', True),
    "too few names": ({**record(["a"], a=INTEGER), "minProperties": 1}, '{"a":1}', True),
    "inside": (record(["x"], x=record(["a"], a=INTEGER)), '{"x":{"a":1,"b":2}}', False),
    "items": ({"type": "array", "items": record(["a"], a=INTEGER)}, '[{"a":1,"b":2}]', False),
    "prefix items": ({"type": "array", "prefixItems": [record(["a"], a=INTEGER)]}, '[{"a":1,"b":2}]', False),
    "together": ({"allOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]}, '{"a":1,"b":2}', True),
    "together, another": (
        {"allOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]},
        '{"a":1,"b":2,"c":3}',
        False,
    ),
    "together, one open": (
        {"allOf": [record(["a"], a=INTEGER), {**record(["b"], b=INTEGER), "additionalProperties": True}]},
        '{"a":1,"b":2,"c":3}',
        True,
    ),
    "either": ({"anyOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]}, '{"b":2}', True),
    "either, another": ({"anyOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]}, '{"a":1,"c":3}', False),
    "base and branch": (
        {**record(["k"], k=INTEGER), "anyOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]},
        '{"k":1,"b":2}',
        True,
    ),
    "base and branch, another": (
        {**record(["k"], k=INTEGER), "anyOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]},
        '{"k":1,"b":2,"c":3}',
        False,
    ),
    "one of": ({"oneOf": [record(["a"], a=INTEGER), record(["b"], b=INTEGER)]}, '{"a":1}', True),
    "a reference": ({"$ref": "#/$defs/x", "$defs": {"x": record(["a"], a=INTEGER)}}, '{"a":1,"b":2}', False),
    "a base by reference": (
        {"allOf": [{"$ref": "#/$defs/x"}], **record(["b"], b=INTEGER), "$defs": {"x": record(["a"], a=INTEGER)}},
        '{"a":1,"b":2}',
        True,
    ),
    "a reference twice": (
        {
            **record(
                ["alone", "both"],
                alone={"$ref": "#/$defs/x"},
                both={"allOf": [{"$ref": "#/$defs/x"}, record(["b"], b=INTEGER)]},
            ),
            "$defs": {"x": record(["a"], a=INTEGER)},
        },
        '{"alone":{"a":1},"both":{"a":1,"b":2}}',
        True,
    ),
    "a reference twice, another": (
        {
            **record(
                ["alone", "both"],
                alone={"$ref": "#/$defs/x"},
                both={"allOf": [{"$ref": "#/$defs/x"}, record(["b"], b=INTEGER)]},
            ),
            "$defs": {"x": record(["a"], a=INTEGER)},
        },
        '{"alone":{"a":1,"b":2},"both":{"a":1,"b":2}}',
        False,
    ),
    "a condition": ({"if": record([], a={"const": 1}), "then": {"required": ["b"]}}, '{"a":1,"b":2,"c":3}', True),
    "a range of 64-bit integers": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        str(-(2**63) + 1024),
        True,
    ),
    "the largest 64-bit integer": ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, str(2**63 - 1), True),
    "a value in a wide range": ({"enum": [10**19, 1], "maximum": 10**20}, str(10**19), True),
    "one of, in a wide range": (
        {"oneOf": [{**INTEGER, "maximum": 10**20}, {"enum": [10**19, ""]}]},
        str(10**19),
        False,
    ),
    "a wide range of draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            **INTEGER,
            "minimum": -1e300,
            "exclusiveMinimum": True,
        },
        "5",
        True,
    ),
    "a range of doubles": ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, "-1.5", True),
    "white space is optional": (record(["a"], a=INTEGER), '{"a": 1}', True),
}


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed_by_default(grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str) -> None:
    schema, text, is_taken = CLOSED[name]
    assert takes(grammars, small_tokenizer, schema, text) == is_taken
    if is_taken:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema",
    [
        INTEGER,
        NUMBER,
        {"type": "number", "minimum": 0},
        record(["a"], a=NUMBER),
        {"type": "array", "items": NUMBER, "maxItems": 3},
    ],
    ids=json.dumps,
)
def test_numbers_have_at_most_twenty_digits(grammars: GrammarCompiler, small_tokenizer: Tokenizer, schema: Any) -> None:
    """The model prefers digits, and in the second round points and exponents."""
    tokenizer = small_tokenizer
    likes = np.array([tokenizer.token_bytes(token)[:1].isdigit() for token in range(tokenizer.vocab_size)])
    for likes_points in (False, True):
        output, text = structured(grammars, tokenizer, of_schema(schema)), ""
        for _ in range(60):
            logits = output.restrict(likes.astype(np.float32), False)
            points = [tokenizer.encode("."), tokenizer.encode("e")][len(text) % 2]
            logits[points] += 2 * likes_points
            token = int(logits.argmax())
            if output.is_over or token in tokenizer.end_ids:
                break
            output.consume(token, False)
            text += tokenizer.decode([token])
        numbers = "".join(letter if letter in "0123456789.eE+-" else " " for letter in text).split()
        assert numbers and all(sum(map(str.isdigit, number)) <= 20 for number in numbers), text


@pytest.mark.parametrize("number", [2**53, -(2**60), 2**63 - 1024, 2**63 - 1, 10**20])
def test_long_integers_are_written_exactly(grammars: GrammarCompiler, small_tokenizer: Tokenizer, number: int) -> None:
    assert takes(grammars, small_tokenizer, {"enum": [number, 0]}, str(number))


@pytest.mark.parametrize("number", [2**53 + 1, 2**60 + 1, 2**63, -(2**63), 2**64 - 1, 10**400])
def test_inexact_integers_are_refused(number: int) -> None:
    """The library would write other numbers, and crash at the fourth."""
    with pytest.raises(InvalidRequestError, match="cannot be represented exactly"):
        grammar_part(Grammar("json_schema", json.dumps({"enum": [number, 0]})))


@pytest.mark.parametrize("number", [str(2**64 - 1), "-2.2250738585072014e-308"])
def test_long_numbers_are_not_truncated(grammars: GrammarCompiler, small_tokenizer: Tokenizer, number: str) -> None:
    output = structured(grammars, small_tokenizer, of_schema(NUMBER))
    for token in small_tokenizer.encode(number):
        logits = output.restrict(np.zeros(small_tokenizer.vocab_size, np.float32), False)
        assert np.isfinite(logits[token]), number
        output.consume(token, False)


def test_minimum_can_require_more_digits(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notso.smollm3.sampling.grammar.MAX_DIGITS", 16)
    text, ended = draw(
        structured(grammars, small_tokenizer, of_schema({**INTEGER, "minimum": 10**17})), small_tokenizer, 60, 1
    )
    assert ended and int(text) >= 10**17


# ---------------------------------------------------------------- patterns with lookarounds

PATTERNS: dict[str, tuple[str, list[str], list[str]]] = {
    "pydantic's Decimal": (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-0.3", "+5.", ".5"], ["-", "+.", "", "1.2.3"]),
    "zod's email": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ["a@b.co", "a.b@c-d.org"],
        [".a@b.co", "a..b@c.de", "a.@b.co", "a@b", "a@-b.co"],
    ),
    "zod's duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        ["P1W", "P1Y2M", "PT5S", "P1DT1.5S"],
        ["P", "P1W2D", "PT", "P1Y1W"],
    ),
    "zod's extended duration": (
        r"^[-+]?P(?!$)(?:(?:[-+]?\d+Y)|(?:[-+]?\d+[.,]\d+Y$))?(?:(?:[-+]?\d+M)|(?:[-+]?\d+[.,]\d+M$))?"
        r"(?:(?:[-+]?\d+W)|(?:[-+]?\d+[.,]\d+W$))?(?:(?:[-+]?\d+D)|(?:[-+]?\d+[.,]\d+D$))?(?:T(?=[\d+-])"
        r"(?:(?:[-+]?\d+H)|(?:[-+]?\d+[.,]\d+H$))?(?:(?:[-+]?\d+M)|(?:[-+]?\d+[.,]\d+M$))?(?:[-+]?\d+(?:[.,]\d+)?S)?)??$",
        ["P1Y", "P1.5Y", "-P1DT1H", "PT1,5M"],
        ["P", "PT", "P1.5Y1M", "1Y"],
    ),
    "zod's hostname": (
        r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
        r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
        ["a", "a.b.c", "ex-1.org.", "a" * 63],
        ["-a", "a..b", "", "a" * 64, ".".join(["a" * 60] * 5)],
    ),
    "zod's emoji": (r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$", ["😀", "😀👍"], ["a", ""]),
    "zod's base64": (
        r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
        ["", "abcd", "ab==", "abcdabc="],
        ["a", "abc", "=ab="],
    ),
    "zod's guid": (r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})$", ["12345678-1234-123456789012"], ["x"]),
    "zod's date": (
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
        r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$",
        ["2024-02-29", "2023-12-31"],
        ["2023-02-29", "2023-13-01"],
    ),
    "zod's cuid": (r"^[cC][^\s-]{8,}$", ["cabcdefgh"], ["c", "cabc defgh"]),
    "zod's nanoid": (r"^[a-zA-Z0-9_-]{21}$", ["a" * 21], ["a" * 20]),
    "zod's jwt": (r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*$", ["a.b.c", "a.b."], ["a.b"]),
    "a word": (r"\bfoo\b", ["foo", "a foo b", "-foo-"], ["food", "afoo", ""]),
    "within a word": (r"^\w\B\w+$", ["ab", "abc"], ["a", "a-b"]),
    "a password": (r"^(?=.*\d)(?=.*[a-z]).{8,}$", ["abcdefg1", "1aaaaaaa"], ["abcdefgh", "12345678", "a1"]),
    "a strong password": (
        r"^(?=.*[A-Z])(?=.*[a-z])(?=.*\d)(?=.*[^A-Za-z0-9]).{8,64}$",
        ["aA1!aaaa"],
        ["aA1aaaaa", "aA1!", "AAAA111!"],
    ),
    "no two hyphens": (r"^(?:(?!--).)*$", ["a-b", "", "-"], ["a--b", "--"]),
    "trimmed": (r"^(?!\s)(?!.*\s$).+$", ["a", "a b"], [" a", "a ", ""]),
    "not reserved": (r"^(?!(?:admin|root)$)[a-z]+$", ["adm", "admins", "rooty"], ["admin", "root"]),
    "anchors in the middle": (r"(^a|b$)", ["ab", "xb", "axx"], ["xax", "x"]),
    "an anchor in a group": (r"(?:^|,)a(?:,|$)", ["a", "b,a", "a,b"], ["ba", "ab"]),
    "a lookahead in the middle": (r"^a(?=b|c)[a-z]{2}$", ["abz", "acz"], ["adz", "ab"]),
    "a lookahead in a lookahead": (r"^(?!(?!a)).b?$", ["a", "ab"], ["b", "x"]),
    "a name": (r"^(?!-)(?!.*--)[a-z0-9-]+$", ["a-b", "a"], ["-a", "a--b"]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_with_lookarounds_are_enforced(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str
) -> None:
    pattern, texts, others = PATTERNS[name]
    for text in (*texts, *others):
        written = json.dumps(text, ensure_ascii=False)
        assert takes(grammars, small_tokenizer, {"type": "string", "pattern": pattern}, written) == (text in texts), (
            text
        )


def test_pattern_properties_support_lookarounds(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "patternProperties": {"^(?!_)[a-z_]+$": INTEGER}, "additionalProperties": False}
    assert takes(grammars, small_tokenizer, schema, '{"a":1}')
    assert not takes(grammars, small_tokenizer, schema, '{"_a":1}')


# ---------------------------------------------------------------- oneOf, uniqueItems, errors

EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "one of two patterns": (
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "z$"}]},
        ["ab", "bz"],
        ["az", "b"],
    ),
    "not of a pattern": ({"type": "string", "not": {"pattern": "^[0-9]+$"}}, ["a", "1a", ""], ["1", "12"]),
    "if of a pattern": (
        {"type": "string", "if": {"pattern": "^a"}, "then": {"maxLength": 2}, "else": {"minLength": 3}},
        ["a", "ab", "bcd"],
        ["abc", "b"],
    ),
    "one of a date and others": (
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "pattern": "^[a-z]+$"}]},
        ["2024-02-29", "abc"],
        ["2023-02-29", "A"],
    ),
    "unique integers": (
        {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True},
        [[1], [3, 1], []],
        [[1, 1], [4]],
    ),
    "unique, exclusive bounds": (
        {
            "type": "array",
            "items": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
            "uniqueItems": True,
        },
        [[1], [2, 1]],
        [[2, 2], [3], [0]],
    ),
    "unique by their kinds": (
        {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "uniqueItems": True},
        [["a", 1], ["a"], []],
        [["a", 1, 2]],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_combined_patterns_and_bounds_are_enforced_exactly(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, name: str
) -> None:
    schema, values, others = EXACT[name]
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for value in (*values, *others):
        assert judge.is_valid(value) == (value in values), value
        assert takes(grammars, small_tokenizer, schema, json.dumps(value)) == (value in values), value


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ({"type": "string", "enum": [1]}, ["/properties/mail: ", '"enum": [1]']),
        (
            {"type": "string", "pattern": "^a{5}$", "maxLength": 2},
            ["/properties/mail: ", '"pattern": "^a{5}$"', '"maxLength": 2'],
        ),
        ({"type": "string", "format": "email", "pattern": "^(?!-)[0-9]+$"}, ["/properties/mail: ", '"email"']),
        (
            {
                "type": "array",
                "items": record(["no"], yes=STRING, no={**INTEGER, "minimum": 3, "maximum": 2}),
                "minItems": 1,
            },
            ["/properties/mail/items/properties/no: ", '"minimum": 3'],
        ),
        ({"anyOf": [{**INTEGER, "minimum": 3, "maximum": 2}, {"type": []}]}, ["/properties/mail"]),
        ({"$ref": "#/$defs/none"}, ["/properties/mail/properties/a: ", '"maxLength": 2']),
    ],
    ids=str,
)
def test_error_names_the_unsatisfiable_part_of_a_schema(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, member: Any, said: list[str]
) -> None:
    schema = record(["mail"], name=STRING, mail=member)
    schema["$defs"] = {"none": record(["a"], a={"type": "string", "minLength": 3, "maxLength": 2})}
    with pytest.raises(InvalidRequestError) as caught:
        structured(grammars, small_tokenizer, of_schema(schema))
    assert all(each in str(caught.value) for each in said), caught.value
    tool = {"function": {"name": "send", "parameters": schema}}
    with pytest.raises(InvalidRequestError, match="the parameters of send cannot be enforced") as caught:
        structured(grammars, small_tokenizer, RequestOptions(tools=[tool], tool_choice="required", thinking=False))
    assert all(each in str(caught.value) for each in said), caught.value


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ({"pattern": r"^(a)\1$"}, [r"/properties/mail/pattern", r"^(a)\1$", "a backreference"]),
        ({"pattern": "(?<=a)b"}, ["/properties/mail/pattern", "(?<=a)b", "a lookbehind"]),
        ({"pattern": "(a"}, ["/properties/mail/pattern", "(a", "unclosed group"]),
        ({"items": {"pattern": "^a(?=b)$"}}, ["/properties/mail/items/pattern", "^a(?=b)$", "matches no text"]),
        ({"patternProperties": {r"(a)\1": {}}}, ["/properties/mail/patternProperties", r"(a)\1", "a backreference"]),
        ({"type": "array", "uniqueItems": True}, ["/properties/mail/uniqueItems"]),
        ({"type": "array", "contains": {}, "maxContains": 3}, ["/properties/mail/maxContains"]),
        ({"not": {"multipleOf": 3}}, ["/properties/mail/not"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_tool", [False, True])
def test_error_names_tool_pointer_and_pattern(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, member: Any, said: list[str], is_tool: bool
) -> None:
    schema = {"type": "object", "properties": {"name": STRING, "mail": member}}
    options = of_schema(schema)
    if is_tool:
        tool = {"function": {"name": "send_email", "parameters": schema}}
        options, said = RequestOptions(tools=[WEATHER, tool], tool_choice="required"), [*said, "send_email"]
    with pytest.raises(InvalidRequestError) as refused:
        structured(grammars, small_tokenizer, options)
    assert all(each in str(refused.value) for each in said), str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"pattern": f"^(?!{'a' * n}).*$"} for n in range(1, 60)]},
        {"anyOf": [{"not": {"pattern": f"^{'a' * n}$"}} for n in range(1, 60)]},
    ],
    ids=["lookaheads", "negated"],
)
def test_schemas_with_many_automata_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError, match="would take too long to enforce"):
        grammar_part(Grammar("json_schema", json.dumps(schema)))


def test_extent_of_a_long_reference_chain_is_computed() -> None:
    definitions: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2_000)}
    schema = {"$defs": definitions | {"d2000": {}}, "$ref": "#/$defs/d0"}
    assert grammar_extent([{"json_schema": schema}]).extent.most == math.inf
