"""Constrained answers from the real engine with the demo model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from notso.smollm3 import (
    Engine,
    Event,
    Grammar,
    InvalidRequestError,
    Message,
    RequestOptions,
    SamplingParams,
    ToolCall,
    ToolName,
)

SUM = [Message("user", "What is 27 + 48?")]
WEATHER = [Message("user", "What is the weather in Paris?")]
GREEDY = SamplingParams(max_tokens=300, temperature=0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": -99, "maximum": 99},
                    "b": {"type": "integer", "minimum": -99, "maximum": 99},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def text(events: Sequence[Event], kind: str = "text") -> str:
    return "".join(event.text for event in events if event.kind == kind)


def calls(events: Sequence[Event]) -> list[ToolCall]:
    return [event.tool_call for event in events if event.tool_call is not None]


def is_person(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and set(found) == {"name", "age", "tags"}
        and (isinstance(found["name"], str) and len(found["name"]) <= 12)
        and (type(found["age"]) is int and 0 <= found["age"] <= 150)
        and (isinstance(found["tags"], list) and len(found["tags"]) <= 3 and set(found["tags"]) <= {"a", "b"})
    )


def fits(call: ToolCall) -> bool:
    arguments = json.loads(call.arguments)
    if call.name == "get_weather":
        return set(arguments) == {"city"} and isinstance(arguments["city"], str) and len(arguments["city"]) <= 12
    if call.name == "add":
        return set(arguments) == {"a", "b"} and all(
            type(each) is int and -99 <= each <= 99 for each in arguments.values()
        )
    return call.name == "now" and arguments == {}


def asked_at_random(count: int) -> list[tuple[list[Message], SamplingParams, dict[str, Any]]]:
    chance = random.Random(7)
    words = [
        "What is",
        "the weather",
        "sum of",
        "27",
        "48",
        "Paris",
        "hello",
        "JSON",
        "{",
        "}",
        "who are you",
        "<think>",
    ]
    asked = []
    for number in range(count):
        messages = [Message("user", " ".join(chance.choice(words) for _ in range(chance.randrange(1, 12))))]
        params = SamplingParams(
            max_tokens=chance.choice((40, 300)),
            temperature=chance.choice((0, 0.6, 1.5, 2.0)),
            seed=number,
            repetition_penalty=chance.choice((1.0, 1.3)),
            logit_bias={chance.randrange(3000): chance.choice((-100.0, 100.0))} if chance.random() < 0.5 else {},
            thinking_budget=chance.choice((None, 0, 5, 20)),
        )
        asked.append((messages, params, {"thinking": chance.random() < 0.5}))
    return asked


def test_answer_matches_its_schema_or_hits_the_length_limit(demo_engine: Engine) -> None:
    generations = [
        demo_engine.submit(messages, params, RequestOptions(grammar=SCHEMA, **options))
        for messages, params, options in asked_at_random(50)
    ]
    complete = 0
    for generation in generations:
        events = list(generation.events())
        if events[-1].finish_reason == "stop":
            assert is_person(json.loads(text(events))), text(events)
            complete += 1
        else:
            assert events[-1].finish_reason == "length"
    assert complete >= 20


def test_required_calls_have_valid_arguments(demo_engine: Engine) -> None:
    """In every case: one or several calls, of any tool or of a named one."""
    chance = random.Random(8)
    started = []
    for messages, params, options in asked_at_random(40):
        choice = chance.choice(("required", ToolName("add"), ToolName("now")))
        several = chance.random() < 0.5
        generation = demo_engine.submit(
            messages, params, RequestOptions(tools=TOOLS, tool_choice=choice, parallel_tool_calls=several, **options)
        )
        started.append((generation, choice, several))
    called = 0
    for generation, choice, several in started:
        events = list(generation.events())
        assert all(fits(call) for call in calls(events))
        if events[-1].finish_reason == "length":
            continue
        assert events[-1].finish_reason == "tool_calls"
        assert text(events) == ""
        assert len(calls(events)) >= 1
        if not several or isinstance(choice, ToolName):
            assert len(calls(events)) == 1
        if isinstance(choice, ToolName):
            assert calls(events)[0].name == choice.name
        called += 1
    assert called >= 15


def test_speculation_does_not_change_structured_answers() -> None:
    """The tokens are the same with and without speculation, alone and concurrently."""
    again = [Message("user", 'Say again: {"name": "a", "age": 7, "tags": []} {"name": "a", "age": 7, "tags": []}')]
    results = set()
    for speculation in (True, False):
        with Engine.load(speculation=speculation) as engine:
            others = [engine.submit(SUM, GREEDY) for _ in range(3)]
            for messages in (again, SUM):
                for options in ({"grammar": SCHEMA}, {"tools": TOOLS, "tool_choice": "required"}):
                    events = list(engine.generate(messages, GREEDY, RequestOptions(**options)))  # type: ignore[arg-type]
                    said = "".join(event.text for event in events) + str([call.arguments for call in calls(events)])
                    results.add((messages[0].content, str(options), said))
            for other in others:
                other.stop()
    assert len(results) == 4


def test_preempted_answer_continues_in_its_grammar() -> None:
    """Background answers are preempted by urgent ones, and continue afterwards."""
    with Engine.load(context_tokens=512, max_num_seqs=1) as engine:
        expected = text(list(engine.generate(SUM, GREEDY, RequestOptions(grammar=SCHEMA))))
        low = engine.submit(SUM, GREEDY, RequestOptions(grammar=SCHEMA, priority="background"))
        while not any(event.kind == "reasoning" for event in low.read()):
            low.wait(len(low.read()), timeout_s=1)
        high = engine.submit(SUM, GREEDY)
        assert list(high.events())[-1].finish_reason == "stop"
        events = list(low.events())
        assert text(events) == expected
        assert is_person(json.loads(expected))
        kinds = [event.kind for event in events]
        assert "queued" not in kinds[kinds.index("reasoning") :]


def test_grammar_applies_after_unchanged_reasoning(demo_engine: Engine) -> None:
    free = list(demo_engine.generate(SUM, GREEDY))
    events = list(demo_engine.generate(SUM, GREEDY, RequestOptions(grammar=SCHEMA)))
    assert text(events, "reasoning") == text(free, "reasoning") != ""
    assert is_person(json.loads(text(events)))


def test_end_tokens_are_not_allowed_before_the_answer_begins(demo_engine: Engine) -> None:
    """An end token is not allowed before the answer has begun, because it would end an empty answer."""
    ends = dict.fromkeys(demo_engine.tokenizer.end_ids, 100.0)
    params = SamplingParams(max_tokens=400, temperature=0, logit_bias=ends, thinking_budget=30)
    events = list(demo_engine.generate(SUM, params, RequestOptions(grammar=SCHEMA)))
    assert is_person(json.loads(text(events)))
    assert events[-1].finish_reason == "stop"


@pytest.mark.parametrize("thinking", [True, False])
def test_tags_and_newlines_of_a_grammar_belong_to_the_text(demo_engine: Engine, thinking: bool) -> None:
    """Leading newlines and tags in ordinary text belong to the answer here."""
    expression = r"\n\n<think>[0-9]{3}</think><tool_call>\{"
    opening = demo_engine.tokenizer.tool_call_open_id
    assert opening is not None
    params = SamplingParams(max_tokens=300, temperature=0, logit_bias={opening: -100.0})
    grammar = Grammar("regex", expression)
    events = list(demo_engine.generate(SUM, params, RequestOptions(grammar=grammar, tools=TOOLS, thinking=thinking)))
    assert re.fullmatch(expression, text(events))
    assert events[-1].finish_reason == "stop"


def test_answer_ends_when_the_grammar_is_complete(demo_engine: Engine) -> None:
    events = list(
        demo_engine.generate(
            SUM, GREEDY, RequestOptions(grammar=Grammar("lark", 'start: "yes" | "no"'), thinking=False)
        )
    )
    assert text(events) in ("yes", "no")
    usage = events[-2].usage
    assert usage is not None and usage.completion_tokens <= 4


def test_stop_string_ends_a_structured_answer(demo_engine: Engine) -> None:
    params = SamplingParams(max_tokens=300, temperature=0, stop=('"age',))
    events = list(demo_engine.generate(SUM, params, RequestOptions(grammar=SCHEMA, thinking=False)))
    assert text(events).startswith('{"name"') and '"age' not in text(events)
    assert events[-1].finish_reason == "stop"


def test_text_prompts_follow_a_grammar(demo_engine: Engine) -> None:
    events = list(
        demo_engine.generate("The numbers are", GREEDY, RequestOptions(grammar=Grammar("regex", " [0-9]+, [0-9]+\\.")))
    )
    assert re.fullmatch(r" \d+, \d+\.", text(events))


def test_answer_with_tools_and_schema_is_a_call_or_matches(demo_engine: Engine) -> None:
    events = list(demo_engine.generate(WEATHER, GREEDY, RequestOptions(tools=TOOLS, grammar=SCHEMA)))
    assert [call.name for call in calls(events)] == ["get_weather"]
    assert events[-1].finish_reason == "tool_calls"
    events = list(demo_engine.generate(SUM, GREEDY, RequestOptions(tools=TOOLS, grammar=SCHEMA)))
    assert calls(events) == [] or text(events) == ""
    kept = list(demo_engine.generate(WEATHER, GREEDY, RequestOptions(tools=TOOLS, grammar=SCHEMA, tool_choice="none")))
    assert is_person(json.loads(text(kept)))


def test_continued_answer_follows_its_grammar(demo_engine: Engine) -> None:
    started = '{"name": "Bob", "ag'
    messages = [*SUM, Message("assistant", started)]
    events = list(
        demo_engine.generate(messages, GREEDY, RequestOptions(thinking=False, continue_last=True, grammar=SCHEMA))
    )
    assert is_person(json.loads(started + text(events)))
    thought = [*SUM, Message("assistant", "", reasoning_content="27 + 48")]
    events = list(demo_engine.generate(thought, GREEDY, RequestOptions(continue_last=True, grammar=SCHEMA)))
    assert text(events, "reasoning") and is_person(json.loads(text(events)))
    for started in ("Well", '{"name": 5', '{"name": "a", "age": 1, "tags": []}'):
        with pytest.raises(InvalidRequestError) as caught:
            demo_engine.submit(
                [*SUM, Message("assistant", started)], options=RequestOptions(continue_last=True, grammar=SCHEMA)
            )
        assert caught.value.param == "continue_last"


# ---------------------------------------------------------------- tools


def test_tool_choice_none_keeps_the_prompt_and_makes_no_calls(demo_engine: Engine) -> None:
    """The prompt stays the same, so that its cached blocks are reused."""
    auto = list(demo_engine.generate(WEATHER, GREEDY, RequestOptions(tools=TOOLS)))
    assert [call.name for call in calls(auto)] == ["get_weather"]
    none = list(demo_engine.generate(WEATHER, GREEDY, RequestOptions(tools=TOOLS, tool_choice="none")))
    assert calls(none) == [] and none[-1].finish_reason == "stop" and text(none)
    assert none[-2].usage is not None and auto[-2].usage is not None
    assert none[-2].usage.prompt_tokens == auto[-2].usage.prompt_tokens
    opening = demo_engine.tokenizer.tool_call_open_id
    assert opening is not None
    pressed = SamplingParams(max_tokens=30, temperature=0, logit_bias={opening: 100.0})
    assert (
        calls(
            list(
                demo_engine.generate(WEATHER, pressed, RequestOptions(tools=TOOLS, tool_choice="none", thinking=False))
            )
        )
        == []
    )


def test_required_call_is_refused_without_a_tool_call_token(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_engine.tokenizer, "tool_call_open_id", None)
    with pytest.raises(InvalidRequestError, match="no token that begins a tool call") as refused:
        demo_engine.submit(WEATHER, GREEDY, RequestOptions(tools=TOOLS, tool_choice="required"))
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", ToolName("add")])
@pytest.mark.parametrize("begun", ["Well", '<tool_call>\n{"name": "add"'])
def test_required_call_does_not_continue_a_begun_answer(demo_engine: Engine, choice: Any, begun: str) -> None:
    options = RequestOptions(thinking=False, continue_last=True, tools=TOOLS, tool_choice=choice)
    with pytest.raises(InvalidRequestError, match="tool calls cannot be required for a continued answer") as caught:
        demo_engine.submit([*SUM, Message("assistant", begun)], options=options)
    assert caught.value.param == "continue_last"


def test_parallel_tool_calls_false_allows_a_single_call(demo_engine: Engine) -> None:
    """Even without a grammar, the answer ends with the first call."""
    several = demo_engine.submit(WEATHER, GREEDY, RequestOptions(tools=TOOLS, parallel_tool_calls=False))
    events = list(several.events())
    assert len(calls(events)) == 1
    assert events[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", ToolName("add")])
def test_required_call_is_made_despite_grammar_of_texts(demo_engine: Engine, choice: Any) -> None:
    options = RequestOptions(tools=TOOLS, tool_choice=choice, grammar=SCHEMA, thinking=False)
    events = list(demo_engine.submit(SUM, GREEDY, options).events())
    assert calls(events) and events[-1].finish_reason == "tool_calls"
    assert not any(event.kind == "text" for event in events)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": ToolName("add")}, "tool_choice"),
        ({"tool_choice": ToolName("subtract"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"grammar": "{}"}, "grammar"),
        ({"grammar": Grammar("ebnf", "")}, "grammar"),  # type: ignore[arg-type]
        ({"grammar": Grammar("gbnf", "")}, "grammar"),
        ({"strict_tools": ["add"]}, "strict_tools"),
        ({"strict_tools": ("add",)}, "strict_tools"),
        ({"strict_tools": ("add", "ad"), "tools": TOOLS}, "strict_tools"),
        ({"strict_tools": ("ad",), "tools": TOOLS, "tool_choice": "required"}, "strict_tools"),
        ({"strict_tools": ("f",), "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
        ({"grammar": Grammar("json_schema", '{"not": {}}')}, "grammar"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tool_choice": "required", "tools": [{"function": {"parameters": {}}}]}, "tools"),
        ({"tool_choice": "required", "tools": [{"function": 5}]}, "tools"),
        ({"owner": "\ud800"}, "owner"),
        ({"owner": 5}, "owner"),
        ({"tools": 5}, "tools"),
        ({"priority": "urgent"}, "priority"),
        ({"when_full": "explode"}, "when_full"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_name(demo_engine: Engine, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        demo_engine.submit(SUM, options=RequestOptions(**options))
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3]], ids=["text", "ids"])
@pytest.mark.parametrize("option", [{"continue_last": True}, {"when_full": "drop_oldest"}, {"tools": TOOLS}])
def test_plain_prompts_refuse_options_of_messages(demo_engine: Engine, prompt: Any, option: dict[str, Any]) -> None:
    if isinstance(prompt, list) and "tools" in option:
        assert list(
            demo_engine.generate(prompt, SamplingParams(max_tokens=2), RequestOptions(**option))
        )  # the ids may contain them
        return
    with pytest.raises(InvalidRequestError) as caught:
        demo_engine.submit(prompt, options=RequestOptions(**option))
    assert caught.value.param in option


def test_prefilled_reasoning_is_dropped_without_thinking(demo_engine: Engine) -> None:
    """Without reasoning mode, the prefilled reasoning is dropped, and the answer starts from the beginning."""
    messages = [*SUM, Message("assistant", "", reasoning_content="hm")]
    fresh = demo_engine._request(SUM, GREEDY, RequestOptions(thinking=False))
    again = demo_engine._request(messages, GREEDY, RequestOptions(thinking=False, continue_last=True))
    assert again.sequence.tokens == fresh.sequence.tokens
    expected, found = (
        list(demo_engine.generate(m, GREEDY, RequestOptions(thinking=False, continue_last=c)))
        for m, c in ((SUM, False), (messages, True))
    )
    assert text(found) == text(expected) != ""


def test_estimate_refuses_an_invalid_owner(demo_engine: Engine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        demo_engine.estimate(SUM, RequestOptions(owner="\ud800"))
    assert caught.value.param == "owner"
