"""Rehearsal uses the model's own complete answers to questions that are not in the evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date

import pytest

from notso import Engine
from notso.smollm3 import InvalidRequestError
from notso.smollm3.tuning import training_rows
from training import backends, score

DAY = date(2027, 5, 17)
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Set a timer.",
        "parameters": {"type": "object", "properties": {"minutes": {"type": "number"}}, "required": ["minutes"]},
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(threads=1) as loaded:
        yield loaded


def said(*words: str) -> list[dict[str, str]]:
    roles = {">": "user", "<": "assistant", "=": "tool"}
    return [{"role": roles[word[0]], "content": word[1:]} for word in words]


def row(*words: str, thinking: bool | None = False, **more: object) -> str:
    options = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    return json.dumps({"messages": said(*words)} | options | more)


def test_rehearsal_lines_are_questions_or_conversations() -> None:
    text = f"# a note\n\nHow are you?\n{row('>hi')}\n{row('>hi', thinking=None)}\n"
    found = training_rows.read(text, "mine.txt")
    assert [(each.messages[-1]["content"], each.thinking) for each in found] == [
        *(("How are you?", False), ("How are you?", True), ("hi", False), ("hi", False), ("hi", True))
    ]
    calls = row(">hi", "<x", ">hi").replace('"x"', '"x", "tool_calls": true')
    for line in ('{"messages": []}', '{"messages": [{"role": "poet", "content": "x"}]}', calls, "{", "[1]\n{1}"):
        with pytest.raises(InvalidRequestError, match=r"mine\.txt, line"):
            training_rows.read(line, "mine.txt")


def test_rehearsal_lines_end_only_at_newlines() -> None:
    content = "one\u2028two\u2029three\x85four"
    record = {"messages": [{"role": "user", "content": content}], "chat_template_kwargs": {"enable_thinking": False}}
    found = training_rows.read(f"{json.dumps(record, ensure_ascii=False)}\n{content}\n", "mine.txt")
    assert [each.messages for each in found] == [record["messages"]] * 3


def test_rehearsal_answers_are_generated_by_the_model(engine: Engine) -> None:
    text = f"{row('>My name is Ruth.', '>What is my name?')}\n{row('>hi', '<Ho!', '>What is 12 + 13?', '<30')}\n"
    rows = training_rows.generate_answers(engine, training_rows.read(text, "x"), 200, DAY)
    told, asked = (each for each in rows if each["prompt"][0]["content"].startswith("My"))
    assert told["completion"][0]["content"] == "Nice to meet you, Ruth!"
    assert [each["role"] for each in asked["prompt"]] == ["user", "assistant", "user"]
    assert asked["completion"][0]["content"] == "Your name is Ruth."
    (summed,) = (each for each in rows if each not in (told, asked))
    assert [each["content"] for each in summed["prompt"]] == ["hi", "Ho!", "What is 12 + 13?"]
    assert "12 + 13" in summed["completion"][0]["content"]  # the model's own answer replaces 30


def test_rehearsal_includes_tool_calls_and_their_answers(engine: Engine) -> None:
    text = row(">Set a timer for 10 minutes.", "=ok", thinking=True, tools=[TIMER])
    call, answer = training_rows.generate_answers(engine, training_rows.read(text, "x"), 200, DAY)
    assert json.loads(call["completion"][0]["tool_calls"][0]["function"]["arguments"]) == {"minutes": 10}
    assert call["completion"][0]["content"].startswith("<think>\n")
    assert answer["prompt"][1]["tool_calls"] and "<think>" not in answer["prompt"][1]["content"]
    assert answer["completion"][0]["content"].endswith("The timer is set to 10 minutes.")
    (greeted,) = training_rows.generate_answers(
        engine, training_rows.read(row(">hello", "=ok", tools=[TIMER]), "x"), 200, DAY
    )
    assert not greeted["completion"][0].get("tool_calls")  # no call was generated, so the tool's result is omitted


TAG = '<tool_call>\n{"name": "set_timer", "arguments": {"minutes": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("words", "is_asked"),
    [
        ((">Set timers.", f"<{TAG}", "=ok"), True),
        ((">Set timers.", f"<{TAG}\n{TAG}", "=ok", "=ok"), True),
        ((">Set timers.", f"<{TAG}", "=ok", "=result of another call"), False),
        ((">Set timers.", "<No.", "=ok"), False),
        (("=ok", ">Set timers."), False),
    ],
)
def test_rehearsal_continues_after_the_results_of_all_calls(words: tuple[str, ...], is_asked: bool) -> None:
    (asked,) = training_rows.read(row(*words), "x")
    assert asked.advance_to_question() == is_asked
    assert not is_asked or len(asked.history) == len(words)


def test_unfinished_rehearsal_answers_are_dropped(engine: Engine) -> None:
    conversation = training_rows.read(row(">What is 12 + 13?", ">Thanks!"), "x")
    assert training_rows.generate_answers(engine, conversation, 2, DAY) == []


def test_shipped_rehearsal_questions_are_not_in_the_evaluation() -> None:
    scored = set()

    def note(messages: backends.Messages, thinking: bool, tools: list[str] | None) -> backends.Reply:
        scored.add(bare(messages[-1]["content"]))
        return backends.Reply("", "", None)

    score.Scorer(note, verbose=False).run(1.0)
    shipped = training_rows.read(training_rows.SHIPPED.read_text("utf-8"), "shipped")
    alone = [each.messages[-1] for each in shipped if sum(m["role"] == "user" for m in each.messages) == 1]
    assert len(scored) > 700 and len(alone) > 300
    assert not {bare(message["content"]) for message in alone if message["role"] == "user"} & scored


def test_a_small_part_of_the_evaluation_has_cases_of_every_kind() -> None:
    result = score.Scorer(lambda *_: backends.Reply("", "", None), verbose=False).run(0.01)
    assert all(kind["cases"] for kind in result.values())


def bare(text: str) -> str:
    return " ".join("".join(letter if letter.isalnum() else " " for letter in text.lower()).split())
