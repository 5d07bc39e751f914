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


def test_every_option_is_documented() -> None:
    assert RequestOptions.__doc__ is not None
    for each in fields(RequestOptions):
        assert f"{each.name}:" in RequestOptions.__doc__


def test_engine_methods_do_not_repeat_request_options() -> None:
    names = {each.name for each in fields(RequestOptions)}
    for engine in (Engine, ChatEngine, ScriptedEngine):
        for method in ("submit", "speculative_prefill", "render", "count_tokens", "estimate"):
            parameters = signature(getattr(engine, method)).parameters
            assert "options" in parameters and not set(parameters) & names, (engine, method)


def test_text_prompt_is_continued_without_a_template(demo_engine: Engine) -> None:
    text = "<|im_start|>The answer is 3 + 4 = "
    ids = demo_engine.tokenize(text)
    assert demo_engine.tokenizer.control_ids.isdisjoint(ids)
    assert demo_engine.detokenize(ids) == text
    said, expected = ("".join(event.text for event in demo_engine.generate(prompt, GREEDY)) for prompt in (text, ids))
    assert said.strip("\n") == expected.strip("\n") != ""
    usage = list(demo_engine.generate(text, GREEDY))[-2].usage
    assert usage is not None and usage.prompt_tokens == len(ids)


def test_text_continuation_shows_think_tags_as_text(demo_engine: Engine) -> None:
    """Without a template there is no reasoning: all of the model's output is text."""
    bias = SamplingParams(
        max_tokens=3, temperature=0, logit_bias={demo_engine.tokenize("<think>", special=True)[0]: 100}
    )
    events = [event for event in demo_engine.generate("Well", bias) if event.text]
    assert {event.kind for event in events} == {"text"}
    assert "".join(event.text for event in events) == "<think>" * 3


def test_tokenize_with_special_recognizes_control_tokens(demo_engine: Engine) -> None:
    text = "<|im_start|>user\nGrüße 🎉<|im_end|>"
    ids = demo_engine.tokenize(text, special=True)
    assert len(demo_engine.tokenizer.control_ids.intersection(ids)) == 2
    assert len(ids) < len(demo_engine.tokenize(text))
    assert demo_engine.detokenize(ids) == text
    assert demo_engine.tokenize("") == [] and demo_engine.detokenize([]) == ""


@pytest.mark.parametrize("ids", [[-1], [10**9], [1.5], ["x"]])
def test_detokenize_refuses_invalid_ids(demo_engine: Engine, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        demo_engine.detokenize(ids)


def test_invalid_unicode_is_refused(demo_engine: Engine) -> None:
    for call in (demo_engine.tokenize, demo_engine.submit):
        with pytest.raises(InvalidRequestError):
            call("\ud800")


@pytest.mark.parametrize("value", ["2026-01-01", 20260101])
def test_date_option_must_be_a_date(value: object) -> None:
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
def test_invalid_fixed_prefix_error_names_the_rule(prefix: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        FixedPrefix(**{"message": 0, "characters": 1} | prefix)
    assert str(error.value) == f"prefix must be a FixedPrefix in which {rule}" and error.value.param == "prefix"


def test_invalid_replay_and_quote_source_values_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="ids is a tuple of whole numbers, 0 or more"):
        Replay((-1,))
    with pytest.raises(InvalidRequestError, match="name is text in valid Unicode"):
        QuoteSource("x", 5)  # type: ignore[arg-type]
