"""`notso run`: what is written to stdout and stderr, and which arguments reach the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3 import MAX_STOP_STRINGS
from notso.smollm3.errors import ContextLengthError
from notso.smollm3.values.events import Event
from notso.smollm3.values.messages import ToolCall
from notso.smollm3.values.request_options import Grammar
from notso.smollm3.values.sampling_params import SamplingParams

Run = Callable[..., Any]


def test_answer_goes_to_stdout_and_reasoning_to_stderr(engine: Any, notso: Run) -> None:
    engine.says("The sky", " scatters blue.", thinks=["Light", " scatters."])

    result = notso("run", "Why is the sky blue?")

    assert result.code == 0
    assert result.out == "The sky scatters blue.\n"
    assert result.err == "[thinking]\nLight scatters.\n[end of thinking]\n"
    assert engine.asked[0][-1].content == "Why is the sky blue?"
    assert engine.closed


@pytest.mark.parametrize(
    ("texts", "printed"),
    [
        (["a\n"], "a\n"),
        (["a", "\n", "\n"], "a\n"),
        (["\n", "\na", "\n\nb\n"], "a\n\nb\n"),
        (["a\n", "", "b"], "a\nb\n"),
        ([], "\n"),
    ],
)
def test_output_ends_with_exactly_one_newline(engine: Any, notso: Run, texts: list[str], printed: str) -> None:
    engine.says(*texts)

    assert notso("run", "x").out == printed


def test_thinking_can_be_hidden_or_disabled(engine: Any, notso: Run) -> None:
    engine.says("Yes.", thinks=["Hm."])

    assert notso("run", "x", "--hide-thinking").err == ""
    assert engine.thinking == [True]
    notso("run", "x", "--no-think")
    assert engine.thinking == [True, False]


def test_control_characters_in_output_are_replaced(engine: Any, notso: Run) -> None:
    engine.says("\x1b]0;owned\x07 \x1b[2J\r\x9b31m\x7f ok\ttab", thinks=["\x1b[8mhidden"])

    result = notso("run", "x")

    assert result.out == "␛]0;owned␇ ␛[2J␍\ufffd31m␡ ok\ttab\n"
    assert result.err == "[thinking]\n␛[8mhidden\n[end of thinking]\n"


def test_json_contains_text_usage_timings_and_seed(engine: Any, notso: Run) -> None:
    engine.says("a\x1bb\x9b é\n", thinks=["hm"])

    result = notso("run", "x", "--json", "--seed", "7")

    assert result.err == ""
    assert result.out.count("\n") == 1
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in result.out.strip("\n"))
    answer = json.loads(result.out)
    assert answer["text"] == "a\x1bb\x9b é\n"
    assert answer["reasoning"] == "hm"
    assert answer["finish_reason"] == "stop"
    assert answer["seed"] == 7
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 4,
        "reasoning_tokens": 2,
        "cached_tokens": 3,
        "total_tokens": 16,
    }
    assert answer["timings"]["prompt_ms"] == 60.0
    assert answer["timings"]["tokens_per_second"] == 8.0
    assert answer["timings"]["total_ms"] >= answer["timings"]["first_token_ms"] > 0


def test_json_contains_the_random_seed(engine: Any, notso: Run) -> None:
    seeds = [json.loads(notso("run", "x", "--json").out)["seed"] for _ in range(2)]

    assert seeds == [params.seed for params in engine.params]
    assert seeds[0] != seeds[1]


def test_json_contains_tool_calls(engine: Any, notso: Run) -> None:
    engine.script = [Event("tool_call", tool_call=ToolCall("call_1", "add", '{"a": 1}'))]

    assert json.loads(notso("run", "x", "--json").out)["tool_calls"] == [
        {"id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    ]


def test_sampling_options_reach_the_engine(engine: Any, notso: Run) -> None:
    options = "--temperature 0 --top-p 0.5 --max-tokens 9 --seed 3 --stop END --stop STOP"
    notso("run", "x", *options.split())

    params = engine.params[0]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.0, 0.5, 9, 3)
    assert params.stop == ("END", "STOP")


# A value other than the default for each sampling field, as typed and as passed to the engine.
TYPED: dict[str, tuple[str, Any]] = {
    "max_tokens": ("900", 900),
    "thinking_budget": ("64", 64),
    "temperature": ("0", 0.0),
    "top_p": ("0.5", 0.5),
    "top_k": ("40", 40),
    "min_p": ("0.05", 0.05),
    "repetition_penalty": ("1.1", 1.1),
    "presence_penalty": ("-0.5", -0.5),
    "frequency_penalty": ("0.5", 0.5),
    "penalty_window": ("0", 0),
    "seed": ("7", 7),
    "stop": ("END", ("END",)),
    "stop_token_ids": ("5", (5,)),
    "min_tokens": ("2", 2),
    "ignore_eos": ("", True),
    "typical_p": ("0.9", 0.9),
    "xtc_probability": ("0.3", 0.3),
    "xtc_threshold": ("0.2", 0.2),
    "dry_multiplier": ("0.8", 0.8),
    "dry_base": ("2", 2.0),
    "dry_allowed_length": ("3", 3),
    "dry_penalty_last_n": ("128", 128),
    "dry_sequence_breakers": (";", (";",)),
}


def test_cases_cover_every_sampling_field_except_logit_bias() -> None:
    assert {each.name for each in fields(SamplingParams)} - set(TYPED) == {"logit_bias", "given"}


@pytest.mark.parametrize("verb", ["run", "chat"])
@pytest.mark.parametrize("name", TYPED)
def test_every_sampling_field_is_an_option(engine: Any, notso: Run, verb: str, name: str) -> None:
    typed, value = TYPED[name]
    option = "--" + name.replace("_", "-")
    words = [option, typed] if typed else [option]

    result = notso(verb, *words, *(["x"] if verb == "run" else []), stdin="x\n")

    assert result.code == 0
    (params,) = engine.params
    assert getattr(params, name) == value
    assert name in params.given


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_sampling_options_can_be_combined(engine: Any, notso: Run, verb: str) -> None:
    words = [word for name, (typed, _) in TYPED.items() for word in ("--" + name.replace("_", "-"), typed) if word]

    result = notso(verb, *words, *(["x"] if verb == "run" else []), stdin="x\n")

    assert result.code == 0, result.err
    (params,) = engine.params
    assert {name: getattr(params, name) for name in TYPED} == {name: value for name, (_, value) in TYPED.items()}
    assert sorted(params.given) == sorted(TYPED)


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_omitted_options_leave_sampling_params_at_defaults(engine: Any, notso: Run, verb: str) -> None:
    notso(verb, *(["x"] if verb == "run" else []), stdin="x\n")

    (params,) = engine.params
    assert replace(params, seed=None) == SamplingParams()
    assert params.given == ()


def test_out_of_range_value_names_its_option(engine: Any, notso: Run) -> None:
    result = notso("run", "x", "--min-p", "2")

    assert result.code == 2
    assert "min_p must be a number from 0 to 1. See --min-p in `notso run --help`." in result.err


def test_default_sampling_values_without_options(engine: Any, notso: Run) -> None:
    notso("run", "x")

    assert (engine.params[0].temperature, engine.params[0].top_p, engine.params[0].max_tokens) == (0.6, 0.95, None)


def test_system_option_adds_the_first_message(engine: Any, notso: Run) -> None:
    notso("run", "x", "--system", "Be brief.")

    assert [(m.role, m.content) for m in engine.asked[0]] == [("system", "Be brief."), ("user", "x")]


def test_model_context_and_threads_reach_the_engine(engine: Any, notso: Run) -> None:
    notso("run", "x", "--model", "m.gguf", "--context", "512", "--threads", "2")

    assert (str(engine.opened_with[0]), *engine.opened_with[1:]) == ("m.gguf", 512, 2)


def test_model_is_read_from_environment(engine: Any, notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTSO_MODEL", "n.gguf")
    notso("run", "x")

    assert str(engine.opened_with[0]) == "n.gguf"


@pytest.mark.parametrize(
    ("arguments", "stdin", "question"),
    [
        (["-"], "from the pipe\n", "from the pipe"),
        ([], "from the pipe\n\n", "from the pipe"),
        (["Sum", "this", "up"], "not read", "Sum this up"),
        (["Sum this up:", "-"], "long text\n", "Sum this up:\n\nlong text"),
        (["--", "--not-an-option"], "", "--not-an-option"),
        (["-"], "é 漢 🙂", "é 漢 🙂"),
    ],
)
def test_prompt_is_read_from_arguments_or_stdin(
    engine: Any, notso: Run, arguments: list[str], stdin: str, question: str
) -> None:
    assert notso("run", *arguments, stdin=stdin).code == 0
    assert engine.asked[0][-1].content == question


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        ([], b"", "the prompt is empty"),
        (["-"], b"  \n", "the prompt is empty"),
        ([""], b"", "the prompt is empty"),
        (["-"], b"abc\xff", "not UTF-8 text (byte 3)"),
        (["\udcff"], b"", "not valid UTF-8 text"),
        (["x", "--system", "\udcff"], b"", "not valid UTF-8 text"),
    ],
)
def test_empty_or_invalid_prompt_is_a_usage_error(
    engine: Any, notso: Run, arguments: list[str], stdin: bytes, told: str
) -> None:
    result = notso("run", *arguments, stdin=stdin)

    assert result.code == 2
    assert told in result.err
    assert result.err.count("\n") == 1
    assert engine.asked == []


@pytest.mark.parametrize(
    "arguments",
    ["--temperature 3", "--top-p 0", "--max-tokens 0", "--stop a " * (MAX_STOP_STRINGS + 1), "--context 1"],
)
def test_out_of_range_options_are_usage_errors(engine: Any, notso: Run, arguments: str) -> None:
    result = notso("run", "x", *arguments.split())

    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("notso: ")
    assert result.err.count("\n") == 1


def test_schema_is_passed_to_the_engine_unchanged(engine: Any, notso: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    engine.says("7")

    assert notso("run", "x", "--schema", str(schema)).out == "7\n"
    assert notso("run", "x").code == 0
    assert engine.grammars == [Grammar("json_schema", '{"type": "integer"}'), None]


@pytest.mark.parametrize(("data", "told"), [(None, "No such file"), (b"\xff", "not UTF-8 text (byte 0)")])
def test_unreadable_schema_is_a_usage_error(
    engine: Any, notso: Run, tmp_path: Path, data: bytes | None, told: str
) -> None:
    schema = tmp_path / "schema.json"
    if data is not None:
        schema.write_bytes(data)

    result = notso("run", "x", "--schema", str(schema))

    assert result.code == 2
    assert told in result.err
    assert engine.asked == []


def test_context_length_error_suggests_a_shorter_prompt(engine: Any, notso: Run) -> None:
    engine.script = [ContextLengthError(9000, 4096)]

    result = notso("run", "x")

    assert result.code == 1
    assert "it needs 9,000 tokens, but the context is 4,096. Shorten the prompt" in result.err


def test_truncated_answer_is_reported_on_stderr(engine: Any, notso: Run) -> None:
    engine.script = [Event("text", text="half"), Event("end", finish_reason="length")]
    result = notso("run", "x")
    assert (result.code, result.out) == (8, "half\n")
    assert "cut off at the token limit" in result.err

    engine.script = [Event("reasoning", text="hm"), Event("end", finish_reason="length")]
    assert "during thinking" in notso("run", "x").err

    as_json = notso("run", "x", "--json")
    assert (as_json.code, as_json.err) == (8, "")
    assert json.loads(as_json.out)["finish_reason"] == "length"

    engine.script = [Event("text", text=" "), Event("end", finish_reason="length")]
    assert "cut off at the token limit" in notso("run", "x", "--no-think").err


def test_demo_model_is_announced(engine: Any, notso: Run) -> None:
    engine.is_demo = True
    engine.says("hello")

    result = notso("run", "x")
    assert (result.out, "built-in demo model" in result.err) == ("hello\n", True)
    assert json.loads(notso("run", "x", "--json").out)["demo"] is True


def test_stats_option_prints_token_rates(engine: Any, notso: Run) -> None:
    engine.says("hello")

    assert "12 prompt tokens (3 cached) in 0.1 s, 4 tokens at 8.0 per second" in notso("run", "x", "--stats").err
