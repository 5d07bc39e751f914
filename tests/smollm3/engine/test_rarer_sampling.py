"""Less common sampling and stop parameters in the engine: alone, concurrently, with drafts, and with grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from notso.smollm3 import Engine, Event, Grammar, InvalidRequestError, Message, RequestOptions, SamplingParams

ASK = [Message("user", "Write the same line again and again.")]
PLAIN = RequestOptions(thinking=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(threads=1) as loaded:
        yield loaded


def answered(engine: Engine, params: SamplingParams, options: RequestOptions = PLAIN, ask: Any = ASK) -> list[Event]:
    return list(engine.generate(ask, params, options))


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if event.kind == "text")


def written(events: list[Event]) -> tuple[str, int, str | None]:
    usage = next(event.usage for event in events if event.usage is not None)
    return text_of(events), usage.completion_tokens, events[-1].finish_reason


REPEATING = "one two three four one two three four one two three four one two"
CHOSEN: list[dict[str, Any]] = [
    {"temperature": 2.0, "top_p": 1.0, "xtc_probability": 0.7, "xtc_threshold": 0.01},
    {"temperature": 2.0, "top_p": 1.0, "typical_p": 0.6},
    {"temperature": 0.0, "ignore_eos": True, "dry_multiplier": 50.0, "dry_allowed_length": 1},
    {"temperature": 1.5, "dry_multiplier": 2.0, "xtc_probability": 0.5, "typical_p": 0.8, "min_p": 0.02},
]
USUAL = ("temperature", "top_p", "ignore_eos")


@pytest.mark.parametrize("options", CHOSEN, ids=lambda options: "+".join(options))
def test_seeded_answer_is_the_same_alone_and_concurrently(engine: Engine, options: dict[str, Any]) -> None:
    params = SamplingParams(**options, seed=4, max_tokens=40)
    alone = text_of(answered(engine, params, RequestOptions(), REPEATING))
    plain = {name: value for name, value in options.items() if name in USUAL}
    usual = SamplingParams(**plain, seed=4, max_tokens=40)
    assert alone != text_of(answered(engine, usual, RequestOptions(), REPEATING))
    company = [engine.submit(ASK, SamplingParams(seed=seed, max_tokens=60), PLAIN) for seed in range(5)]
    among = engine.submit(REPEATING, params)
    assert text_of(list(among.events())) == alone
    for generation in company:
        generation.stop()


@pytest.mark.parametrize("options", CHOSEN, ids=lambda options: "+".join(options))
def test_speculation_does_not_change_the_answer(engine: Engine, options: dict[str, Any]) -> None:
    params = SamplingParams(**options, seed=9, max_tokens=60)
    with Engine.load(threads=1, speculation=False) as careful:
        expected = written(answered(careful, params, RequestOptions(), REPEATING))
    found = answered(engine, params, RequestOptions(), REPEATING)
    assert written(found) == expected


def test_min_tokens_and_ignore_eos_delay_the_end(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=200)
    _, count, reason = written(answered(engine, greedy))
    assert reason == "stop"
    longer = SamplingParams(temperature=0, max_tokens=200, min_tokens=count + 5)
    assert written(answered(engine, longer))[1] >= count + 5
    endless = SamplingParams(temperature=0, max_tokens=count + 30, ignore_eos=True)
    assert written(answered(engine, endless))[1:] == (count + 30, "length")


def test_stop_token_id_ends_the_answer(engine: Engine) -> None:
    events = answered(
        engine, SamplingParams(temperature=0, max_tokens=50), RequestOptions(thinking=False, top_logprobs=0)
    )
    tokens = [entry for event in events for entry in event.logprobs]
    third = engine.tokenize(tokens[3].text)[0]
    before = [entry.text for entry in tokens].index(tokens[3].text)
    stopped = answered(engine, SamplingParams(temperature=0, max_tokens=50, stop_token_ids=(third,)))
    assert written(stopped) == ("".join(entry.text for entry in tokens[:before]), before + 1, "stop")
    later = answered(engine, SamplingParams(temperature=0, max_tokens=50, stop_token_ids=(third,), min_tokens=10))
    assert written(later)[1] > 9


def test_stop_strings_are_ignored_before_min_tokens(engine: Engine) -> None:
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    whole = text_of(answered(engine, SamplingParams(**params)))
    letter = whole.strip()[0]
    assert text_of(answered(engine, SamplingParams(**params, stop=(letter,)))).strip() == ""
    assert letter in text_of(answered(engine, SamplingParams(**params, stop=(letter,), min_tokens=20)))


def test_grammar_holds_with_rare_sampling_parameters(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    grammar = Grammar("json_schema", json.dumps(schema | {"additionalProperties": False}))
    for seed in range(5):
        params = SamplingParams(
            seed=seed, xtc_probability=1.0, xtc_threshold=0.0, typical_p=0.5, dry_multiplier=10, max_tokens=100
        )
        text = text_of(answered(engine, params, RequestOptions(thinking=False, grammar=grammar)))
        assert json.loads(text)["a"] in ("x", "y")


def test_logprobs_ignore_sampling_parameters(engine: Engine) -> None:
    options = RequestOptions(thinking=False, top_logprobs=0)
    params = SamplingParams(temperature=0, max_tokens=1, dry_multiplier=1, min_tokens=1, ignore_eos=True)
    (entry,) = (entry for event in answered(engine, params, options) for entry in event.logprobs)
    (plain,) = (
        entry
        for event in answered(engine, SamplingParams(temperature=0, max_tokens=1), options)
        for entry in event.logprobs
    )
    assert entry == plain


@pytest.mark.parametrize(
    ("params", "param"),
    [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 3}, "min_tokens")],
)
def test_grammar_rejects_ignore_eos_and_min_tokens(engine: Engine, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(ASK, SamplingParams(**params), RequestOptions(grammar=Grammar("json_object")))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "params",
    [
        {"typical_p": 0},
        {"typical_p": 1.1},
        {"xtc_probability": -0.1},
        {"xtc_threshold": 2},
        {"dry_multiplier": -1},
        {"dry_base": 0.5},
        {"dry_allowed_length": -1},
        {"dry_penalty_last_n": -2},
        {"dry_sequence_breakers": "x"},
        {"dry_sequence_breakers": ("",)},
        {"dry_sequence_breakers": ("x",) * 33},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"ignore_eos": 1},
        {"stop_token_ids": 5},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (1,) * 65},
    ],
    ids=str,
)
def test_out_of_range_sampling_parameter_is_rejected_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param == next(iter(params))


def test_stop_token_id_outside_the_vocabulary_is_rejected(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids must be below"):
        engine.submit(ASK, SamplingParams(stop_token_ids=(10**6,)), PLAIN)
