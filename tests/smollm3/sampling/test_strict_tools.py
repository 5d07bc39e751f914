"""Arguments of voluntary tool calls follow the tools' schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from notso.smollm3 import Engine, Event, InvalidRequestError, Message, RequestOptions, SamplingParams
from notso.smollm3.output.tool_parser import ToolCallParser
from notso.smollm3.sampling.grammar import GrammarCompiler, Matcher
from notso.smollm3.sampling.structured_output import CALL_TAG, StructuredOutput, structured_output_for
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.messages import ToolCall

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "note", "parameters": PLACE}},
]
WEATHER = [Message("user", "What is the weather in Paris?")]


@pytest.fixture(scope="module")
def grammars(small_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer)


def guide_of(tokenizer: Tokenizer, grammars: GrammarCompiler, begun: str = "", **options: Any) -> StructuredOutput:
    asked = RequestOptions(**{"tools": TOOLS, "strict_tools": ("weather",), **options})
    structured_output = structured_output_for(asked, tokenizer, grammars, may_think=False, started=begun)
    assert structured_output is not None
    return structured_output


def write(
    structured_output: StructuredOutput,
    tokenizer: Tokenizer,
    weigh: Callable[[np.ndarray], None],
    count: int,
    seed: int,
) -> str:
    """Return a text sampled from random logits."""
    chance, written = np.random.default_rng(seed), b""
    for _ in range(count):
        logits = chance.standard_normal(tokenizer.vocab_size).astype(np.float32)
        logits[sorted(tokenizer.special_ids)] = -20
        weigh(logits)
        token = int(structured_output.restrict(logits, in_reasoning=False).argmax())
        assert not structured_output.consume(token, in_reasoning=False) and not structured_output.is_over
        written += tokenizer.token_bytes(token)
    return written.decode(errors="replace")


def found_calls(written: str, seed: int) -> list[ToolCall]:
    """Return the calls in a text that arrives in pieces of any size."""
    parser, chance, calls = ToolCallParser(), random.Random(seed), []
    while written:
        size = chance.randrange(1, 9)
        calls += [piece for piece in parser.push(written[:size]) if isinstance(piece, ToolCall)]
        written = written[size:]
    return calls


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_follow_the_strict_tool_schema(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, seed: int
) -> None:
    """Text is unconstrained; then a call is opened, repeatedly."""
    structured_output, turn = guide_of(small_tokenizer, grammars), iter(range(10_000))

    def weigh(logits: np.ndarray) -> None:
        if next(turn) % 40 == 10:
            logits[small_tokenizer.tool_call_open_id] = 100
        logits[small_tokenizer.encode('"}')] += 3

    calls = found_calls(write(structured_output, small_tokenizer, weigh, 1200, seed), seed)
    assert len(calls) > 2
    assert {call.name for call in calls} == {"weather", "note"}
    for call in calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if call.name == "weather":
            jsonschema.validate(arguments, PLACE)


@pytest.mark.parametrize("strict", [(), ("weather",)])
def test_calls_are_compiled_before_the_answer_starts(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, strict: tuple[str, ...]
) -> None:
    """The engine's thread must not wait for the compilation of other grammars."""
    structured_output = guide_of(small_tokenizer, grammars, strict_tools=strict)
    monkeypatch.setattr(GrammarCompiler, "_create_matcher", None)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 1}}\n</tool_call>'
    for _ in range(2):
        for token in small_tokenizer.encode(call, control=True):
            assert structured_output.permits(token, False, 100)
            structured_output.consume(token, False, 100)
        assert not structured_output.in_call


def test_text_outside_calls_is_unconstrained(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    structured_output = guide_of(small_tokenizer, grammars)
    logits = np.random.default_rng(1).standard_normal(small_tokenizer.vocab_size).astype(np.float32)
    assert structured_output.restrict(logits, in_reasoning=False) is logits
    assert structured_output.restrict(logits, in_reasoning=True) is logits
    assert not structured_output.has_grammar
    opening = small_tokenizer.tool_call_open_id
    assert opening is not None
    structured_output.consume(opening, in_reasoning=True)  # reasoning may contain the tag
    assert structured_output.restrict(logits, in_reasoning=False) is logits


@pytest.mark.parametrize("cut", range(1, len(CALL_TAG)))
def test_call_tag_in_plain_text_cannot_be_completed(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, cut: int
) -> None:
    """It would open a call without constraints."""
    structured_output = guide_of(small_tokenizer, grammars)
    for byte in ("x<" + CALL_TAG[:cut]).encode():
        structured_output.consume(small_tokenizer.encode(chr(byte))[0], in_reasoning=False)
    left = structured_output.restrict(np.zeros(small_tokenizer.vocab_size, np.float32), in_reasoning=False)
    for token in range(small_tokenizer.vocab_size):
        finishes = small_tokenizer.token_bytes(token).startswith(CALL_TAG[cut:].encode())
        if token not in small_tokenizer.special_ids:
            assert bool(left[token] == -np.inf) == finishes


def test_masked_tokens_stay_masked_near_the_limit_of_a_call(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin may have masked some of the tokens that begin the shortest ending."""
    structured_output = guide_of(small_tokenizer, grammars, "<tool_call>")
    monkeypatch.setattr(Matcher, "remaining_choices", lambda *_: np.array([3, 5]))
    logits = np.full(small_tokenizer.vocab_size, -9, np.float32)
    logits[3] = -np.inf
    assert np.flatnonzero(np.isfinite(structured_output.narrow(logits, 7, 2))).tolist() == [5]
    logits[5] = -np.inf
    assert np.flatnonzero(np.isfinite(structured_output.narrow(logits, 7, 2))).tolist() == [3, 5]


def test_continued_call_follows_the_schema_of_its_tool(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    begun = 'Well\n<tool_call>\n{"name": "weather", "arguments": {"city": "B'
    structured_output = guide_of(small_tokenizer, grammars, begun)
    left = structured_output.restrict(np.zeros(small_tokenizer.vocab_size, np.float32), in_reasoning=False)
    allowed = [small_tokenizer.token_bytes(int(token)) for token in np.flatnonzero(np.isfinite(left))]
    assert allowed and all(b"onn".startswith(written) for written in allowed)
    for wrong in ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome', '<tool_call>\n{"name": "x'):
        with pytest.raises(InvalidRequestError) as caught:
            guide_of(small_tokenizer, grammars, wrong)
        assert caught.value.param == "continue_last"
    over = guide_of(small_tokenizer, grammars, begun + 'onn", "days": 1}}\n</tool_call>\n')
    logits = np.zeros(small_tokenizer.vocab_size, np.float32)
    assert over.restrict(logits, in_reasoning=False) is logits


def test_unenforceable_strict_parameters_are_refused(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    odd = [{"type": "function", "function": {"name": "weather", "parameters": {"not": {"pattern": "a"}}}}]
    with pytest.raises(InvalidRequestError, match="the parameters of weather cannot be enforced") as caught:
        guide_of(small_tokenizer, grammars, tools=odd)
    assert caught.value.param == "tools"
    assert guide_of(
        small_tokenizer, grammars, tools=odd, strict_tools=()
    ).constrains_tool_calls  # only the name is constrained


@pytest.mark.parametrize("seed", range(4))
def test_only_offered_tools_are_called(grammars: GrammarCompiler, small_tokenizer: Tokenizer, seed: int) -> None:
    """The model repeatedly opens calls, and its preferred tokens would give invalid ones."""
    structured_output, turn = guide_of(small_tokenizer, grammars, strict_tools=()), iter(range(10_000))

    def weigh(logits: np.ndarray) -> None:
        if next(turn) % 40 == 10:
            logits[small_tokenizer.tool_call_open_id] = 100
        logits[small_tokenizer.encode('"}')] += 3

    calls = found_calls(write(structured_output, small_tokenizer, weigh, 800, seed), seed)
    assert len(calls) > 2 and {call.name for call in calls} <= {"weather", "note"}
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_call_to_an_unknown_tool_is_text() -> None:
    """This model has no token for calls, so names cannot be constrained."""
    written = '<tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>'
    for offered, is_call in ((None, True), ({"note"}, True), ({"weather"}, False), (set(), False)):
        pieces = ToolCallParser(tool_names=offered).push(written)
        assert [isinstance(piece, ToolCall) for piece in pieces] == [is_call]
        assert is_call or pieces == [written]


def test_continued_call_to_an_unknown_tool_is_unconstrained(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer
) -> None:
    structured_output = guide_of(small_tokenizer, grammars, 'Well\n<tool_call>\n{"name": "x', strict_tools=())
    logits = np.zeros(small_tokenizer.vocab_size, np.float32)
    assert structured_output.restrict(logits, in_reasoning=False) is logits


def test_engine_enforces_strict_tools_without_changing_text(demo_engine: Engine) -> None:
    params = SamplingParams(max_tokens=300, temperature=0)

    def events(question: str, **options: Any) -> list[Event]:
        return list(demo_engine.generate([Message("user", question)], params, RequestOptions(**options)))

    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}]
    held = events("What is the weather in Paris?", tools=tools, strict_tools=("get_weather",))
    [call] = [event.tool_call for event in held if event.tool_call is not None]
    jsonschema.validate(json.loads(call.arguments), PLACE)
    assert held[-1].finish_reason == "tool_calls"
    free, strict = (events("What is 27 + 48?", tools=tools, strict_tools=names) for names in ((), ("get_weather",)))
    assert [(each.kind, each.text) for each in free] == [(each.kind, each.text) for each in strict]
