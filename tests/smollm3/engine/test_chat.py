"""Complete answers: conversations in all forms, truncated and failed answers, batches, and plain text."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from notso.smollm3 import (
    AnswerSettings,
    Completion,
    Engine,
    EngineError,
    Generation,
    InvalidRequestError,
    Message,
    RequestOptions,
    SamplingParams,
    ToolCall,
    UnknownOptionError,
)
from notso.smollm3.values.chat_input import conversation
from notso.smollm3.values.events import Event, Usage

SUM = "What is 27 + 48?"
GREEDY = SamplingParams(temperature=0, max_tokens=300)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load() as loaded:
        yield loaded


def told(events: list[Event], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def test_chat_result_matches_streamed_events(engine: Engine) -> None:
    events = list(engine.generate([Message("user", SUM)], GREEDY))
    answer = engine.chat(SUM, params=GREEDY)
    assert (answer.text, answer.reasoning) == (told(events, "text"), told(events, "reasoning"))
    assert "75" in answer.text and answer.reasoning and str(answer) == answer.text
    assert answer.finish_reason == "stop" and not answer.is_cut and answer.tool_calls == ()
    usage = next(event.usage for event in events if event.usage is not None)
    assert answer.usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    assert answer.message == Message("assistant", answer.text, answer.reasoning)


@pytest.mark.parametrize(
    "asked",
    [
        SUM,
        Message("user", SUM),
        [Message("user", SUM)],
        (Message("user", SUM),),
        {"role": "user", "content": SUM},
        [{"role": "user", "content": SUM, "name": "ann"}],
        [{"role": "user", "content": [{"type": "text", "text": SUM[:5]}, {"type": "text", "text": SUM[5:]}]}],
    ],
)
def test_chat_accepts_every_form_of_a_question(engine: Engine, asked: Any) -> None:
    answer = engine.chat(asked, temperature=0, max_tokens=300, thinking=False)
    assert answer.text == engine.chat(messages=SUM, params=GREEDY, options=RequestOptions(thinking=False)).text


def test_chat_accepts_messages_as_arguments_or_dicts(engine: Engine) -> None:
    turns = [Message("user", "Hello"), Message("assistant", "Hi"), Message("user", SUM)]
    assert conversation(*turns) == turns
    by_name = [{"role": each.role, "content": each.content} for each in turns]
    assert engine.chat(*turns, params=GREEDY).text == engine.chat(by_name, params=GREEDY).text


def test_openai_messages_are_converted() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = conversation(
        [
            {"role": "developer", "content": "Be brief"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so", "refusal": None},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]
    )
    calls = (ToolCall("1", "f", '{"a": 1}'),)
    assert found == [
        Message("system", "Be brief"),
        Message("assistant", "", "so", calls),
        Message("tool", "2", tool_call_id="1"),
    ]


def test_tool_calls_are_in_the_answer(engine: Engine) -> None:
    answer = engine.chat(
        "What is the weather in Paris?", params=GREEDY, tools=[WEATHER], tool_choice="required", thinking=False
    )
    assert [call.name for call in answer.tool_calls] == ["get_weather"] and answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (None, "messages"),
        (5, "messages"),
        (b"x", "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"role": "usr", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([Message("user", "x"), SamplingParams()], "params"),
        ([Message("user", "x"), RequestOptions()], "options"),
    ],
)
def test_invalid_message_error_names_the_parameter(engine: Engine, asked: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.chat(asked)
    assert caught.value.param == param


def test_answer_settings_cover_all_params_and_options() -> None:
    names = {each.name for kind in (SamplingParams, RequestOptions) for each in fields(kind)} - {"given"}
    assert set(AnswerSettings.__annotations__) == names


def test_chat_keywords_override_params_and_options(engine: Engine) -> None:
    assert engine.chat(SUM, params=GREEDY, max_tokens=3).usage.completion_tokens == 3
    assert engine.chat(SUM, params=GREEDY, thinking=False).reasoning == ""
    assert engine.chat(SUM, params=GREEDY, thinking=False, stop="48").stop == "48"


def test_unknown_chat_keyword_suggests_the_closest_name(engine: Engine) -> None:
    with pytest.raises(TypeError, match="'max_tokns'; did you mean 'max_tokens'") as caught:
        engine.chat(SUM, max_tokns=3)  # type: ignore[call-arg]
    assert isinstance(caught.value, UnknownOptionError) and caught.value.param == "max_tokns"


def test_answer_at_max_tokens_is_marked_as_cut(engine: Engine) -> None:
    cut = engine.chat(SUM, temperature=0, max_tokens=5)
    assert (cut.finish_reason, cut.is_cut, cut.usage.completion_tokens) == ("length", True, 5)


def test_sampling_failure_raises_from_every_method(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("a logit is not finite")

    monkeypatch.setattr("notso.smollm3.engine.request.Request.sample", fail)
    with pytest.raises(EngineError, match="not finite"):
        engine.chat(SUM)
    with pytest.raises(EngineError, match="not finite"):
        list(engine.stream(SUM))
    with pytest.raises(EngineError, match="not finite"):
        engine.submit([Message("user", SUM)]).result()
    with pytest.raises(EngineError, match="not finite"):
        engine.batch([SUM, SUM])
    with pytest.raises(EngineError, match="not finite"):
        engine.continue_text(SUM)


def test_completion_without_end_event_raises() -> None:
    usage = Event("usage", usage=Usage(1, 1))
    with pytest.raises(EngineError, match="no `end` event"):
        Completion.from_events([Event("text", "x"), usage])
    assert Completion.from_events([Event("text", "x"), usage, Event("end", finish_reason="stop")]).text == "x"


def test_stream_yields_events_and_a_result(engine: Engine) -> None:
    with engine.stream(SUM, params=GREEDY) as stream:
        events = list(stream)
        whole = stream.result()
    assert told(events, "text") == whole.text and told(events, "reasoning") == whole.reasoning
    assert whole.finish_reason == "stop" and events[-1].kind == "end"


def test_closed_stream_result_is_cancelled(engine: Engine) -> None:
    with engine.stream(SUM, seed=1, ignore_eos=True) as stream:
        next(event for event in stream if event.kind == "text")
    cut = stream.result()
    assert cut.finish_reason == "cancelled" and cut.is_cut and cut.usage.completion_tokens > 0
    assert list(stream) == []


def test_garbage_collected_stream_cancels_generation(engine: Engine) -> None:
    stream = engine.stream(SUM, seed=1, ignore_eos=True)
    generation = stream.generation
    del stream
    assert generation.result().finish_reason == "cancelled"


def test_stream_keeps_its_engine_alive_until_it_is_closed() -> None:
    engine = Engine.load(context_tokens=512)
    thread = engine._core._thread
    with engine.stream(SUM, seed=1, ignore_eos=True, max_tokens=20) as stream:
        del engine
        gc.collect()
        assert list(stream)[-1].finish_reason == "length"
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_batch_returns_answers_in_order(engine: Engine) -> None:
    questions = [f"What is {number} + 8?" for number in range(20)]
    answers = engine.batch(questions, temperature=0, thinking=False, max_tokens=40)
    assert [each.text for each in answers] == [
        engine.chat(each, temperature=0, thinking=False, max_tokens=40).text for each in questions
    ]
    assert engine.batch([]) == []


def test_batch_larger_than_max_batched_is_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.smollm3.engine.engine.MAX_BATCHED", 2)
    answers = engine.batch([[Message("user", f"What is {number} + 1?")] for number in range(5)], max_tokens=2)
    assert [each.usage.completion_tokens for each in answers] == [2] * 5


def test_batch_with_an_invalid_entry_submits_nothing(engine: Engine) -> None:
    begun: list[Generation] = []
    submit = engine._core.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._core, "submit", lambda request: (begun.append(request.generation), submit(request)))
        with pytest.raises(InvalidRequestError):
            engine.batch([SUM, []])
        with pytest.raises(InvalidRequestError, match="list of conversations"):
            engine.batch(SUM)
    assert begun == []


def test_continue_text_accepts_text_and_token_ids(engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = engine.continue_text("text", temperature=0, max_tokens=5)
        assert one.text == engine.continue_text(engine.tokenize("text"), temperature=0, max_tokens=5).text
    assert one.usage.prompt_tokens == 1 and one.usage.completion_tokens == 5 and one.text


def test_generate_with_plain_text_warns_and_rejects_empty_output(engine: Engine) -> None:
    # The model ends this plain text with its first token.
    assert engine.continue_text(SUM, params=GREEDY).text == ""
    with pytest.warns(FutureWarning, match="chat or stream"):
        events = engine.generate(SUM, GREEDY)
    with pytest.raises(InvalidRequestError, match="use chat for an answer"):
        list(events)
    with pytest.warns(FutureWarning):
        kept = list(engine.generate("text", SamplingParams(temperature=0, max_tokens=5)))
    assert told(kept, "text") == engine.continue_text("text", temperature=0, max_tokens=5).text


def test_render_and_count_tokens_accept_every_message_form(engine: Engine) -> None:
    turns = [Message("user", SUM)]
    for asked in (SUM, turns[0], {"role": "user", "content": SUM}, [{"role": "user", "content": SUM}]):
        assert engine.render(asked) == engine.render(turns)
        assert engine.count_tokens(asked) == len(engine.encode_chat(turns)) == engine.chat(SUM).usage.prompt_tokens
