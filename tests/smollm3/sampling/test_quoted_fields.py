"""Extraction with x-quote-of: values are parts of their document, or the declared empty value."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from notso.smollm3 import Engine, Grammar, InvalidRequestError, Message, QuoteSource, RequestOptions, SamplingParams
from notso.smollm3.sampling.quoted_fields import QuotableSchema, quoted_fields
from notso.smollm3.sampling.quotes import QuoteManager

INVOICES = 200
FIELDS: dict[str, Any] = {
    "number": {"type": "string", "x-quote-of": "invoice", "maxLength": 12},
    "customer": {"type": "string", "x-quote-of": "invoice", "maxLength": 30},
    "note": {"type": ["string", "null"], "x-quote-of": "invoice"},
    "discount": {"type": "string", "x-quote-of": "empty", "default": ""},
    "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 2, "maxItems": 2},
    "total": {"type": "integer"},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": FIELDS,
    "required": [*FIELDS],
    "additionalProperties": False,
    "$defs": {"part": {"type": "string", "x-quote-of": "invoice", "maxLength": 20}},
}
QUOTE: dict[str, Any] = {"type": "string", "x-quote-of": "invoice"}


def invoice(rng: random.Random) -> str:
    word = lambda: "".join(rng.choices("abcdefghijkläößé", k=rng.randint(2, 7)))  # noqa: E731
    lines = [f'Invoice "{rng.randint(1000, 9999)}-{rng.choice("AB")}" \\ of {rng.randint(1, 28)}.3.2026']
    lines += [f"Customer:\t{word().title()} & {word().title()}, 東京都港区{rng.randint(1, 9)}丁目"]
    lines += [f"{rng.randint(1, 9)} x {word()} {word()} {rng.randint(1, 99)},50" for _ in range(rng.randint(1, 4))]
    return "\n".join(lines)


def extract(engine: Engine, text: str, seed: int, schema: dict[str, Any] = SCHEMA) -> Any:
    sources = (QuoteSource("Nothing of the other document may be quoted", "other"), QuoteSource(text, "invoice"))
    grammar = Grammar("json_schema", json.dumps(schema))
    options = RequestOptions(thinking=False, grammar=grammar, sources=(*sources, QuoteSource("", "empty")))
    params = SamplingParams(max_tokens=1500, temperature=[0.0, 0.8, 1.5][seed % 3], seed=seed)
    answer = engine.submit([Message("user", "Extract.")], params, options).result()
    assert answer.finish_reason == "stop", answer.text
    return json.loads(answer.text)


def check(engine: Engine, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for at in range(count):
        text = invoice(rng)
        found = extract(engine, text, at)
        for name, limit in (("number", 12), ("customer", 30)):
            assert found[name] and found[name] in text and len(found[name]) <= limit
        assert found["note"] is None or (found["note"] and found["note"] in text)
        assert found["discount"] == ""
        assert len(found["parts"]) == 2 and all(each and each in text and len(each) <= 20 for each in found["parts"])


def test_quoted_values_are_parts_of_their_document(demo_engine: Engine) -> None:
    check(demo_engine, 8, 1)


@pytest.mark.long("quotes")
def test_many_quoted_values_are_parts_of_their_document(demo_engine: Engine) -> None:
    check(demo_engine, INVOICES, 2)


def test_quote_of_no_characters_is_empty(demo_engine: Engine) -> None:
    field = {"type": "string", "x-quote-of": "invoice", "maxLength": 0}
    schema = {"type": "object", "properties": {"a": field}, "required": ["a"], "additionalProperties": False}
    assert extract(demo_engine, "one two three", 1, schema) == {"a": ""}


@pytest.mark.parametrize("most", [2**31 - 1, 2**31, 10**30])
def test_quote_may_have_any_maximum_length(demo_engine: Engine, most: int) -> None:
    schema = {"type": "string", "x-quote-of": "text", "maxLength": most}
    source = "The quick brown fox jumps over the lazy dog."
    options = RequestOptions(grammar=Grammar("json_schema", json.dumps(schema)), sources=(QuoteSource(source, "text"),))
    tokenizer = demo_engine.tokenizer
    _, fields = quoted_fields(options, QuoteManager(tokenizer))
    assert fields is not None
    fields.consume(b'"')
    fields.consume(b"quick ")
    allowed = fields.narrow(np.ones(tokenizer.vocab_size, np.bool_), np.zeros(tokenizer.vocab_size, np.float32))
    assert any(tokenizer.token_bytes(token).startswith(b"b") for token in np.flatnonzero(allowed))


def indexes(engine: Engine, source: str, lengths: list[int]) -> int:
    items = [QUOTE, *({**QUOTE, "maxLength": each} for each in lengths)]
    grammar = Grammar("json_schema", json.dumps({"type": "array", "prefixItems": items}))
    quotes = QuoteManager(engine.tokenizer)
    quoted_fields(RequestOptions(grammar=grammar, sources=(QuoteSource(source, "invoice"),)), quotes)
    return len(quotes._indexes)


def test_number_of_indexes_is_limited(demo_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five " * 50
    assert indexes(demo_engine, text, [12, 12, 15]) == 3
    assert indexes(demo_engine, text, [len(text), 1024, 10**30]) == 1
    assert indexes(demo_engine, text[:90], [90, 100, 110]) == 1
    monkeypatch.setattr("notso.smollm3.sampling.quoted_fields.CACHED_BYTES", 60_000)
    assert indexes(demo_engine, text, list(range(1, 12))) == 12
    with pytest.raises(InvalidRequestError, match="too many different values of maxLength"):
        indexes(demo_engine, text, list(range(1, 13)))
    with pytest.raises(InvalidRequestError, match="too many different values of maxLength"):
        indexes(demo_engine, text.replace("e", "é"), list(range(1, 12)))  # the same characters, but more bytes


@pytest.mark.parametrize(
    "field, said",
    [
        ({"type": "string", "x-quote-of": "letter"}, "does not name a document; available: other, invoice, empty"),
        ({"type": "integer", "x-quote-of": "invoice"}, "requires"),
        ({"type": [{}], "x-quote-of": "invoice"}, "requires"),
        ({"type": "string", "x-quote-of": "invoice", "pattern": "a"}, "cannot be combined with pattern"),
        ({"type": "string", "x-quote-of": "invoice", "maxLength": -1}, "whole number"),
    ],
)
def test_invalid_quote_fields_are_refused(demo_engine: Engine, field: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        extract(demo_engine, "one two three", 1, {"type": "object", "properties": {"a": field}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"^a": {"$ref": "#/$defs/a b"}}, "$defs": {"a b": QUOTE}},
        {"type": "object", "properties": {"a": {"const": 1}}, "dependentSchemas": {"a": {"properties": {"b": QUOTE}}}},
        {"type": "array", "contains": QUOTE},
        {"type": "object", "patternProperties": {"^a": {"type": "string"}}, "additionalProperties": QUOTE},
    ],
)
def test_quote_fields_that_cannot_be_enforced_are_refused(demo_engine: Engine, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="x-quote-of is not supported in"):
        extract(demo_engine, "one two three", 1, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": [QUOTE], "minItems": 1, "maxItems": 1},
        {"type": "array", "items": [{"const": "two"}], "additionalItems": QUOTE, "minItems": 2, "maxItems": 2},
        {"type": "array", "items": {"$ref": "#/$defs/a%20b"}, "minItems": 1, "maxItems": 1, "$defs": {"a b": QUOTE}},
        {"type": "array", "items": QUOTE, "minItems": 1, "maxItems": 1, "then": {"allOf": 5}},
        {
            "type": "array",
            "items": {"$ref": "#/$defs/a/prefixItems/0"},
            "minItems": 1,
            "maxItems": 1,
            "$defs": {"a": {"prefixItems": [QUOTE]}},
        },
    ],
)
def test_quote_fields_are_found_wherever_they_apply(demo_engine: Engine, schema: dict[str, Any]) -> None:
    found = extract(demo_engine, "one two three", 1, schema)
    assert found[-1] in "one two three"


def test_data_that_looks_like_a_quote_field_is_kept(demo_engine: Engine) -> None:
    data = {"x-quote-of": "invoice", "maxLength": 3}
    schema = {
        "type": "array",
        "prefixItems": [QUOTE, {"const": data}, {"enum": [[data]]}],
        "minItems": 3,
        "maxItems": 3,
    }
    found = extract(demo_engine, "one two three", 1, schema)
    assert found[0] in "one two three" and found[1:] == [data, [data]]


def test_each_subschema_of_a_value_is_visited_once() -> None:
    definitions: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    schema = QuotableSchema({"$ref": "#/$defs/a0", "$defs": {**definitions, "a40": QUOTE}})
    assert len(schema.parts_at(())) <= 1 + 3 * 41


def test_quote_fields_in_too_deep_schemas_are_refused(demo_engine: Engine) -> None:
    options = RequestOptions(grammar=Grammar("json_schema", '{"items": ' * 5000 + json.dumps(QUOTE) + "}" * 5000))
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        quoted_fields(options, QuoteManager(demo_engine.tokenizer))


@pytest.mark.parametrize("words", ["The quick bro", 'a \\"b', "", "none"])
def test_continued_field_is_a_part_of_its_document(demo_engine: Engine, words: str) -> None:
    source = 'The quick brown fox jumps over the lazy dog. It is a "b", not a "c".'
    field = {"type": "string", "x-quote-of": "text"}
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": field}, "required": ["a", "b"]}
    options = RequestOptions(
        thinking=False,
        continue_last=True,
        grammar=Grammar("json_schema", json.dumps(schema)),
        sources=(QuoteSource(source, "text"),),
    )
    started = f'{{"a": "x\\"y", "b": "{words}'
    messages = [Message("user", "Extract."), Message("assistant", started)]
    if words == "none":
        with pytest.raises(InvalidRequestError, match="does not match the documents"):
            demo_engine.submit(messages, SamplingParams(max_tokens=200), options)
        return
    for seed in range(4):
        answer = demo_engine.submit(messages, SamplingParams(max_tokens=200, temperature=1.5, seed=seed), options)
        assert json.loads(started + answer.result().text)["b"] in source


def test_quote_can_be_escaped_by_two_tokens(demo_engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "x-quote-of": "text"}}}
    options = RequestOptions(
        grammar=Grammar("json_schema", json.dumps(schema)), sources=(QuoteSource('say "hello" now', "text"),)
    )
    tokenizer = demo_engine.tokenizer
    _, fields = quoted_fields(options, QuoteManager(tokenizer))
    assert fields is not None
    for text in (b'{"', b"a", b'": "', b"say ", b"\\", b'"'):
        fields.consume(text)
    every = np.ones(tokenizer.vocab_size, np.bool_)
    allowed = np.flatnonzero(fields.narrow(every, np.zeros(tokenizer.vocab_size, np.float32)))
    assert any(tokenizer.token_bytes(token).startswith(b"h") for token in allowed)
