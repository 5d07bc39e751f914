"""Values sent between a front end and its engine are equal after the round trip, whatever they contain."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from datetime import date
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import is_long

import notso.smollm3 as model
from notso.smollm3 import (
    AdapterInfo,
    ContextLengthError,
    EngineError,
    EngineStats,
    Event,
    EventKind,
    FinishReason,
    FixedPrefix,
    Grammar,
    GrammarKind,
    InvalidRequestError,
    MemoryBudget,
    Message,
    ModelError,
    ModelFileError,
    ModelInfo,
    NotsoError,
    OutOfMemoryError,
    Progress,
    PromptEstimate,
    PromptInput,
    QuoteSource,
    Replay,
    RequestOptions,
    Role,
    SamplingParams,
    Sentence,
    TokenLogprob,
    ToolCall,
    ToolName,
    Usage,
)
from notso.web.engine.port import ChatEngine, Request
from notso.web.engine.remote.engine_link import About
from notso.web.engine.remote.wire_values import (
    ERRORS,
    METHODS,
    error_from_wire,
    error_to_wire,
    from_wire,
    method_types,
    to_wire,
)
from notso.web.values.errors import EngineUnavailableError, StorageError

WHOLE = st.integers(-(2**63), 2**64)
NUMBER = st.one_of(st.floats(allow_nan=False), st.integers(-5, 5))
TEXT = st.one_of(st.text(max_size=8), st.sampled_from(["\ud800", "\u2028\x00", "NaN", ""]))
COUNT = st.integers(0, 2**31)
NAME = st.text(min_size=1, max_size=5)
SHARE = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0, 1]))
ABOVE_0 = st.one_of(st.floats(0.01, 1.0), st.just(1))
JSON = st.one_of(st.none(), st.booleans(), WHOLE, NUMBER, TEXT)
TOOL = st.dictionaries(
    TEXT, st.one_of(JSON, st.lists(JSON, max_size=2), st.dictionaries(TEXT, JSON, max_size=2)), max_size=3
)


def words(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(literal))


def tuples(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(item, max_size=3).map(tuple)


def maybe(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), item)


CALL = st.builds(ToolCall, TEXT, TEXT, TEXT)
MESSAGE = st.builds(Message, words(Role), TEXT, maybe(TEXT), tuples(CALL), maybe(TEXT), st.booleans())
PREFIX = st.builds(FixedPrefix, COUNT, COUNT, maybe(NAME), maybe(NAME))
REPLAY = st.builds(Replay, tuples(COUNT), tuples(COUNT), TEXT)
SOURCE = st.builds(QuoteSource, NAME, NAME)
GRAMMAR = st.builds(Grammar, words(GrammarKind), TEXT)
LOGPROB: st.SearchStrategy[TokenLogprob] = st.deferred(
    lambda: st.builds(
        TokenLogprob, TEXT, tuples(st.integers(0, 255)), NUMBER, st.one_of(st.just(()), tuples(LOGPROB)), WHOLE
    )
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": maybe(st.integers(5, 2**31)),
        "thinking_budget": maybe(COUNT),
        "temperature": st.one_of(st.floats(0.0, 2.0), st.integers(0, 2)),
        "top_p": ABOVE_0,
        "min_p": SHARE,
        "top_k": COUNT,
        "repetition_penalty": ABOVE_0,
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "penalty_window": COUNT,
        "seed": maybe(st.integers(-(2**63), 2**64 - 1)),
        "logit_bias": st.dictionaries(COUNT, st.floats(-100, 100), max_size=3),
        "stop": tuples(st.text(min_size=1, max_size=5)),
        "stop_token_ids": tuples(COUNT),
        "min_tokens": st.integers(0, 5),
        "ignore_eos": st.booleans(),
        "typical_p": ABOVE_0,
        "xtc_probability": SHARE,
        "xtc_threshold": SHARE,
        "dry_multiplier": st.floats(0, 100),
        "dry_base": st.floats(1, 100),
        "dry_allowed_length": COUNT,
        "dry_penalty_last_n": st.integers(-1, 99),
        "dry_sequence_breakers": tuples(st.text(min_size=1, max_size=5)),
    },
).map(lambda fields: SamplingParams(**fields))
UNICODE = st.text(max_size=5)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "thinking": st.booleans(),
        "tools": maybe(st.lists(TOOL, max_size=2)),
        "tool_choice": st.one_of(st.sampled_from(["auto", "none", "required"]), st.builds(ToolName, TEXT)),
        "parallel_tool_calls": st.booleans(),
        "strict_tools": tuples(TEXT),
        "grammar": maybe(GRAMMAR),
        "prefix": maybe(PREFIX),
        "sources": tuples(SOURCE),
        "top_logprobs": maybe(st.integers(0, 20)),
        "prompt_logprobs": maybe(st.integers(0, 20)),
        "prompt_only": st.booleans(),
        "is_plain": st.booleans(),
        "date": maybe(st.dates()),
        "priority": st.sampled_from(["interactive", "api", "background"]),
        "owner": UNICODE,
        "conversation": maybe(UNICODE),
        "continue_last": st.booleans(),
        "when_full": st.sampled_from(["stop", "drop_oldest"]),
        "adapter": maybe(TEXT),
        "logits_processors": tuples(TEXT),
    },
).map(lambda fields: RequestOptions(**fields))
USAGE = st.builds(Usage, WHOLE, WHOLE, WHOLE, WHOLE, NUMBER, NUMBER, NUMBER, WHOLE, WHOLE)
PROGRESS = st.builds(Progress, WHOLE, WHOLE, WHOLE, NUMBER)
EVENT = st.builds(
    Event,
    words(EventKind),
    text=TEXT,
    tool_call=maybe(CALL),
    begun_call=maybe(CALL),
    usage=maybe(USAGE),
    finish_reason=maybe(words(FinishReason)),
    place=WHOLE,
    dropped_messages=WHOLE,
    progress=maybe(PROGRESS),
    tokens=WHOLE,
    logprobs=tuples(LOGPROB),
    stop=maybe(TEXT),
)
BUDGET = st.builds(MemoryBudget, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, TEXT)
INFO = st.builds(
    ModelInfo,
    *(TEXT, TEXT, st.booleans(), WHOLE, WHOLE, WHOLE),
    quantization=st.dictionaries(TEXT, WHOLE, max_size=3),
    device=TEXT,
    threads=WHOLE,
    layers_without_rope=tuples(WHOLE),
    memory=maybe(BUDGET),
)
ADAPTER = st.builds(AdapterInfo, TEXT, TEXT, NUMBER, WHOLE, WHOLE, WHOLE)
STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    ToolCall: CALL,
    Message: MESSAGE,
    SamplingParams: PARAMS,
    RequestOptions: OPTIONS,
    FixedPrefix: PREFIX,
    Replay: REPLAY,
    QuoteSource: SOURCE,
    Grammar: GRAMMAR,
    TokenLogprob: LOGPROB,
    Usage: USAGE,
    Progress: PROGRESS,
    Event: EVENT,
    MemoryBudget: BUDGET,
    ModelInfo: INFO,
    AdapterInfo: ADAPTER,
    ToolName: st.builds(ToolName, TEXT),
    PromptEstimate: st.builds(PromptEstimate, WHOLE, WHOLE, maybe(NUMBER)),
    EngineStats: st.builds(EngineStats, WHOLE, WHOLE, prefill_tokens_per_s=NUMBER, weight_placement=TEXT),
    Request: st.builds(Request, tuples(MESSAGE), PARAMS, OPTIONS, maybe(TEXT)),
    About: st.builds(About, TEXT, TEXT, maybe(INFO), st.dictionaries(TEXT, ADAPTER, max_size=2)),
}


def crossed(value: Any) -> Any:
    return json.loads(json.dumps(to_wire(value)).encode())


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
@settings(max_examples=40 if is_long("server") else 12, deadline=None)
@given(data=st.data())
def test_value_round_trip_preserves_equality_and_types(kind: type, data: st.DataObject) -> None:
    value = data.draw(STRATEGIES[kind])
    back = from_wire(kind, crossed(value))
    assert back == value and repr(back) == repr(value), "a number must keep its type"


@settings(max_examples=40, deadline=None)
@given(value=st.one_of(TEXT, st.lists(WHOLE), st.lists(MESSAGE, max_size=3)))
def test_prompt_input_round_trips_unchanged(value: PromptInput) -> None:
    assert from_wire(PromptInput, crossed(value)) == value


def test_every_public_dataclass_is_covered_or_excluded() -> None:
    stay_here = {"AdapterSource", "DownloadPlan", "EngineConfig", "KnownFile", "LocalModel", "OnPage", "Parameter"}
    stay_here |= {"ProcessMemory", "StoredReading"}
    there = {name for name in model.__all__ if is_dataclass(getattr(model, name))}
    assert there - stay_here == {kind.__name__ for kind in STRATEGIES} - {"About", "Request"}


def test_nan_logprob_of_first_token_round_trips() -> None:
    back = from_wire(Event, crossed(Event("prompt", logprobs=(TokenLogprob("a", (97,), math.nan),))))
    assert math.isnan(back.logprobs[0].logprob)


def test_default_field_values_are_omitted() -> None:
    assert to_wire(Event("text", text="word", tokens=3)) == {"kind": "text", "text": "word", "tokens": 3}
    assert to_wire(SamplingParams()) == to_wire(RequestOptions()) == {}
    assert to_wire(replace(SamplingParams(), top_p=1)) == {"top_p": 1}


class DeviceDiedError(EngineError):
    """An error type that the other end does not know."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("no", param="top_p"), InvalidRequestError),
        (InvalidRequestError("no"), InvalidRequestError),
        (ContextLengthError(9000, 8192, at_least=True), ContextLengthError),
        (OutOfMemoryError("no", needed_bytes=9, available_bytes=8), OutOfMemoryError),
        (DeviceDiedError("line\nbreak" + "x" * 999), EngineError),
        (ModelFileError("no"), ModelFileError),
        (EngineUnavailableError("no"), EngineUnavailableError),
        (EngineError(Sentence("9 are waiting", "engine_many_waiting", limit=9)), EngineError),
        (StorageError("elsewhere"), NotsoError),
    ],
)
def test_error_round_trips_as_same_or_nearest_known_type(error: NotsoError, kind: type) -> None:
    for back in (
        error_from_wire(json.loads(json.dumps(error_to_wire(error)))),
        from_wire(Event, crossed(Event("error", error=error))).error,
    ):
        assert type(back) is kind and str(back) == str(error)
        assert vars(back) == vars(error)
        ways = [(getattr(each.sentence, "code", ""), getattr(each.sentence, "values", {})) for each in (back, error)]
        assert ways[0] == ways[1]


def test_every_public_error_type_is_registered() -> None:
    there = {each for name in model.__all__ if inspect.isclass(each := getattr(model, name))}
    assert {each for each in there if issubclass(each, NotsoError)} == {*ERRORS.values()} - {EngineUnavailableError}
    assert ModelError in there


WRONG: list[tuple[Any, Any]] = [
    (Event, {"kind": "said"}),
    (Event, {"text": "no kind"}),
    (Event, {"kind": "text", "colour": 1}),
    (Event, {"kind": "text", "text": 1}),
    (Event, {"kind": "text", "tokens": True}),
    (Event, ["text"]),
    (Message, {"role": "user", "content": None}),
    (Message, {"role": "root", "content": ""}),
    (RequestOptions, {"date": "tomorrow"}),
    (RequestOptions, {"grammar": "json_object"}),
    (RequestOptions, {"grammar": {"kind": "poem"}}),
    (RequestOptions, {"tools": {}}),
    (SamplingParams, {"logit_bias": {"x": 1}}),
    (SamplingParams, {"temperature": 3}),
    (SamplingParams, {"stop": "word"}),
    (PromptInput, {"role": "user"}),
    (PromptInput, [1, "a"]),
    (PromptInput, None),
    (EngineError, {"kinds": [["EngineError"]], "message": "no", "code": "x", "values": []}),
]


def test_unknown_and_malformed_kinds_of_errors_are_skipped() -> None:
    assert type(error_from_wire({"kinds": [[], {}, "Unknown", "ModelError"], "message": "no"})) is ModelError


@pytest.mark.parametrize("name", ["cls", "english", "code", "self"])
def test_values_of_an_error_can_have_any_name(name: str) -> None:
    restored = error_from_wire({"kinds": ["EngineError"], "message": "no", "code": "x", "values": {name: 1}})
    assert error_to_wire(restored)["values"] == {name: 1}


@pytest.mark.parametrize(("hint", "given_value"), WRONG)
def test_invalid_packed_value_is_rejected(hint: Any, given_value: Any) -> None:
    with pytest.raises(ValueError):
        from_wire(hint, given_value)


def test_unsupported_type_is_named_in_error() -> None:
    with pytest.raises(InvalidRequestError, match="complex"):
        to_wire([1j])


def test_call_types_follow_engine_protocol() -> None:
    for name in METHODS:
        assert callable(getattr(ChatEngine, name))
    asked: Sequence[Message] = (Message("user", "x"),)
    options = RequestOptions(date=date(2025, 7, 8))
    types = method_types("estimate")
    given_json = json.loads(json.dumps(types.pack(asked, options)))
    assert types.unpack(given_json) == {"messages": list(asked), "options": options}
    assert types.unpack_result(crossed(PromptEstimate(3, 2, None))) == PromptEstimate(3, 2, None)
    for wrong in ({"messages": [], "colour": 1}, [], {"messages": "text"}):
        with pytest.raises(ValueError):
            types.unpack(wrong)
