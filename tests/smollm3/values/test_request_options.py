"""The options are defined once, and other lists agree with the definition."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import (
    Engine,
    FixedPrefix,
    InvalidRequestError,
    QuoteSource,
    Replay,
    RequestOptions,
    SamplingParams,
)
from notso.web.engine.port import ChatEngine

GREEDY = SamplingParams(max_tokens=20, temperature=0)


def test_each_option_is_explained() -> None:
    assert RequestOptions.__doc__ is not None
    for each in fields(RequestOptions):
        assert f"{each.name}:" in RequestOptions.__doc__


def test_no_engine_lists_them_again() -> None:
    names = {each.name for each in fields(RequestOptions)}
    for engine in (Engine, ChatEngine, ScriptedEngine):
        for method in ("submit", "speculative_prefill", "render", "count_tokens", "estimate"):
            parameters = signature(getattr(engine, method)).parameters
            assert "options" in parameters and not set(parameters) & names, (engine, method)


def test_text_is_continued_as_it_is(demo_engine: Engine) -> None:
    text = "<|im_start|>The answer is 3 + 4 = "
    ids = demo_engine.tokenize(text)
    assert demo_engine.tokenizer.control_ids.isdisjoint(ids)
    assert demo_engine.detokenize(ids) == text
    said, expected = ("".join(event.text for event in demo_engine.generate(prompt, GREEDY)) for prompt in (text, ids))
    assert said.strip("\n") == expected.strip("\n") != ""
    usage = list(demo_engine.generate(text, GREEDY))[-2].usage
    assert usage is not None and usage.prompt_tokens == len(ids)


def test_text_that_goes_on_with_tags_shows_them(demo_engine: Engine) -> None:
    """Without a template there is no reasoning: all of the model's output is text."""
    bias = SamplingParams(
        max_tokens=3, temperature=0, logit_bias={demo_engine.tokenize("<think>", special=True)[0]: 100}
    )
    events = [event for event in demo_engine.generate("Well", bias) if event.text]
    assert {event.kind for event in events} == {"text"}
    assert "".join(event.text for event in events) == "<think>" * 3


def test_control_tokens_are_known_by_their_spelling_when_asked_for(demo_engine: Engine) -> None:
    text = "<|im_start|>user\nGrüße 🎉<|im_end|>"
    ids = demo_engine.tokenize(text, special=True)
    assert len(demo_engine.tokenizer.control_ids.intersection(ids)) == 2
    assert len(ids) < len(demo_engine.tokenize(text))
    assert demo_engine.detokenize(ids) == text
    assert demo_engine.tokenize("") == [] and demo_engine.detokenize([]) == ""


@pytest.mark.parametrize("ids", [[-1], [10**9], [1.5], ["x"]])
def test_what_is_no_token_is_refused(demo_engine: Engine, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        demo_engine.detokenize(ids)


def test_text_that_is_no_unicode_is_refused(demo_engine: Engine) -> None:
    for call in (demo_engine.tokenize, demo_engine.submit):
        with pytest.raises(InvalidRequestError):
            call("\ud800")


@pytest.mark.parametrize("value", ["2026-01-01", 20260101])
def test_a_date_is_a_date(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"date must be a datetime\.date") as error:
        RequestOptions(date=value)  # type: ignore[arg-type]
    assert error.value.param == "date"


@pytest.mark.parametrize(
    ("prefix", "rule"),
    [
        ({"scope": ""}, "scope is not empty; without a scope, use None"),
        ({"reading": ""}, "reading is not empty; without a reading, use None"),
        ({"scope": 5}, "scope is None or text in valid Unicode"),
        ({"reading": "\ud800"}, "reading is None or text in valid Unicode"),
        ({"characters": -1}, "characters is a whole number, 0 or more"),
    ],
)
def test_a_wrong_prefix_is_explained(prefix: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        FixedPrefix(**{"message": 0, "characters": 1} | prefix)
    assert str(error.value) == f"prefix must be a FixedPrefix in which {rule}" and error.value.param == "prefix"


def test_numbers_below_0_and_what_is_no_text_are_explained() -> None:
    with pytest.raises(InvalidRequestError, match="ids is a tuple of whole numbers, 0 or more"):
        Replay((-1,))
    with pytest.raises(InvalidRequestError, match="name is text in valid Unicode"):
        QuoteSource("x", 5)  # type: ignore[arg-type]
