"""`notso chat`: a conversation, its commands, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from notso.cli.slash_commands import COMMANDS
from notso.smollm3.errors import ContextLengthError
from notso.smollm3.values.events import Event

Run = Callable[..., Any]


def said(engine: Any, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in engine.asked[turn]]


def test_questions_and_answers_are_remembered(engine: Any, notso: Run) -> None:
    engine.says("Hello.", thinks=["A greeting."])

    result = notso("chat", stdin="hi\nand now?\n")

    assert result.code == 0
    assert result.out == "Hello.\nHello.\n"
    assert said(engine, 0) == [("user", "hi")]
    assert said(engine, 1) == [("user", "hi"), ("assistant", "Hello."), ("user", "and now?")]
    assert engine.asked[1][1].reasoning_content == "A greeting."
    assert "A greeting." in result.err
    assert engine.closed


def test_empty_lines_ask_nothing(engine: Any, notso: Run) -> None:
    notso("chat", stdin="\n   \nhi\n\n")

    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ('"""one\ntwo\n\nthree"""\n', "one\ntwo\n\nthree"),
        ('"""\none\n"""\n', "one"),
        ("//not a command\n", "/not a command"),
        ("no newline at the end", "no newline at the end"),
        ('""" open to the end of all', None),
    ],
)
def test_ways_to_put_a_question(engine: Any, notso: Run, typed: str, question: str | None) -> None:
    assert notso("chat", stdin=typed).code == 0
    assert [messages[-1].content for messages in engine.asked] == ([] if question is None else [question])


def test_help_tells_every_command(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin="/help\n")

    for command in COMMANDS:
        assert f"/{command.name}" in result.err
    assert result.out == ""


def test_clear_forgets_the_conversation(engine: Any, notso: Run) -> None:
    engine.says("Yes.")
    notso("chat", stdin="one\n/clear\ntwo\n")

    assert said(engine) == [("user", "two")]


@pytest.mark.parametrize(
    ("typed", "thinks"),
    [("/thinking off", False), ("/thinking on", True), ("/thinking", False), ("/think OFF", False)],
)
def test_thinking_is_switched(engine: Any, notso: Run, typed: str, thinks: bool) -> None:
    notso("chat", stdin=f"{typed}\nx\n")

    assert engine.thinking == [thinks]


def test_thinking_gets_a_budget(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin="/thinking 256\nx\n/thinking 0\n/thinking ²\n/thinking 99999999999\n")

    assert "Thinking is on, at most 256 tokens." in result.err
    assert engine.thinking == [True]
    assert result.err.count("takes on, off, a number of tokens") == 3


def test_thinking_can_be_hidden(engine: Any, notso: Run) -> None:
    engine.says("Yes.", thinks=["secret thought"])

    assert "secret thought" not in notso("chat", stdin="/thinking hide\nx\n").err
    assert engine.thinking == [True]


def test_the_temperature_is_shown_set_and_checked(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin="/temp\n/temp 0\nx\n/temp 7\n/temp warm\n/temp nan\ny\n")

    assert "The temperature is 0.6." in result.err
    assert result.err.count("must be a number from 0 to 2") == 3
    assert [params.temperature for params in engine.params] == [0.0, 0.0]


def test_instructions_are_set_and_dropped(engine: Any, notso: Run) -> None:
    notso("chat", "--system", "Be brief.", stdin="x\n/system Be kind.\ny\n/system -\nz\n")

    assert [messages[0].content for messages in engine.asked] == ["Be brief.", "Be kind.", "x"]


def test_status_tells_model_settings_and_context(engine: Any, notso: Run) -> None:
    engine.is_demo = True
    result = notso("chat", "--no-think", stdin="x\n/status\n")

    assert "Scripted, 1.92 GB, context 4,096 tokens, KV cache f16, generic kernels on 2 threads" in result.err
    assert "not thinking | temperature 0.6 | 16 / 4,096 tokens" in result.err
    assert result.err.count("built-in demo model") == 2


def test_regenerate_asks_the_last_question_again(engine: Any, notso: Run) -> None:
    engine.says("Yes.")
    result = notso("chat", stdin="/regenerate\none\n/regenerate\n")

    assert "no message to answer again" in result.err
    assert [said(engine, turn) for turn in range(2)] == [[("user", "one")]] * 2
    assert engine.params[0].seed != engine.params[1].seed


def test_with_a_seed_the_answers_repeat(engine: Any, notso: Run) -> None:
    notso("chat", "--seed", "5", stdin="one\n/regenerate\n")

    assert [params.seed for params in engine.params] == [5, 5]


@pytest.mark.parametrize(
    ("typed", "near"), [("/hlep", "/help"), ("/tempp 1", "/temp"), ("/thi off", "/thinking"), ("/xyzzy", "/help lists")]
)
def test_an_unknown_command_is_not_sent_to_the_model(engine: Any, notso: Run, typed: str, near: str) -> None:
    result = notso("chat", stdin=f"{typed}\n")

    assert near in result.err
    assert engine.asked == []


@pytest.mark.parametrize("typed", ["/exit\n", "/quit\n", ""])
def test_ways_to_leave(engine: Any, notso: Run, typed: str) -> None:
    result = notso("chat", stdin=typed + ("never asked\n" if typed else ""))

    assert result.code == 0
    assert engine.asked == []
    assert engine.closed


def test_a_failure_leaves_the_conversation_as_it_was(engine: Any, notso: Run) -> None:
    def fail_now() -> None:
        engine.script = [Event("text", text="Fine.")]

    engine.script = [fail_now, ContextLengthError(9000, 4096)]
    result = notso("chat", stdin="too long\nshort\n")

    assert result.code == 0
    assert "needs 9,000 tokens" in result.err
    assert result.out == "\nFine.\n"
    assert said(engine) == [("user", "short")]


def test_what_the_model_says_cannot_steer_the_terminal(engine: Any, notso: Run) -> None:
    engine.says("\x1b[2J")

    assert notso("chat", stdin="x\n").out == "␛[2J\n"
