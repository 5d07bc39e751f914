"""Complete answers: conversations in all forms, truncated and failed answers, batches, and plain text."""

from __future__ import annotations

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


def test_an_answer_holds_what_its_events_tell(engine: Engine) -> None:
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
def test_one_question_in_every_form(engine: Engine, asked: Any) -> None:
    answer = engine.chat(asked, temperature=0, max_tokens=300, thinking=False)
    assert answer.text == engine.chat(messages=SUM, params=GREEDY, options=RequestOptions(thinking=False)).text


def test_several_messages(engine: Engine) -> None:
    turns = [Message("user", "Hello"), Message("assistant", "Hi"), Message("user", SUM)]
    assert conversation(*turns) == turns
    by_name = [{"role": each.role, "content": each.content} for each in turns]
    assert engine.chat(*turns, params=GREEDY).text == engine.chat(by_name, params=GREEDY).text


def test_openai_calls_and_results_are_read() -> None:
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
def test_a_wrong_message_is_named(engine: Engine, asked: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.chat(asked)
    assert caught.value.param == param


def test_every_field_is_a_keyword() -> None:
    names = {each.name for kind in (SamplingParams, RequestOptions) for each in fields(kind)} - {"given"}
    assert set(AnswerSettings.__annotations__) == names


def test_keywords_go_before_params(engine: Engine) -> None:
    assert engine.chat(SUM, params=GREEDY, max_tokens=3).usage.completion_tokens == 3
    assert engine.chat(SUM, params=GREEDY, thinking=False).reasoning == ""
    assert engine.chat(SUM, params=GREEDY, thinking=False, stop="48").stop == "48"


def test_an_unknown_keyword_is_named(engine: Engine) -> None:
    with pytest.raises(TypeError, match="'max_tokns'; did you mean 'max_tokens'") as caught:
        engine.chat(SUM, max_tokns=3)  # type: ignore[call-arg]
    assert isinstance(caught.value, UnknownOptionError) and caught.value.param == "max_tokns"


def test_a_cut_answer_shows_it(engine: Engine) -> None:
    cut = engine.chat(SUM, temperature=0, max_tokens=5)
    assert (cut.finish_reason, cut.is_cut, cut.usage.completion_tokens) == ("length", True, 5)


def test_a_failed_answer_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_answer_without_an_end_raises() -> None:
    usage = Event("usage", usage=Usage(1, 1))
    with pytest.raises(EngineError, match="no `end` event"):
        Completion.from_events([Event("text", "x"), usage])
    assert Completion.from_events([Event("text", "x"), usage, Event("end", finish_reason="stop")]).text == "x"


def test_a_stream_yields_events_and_has_a_result(engine: Engine) -> None:
    with engine.stream(SUM, params=GREEDY) as stream:
        events = list(stream)
        whole = stream.result()
    assert told(events, "text") == whole.text and told(events, "reasoning") == whole.reasoning
    assert whole.finish_reason == "stop" and events[-1].kind == "end"


def test_a_closed_stream_shows_that_it_was_cut(engine: Engine) -> None:
    with engine.stream(SUM, seed=1, ignore_eos=True) as stream:
        next(event for event in stream if event.kind == "text")
    cut = stream.result()
    assert cut.finish_reason == "cancelled" and cut.is_cut and cut.usage.completion_tokens > 0
    assert list(stream) == []


def test_a_dropped_stream_stops(engine: Engine) -> None:
    stream = engine.stream(SUM, seed=1, ignore_eos=True)
    generation = stream.generation
    del stream
    assert generation.result().finish_reason == "cancelled"


def test_a_batch_keeps_its_order(engine: Engine) -> None:
    questions = [f"What is {number} + 8?" for number in range(20)]
    answers = engine.batch(questions, temperature=0, thinking=False, max_tokens=40)
    assert [each.text for each in answers] == [
        engine.chat(each, temperature=0, thinking=False, max_tokens=40).text for each in questions
    ]
    assert engine.batch([]) == []


def test_a_batch_beyond_its_window(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.smollm3.engine.engine.MAX_BATCHED", 2)
    answers = engine.batch([[Message("user", f"What is {number} + 1?")] for number in range(5)], max_tokens=2)
    assert [each.usage.completion_tokens for each in answers] == [2] * 5


def test_a_batch_begins_nothing_if_one_is_invalid(engine: Engine) -> None:
    begun: list[Generation] = []
    submit = engine._core.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._core, "submit", lambda request: (begun.append(request.generation), submit(request)))
        with pytest.raises(InvalidRequestError):
            engine.batch([SUM, []])
        with pytest.raises(InvalidRequestError, match="list of conversations"):
            engine.batch(SUM)
    assert begun == []


def test_text_is_continued_by_a_name_of_its_own(engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = engine.continue_text("text", temperature=0, max_tokens=5)
        assert one.text == engine.continue_text(engine.tokenize("text"), temperature=0, max_tokens=5).text
    assert one.usage.prompt_tokens == 1 and one.usage.completion_tokens == 5 and one.text


def test_generate_does_not_return_nothing_for_a_text(engine: Engine) -> None:
    # The model ends this plain text with its first token.
    assert engine.continue_text(SUM, params=GREEDY).text == ""
    with pytest.warns(FutureWarning, match="chat or stream"):
        events = engine.generate(SUM, GREEDY)
    with pytest.raises(InvalidRequestError, match="use chat for an answer"):
        list(events)
    with pytest.warns(FutureWarning):
        kept = list(engine.generate("text", SamplingParams(temperature=0, max_tokens=5)))
    assert told(kept, "text") == engine.continue_text("text", temperature=0, max_tokens=5).text


def test_prompts_take_every_form(engine: Engine) -> None:
    turns = [Message("user", SUM)]
    for asked in (SUM, turns[0], {"role": "user", "content": SUM}, [{"role": "user", "content": SUM}]):
        assert engine.render(asked) == engine.render(turns)
        assert engine.count_tokens(asked) == len(engine.encode_chat(turns)) == engine.chat(SUM).usage.prompt_tokens
