"""Log probabilities are those of the model, one per token, in the event that shows the token or in the next one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from notso.smollm3 import Engine, Event, Grammar, InvalidRequestError, Message, RequestOptions, SamplingParams
from notso.smollm3.output.output_processor import OutputProcessor
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.events import TokenLogprob

SUM = [Message("user", "What is 27 + 48?")]
AGAIN = [Message("user", "Say again: 12 + 30, 12 + 30, 12 + 30, 12 + 30, 12 + 30, 12 + 30. What is 12 + 30?")]
SAMPLED = SamplingParams(max_tokens=80, temperature=1.3, seed=5, repetition_penalty=1.2, top_k=40)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def entries(events: Sequence[Event], kind: str | None = None) -> list[TokenLogprob]:
    return [entry for event in events if kind in (None, event.kind) for entry in event.logprobs]


def shown(events: Sequence[Event], kind: str) -> bytes:
    return "".join(event.text for event in events if event.kind == kind).encode()


def answered(
    engine: Engine, messages: Any, params: SamplingParams, **options: Any
) -> tuple[list[int], list[int], list[Event]]:
    """Return the tokens of prompt and answer, and the events."""
    request = engine._request(messages, params, RequestOptions(**options))
    engine._core.submit(request)
    events = list(request.generation.events())
    assert events[-1].kind == "end", events[-1]
    return list(request.sequence.prompt), request.sequence.tokens[len(request.sequence.prompt) :], events


def expected(engine: Engine, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return log probabilities (L, V) at each token of the answer, recomputed in float64 with an empty cache."""
    logits = engine.logits([*prompt, *answer])[len(prompt) - 1 : -1].astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=120, temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_equal_those_of_a_separate_computation(demo_engine: Engine, params: SamplingParams) -> None:
    """They are taken before penalties, temperature and filters, and equal those of a separate computation."""
    prompt, answer, events = answered(demo_engine, SUM, params, top_logprobs=4)
    values = expected(demo_engine, prompt, answer)
    found = entries(events)
    assert [entry.id for entry in found] == answer
    for place, entry in enumerate(found):
        assert entry.logprob == pytest.approx(values[place][answer[place]], abs=2e-4)
        ranked = np.argsort(-values[place], kind="stable")[:4]
        assert [other.logprob for other in entry.top] == pytest.approx(values[place][ranked].tolist(), abs=2e-4)
        assert [bytes(other.bytes) for other in entry.top] == [
            demo_engine.tokenizer.token_bytes(int(token)) for token in ranked
        ]
        assert all(other.top == () for other in entry.top)
    assert len(found) > 20


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (SamplingParams(max_tokens=300, temperature=0), {}),
        (SamplingParams(max_tokens=300, temperature=0), {"thinking": False}),
        (SamplingParams(max_tokens=12, temperature=0), {}),
        (SamplingParams(max_tokens=300, temperature=0, thinking_budget=5), {}),
        (SamplingParams(max_tokens=300, temperature=0, stop=("75",)), {}),
        (SamplingParams(max_tokens=60, temperature=2.0, seed=4, ignore_eos=True), {}),
        (SamplingParams(max_tokens=300, temperature=0), {"tools": [TOOL], "tool_choice": "required"}),
    ],
    ids=["whole", "no thought", "cut", "a thought cut short", "a stop string", "noise", "a call"],
)
def test_every_token_has_one_logprob(demo_engine: Engine, params: SamplingParams, options: dict[str, Any]) -> None:
    _, answer, events = answered(demo_engine, SUM, params, top_logprobs=1, **options)
    usage = next(event.usage for event in events if event.usage is not None)
    assert [entry.id for entry in entries(events)] == answer
    assert len(answer) == usage.completion_tokens


@pytest.mark.parametrize("kind", ["reasoning", "text"])
def test_logprob_bytes_contain_the_shown_text(demo_engine: Engine, kind: str) -> None:
    params = SamplingParams(max_tokens=200, temperature=0, stop=("never said", "= 7", "75!"))
    events = list(demo_engine.generate(SUM, params, RequestOptions(top_logprobs=0)))
    assert shown(events, kind) in b"".join(bytes(entry.bytes) for entry in entries(events, kind))
    assert shown(events, kind)
    assert all(entry.top == () for entry in entries(events))


def test_logprobs_are_absent_by_default(demo_engine: Engine) -> None:
    assert entries(list(demo_engine.generate(SUM, SamplingParams(max_tokens=30, temperature=0)))) == []


def test_speculation_does_not_change_logprobs(free_drafts: None) -> None:
    params = SamplingParams(max_tokens=120, temperature=0)
    results = []
    for speculation in (True, False):
        with Engine.load(speculation=speculation) as engine:
            events = list(engine.generate(AGAIN, params, RequestOptions(top_logprobs=3)))
            usage = events[-2].usage
            assert usage is not None and bool(usage.accepted_tokens) == speculation
            results.append(entries(events))
    assert results[0] == results[1]


def test_grammar_does_not_change_logprobs(demo_engine: Engine) -> None:
    grammar = Grammar("regex", "[A-Z]{5}")
    params = SamplingParams(max_tokens=50, temperature=0)
    prompt, answer, events = answered(demo_engine, SUM, params, thinking=False, grammar=grammar, top_logprobs=1)
    values = expected(demo_engine, prompt, answer)
    assert [entry.logprob for entry in entries(events)] == pytest.approx(
        [float(row[token]) for row, token in zip(values, answer, strict=True)], abs=2e-4
    )
    assert any(entry.logprob < entry.top[0].logprob for entry in entries(events))


@pytest.mark.parametrize("value", [-1, 21, True, 1.5, "3"])
def test_invalid_top_logprobs_are_refused(demo_engine: Engine, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        demo_engine.submit(SUM, options=RequestOptions(top_logprobs=value))
    assert caught.value.param == "top_logprobs"


# ---------------------------------------------------------------- assignment to events


def spoken(tokenizer: Tokenizer, tokens: Sequence[int], **options: Any) -> list[Event]:
    """Return the events of an answer with these tokens; the log probability of the nth token is -n."""
    options = {"stop": (), "find_tool_calls": False, **options}
    answer = OutputProcessor(tokenizer, [], **options)
    events: list[Event] = []
    for place, token in enumerate(tokens):
        events += answer.push(token, TokenLogprob(tokenizer.token_text(token), (), -place))
        if answer.finish_reason is not None:
            break
    events += answer.finish("length")
    return [*events, Event("end", logprobs=answer.unreported_logprobs)]


def places(events: Sequence[Event]) -> list[tuple[str, list[int]]]:
    told = [event for event in events if event.text or (event.logprobs and event.kind == "reasoning")]
    return [(event.text, [-int(entry.logprob) for entry in event.logprobs]) for event in told]


def test_logprobs_arrive_with_held_back_text(small_tokenizer: Tokenizer) -> None:
    tokens = [token for part in ("a", "b", "c", "d") for token in small_tokenizer.encode(part)]
    assert places(spoken(small_tokenizer, tokens, stop=("bcx",))) == [("a", [0]), ("bcd", [1, 2, 3])]


def test_logprob_is_assigned_to_the_first_character_of_its_token(small_tokenizer: Tokenizer) -> None:
    token = small_tokenizer.id_of("def") or small_tokenizer.id_of(" the")
    assert token is not None
    text = small_tokenizer.token_text(token)
    [x] = small_tokenizer.encode("x")
    assert places(spoken(small_tokenizer, [token, x], stop=(text[-1] + "y",))) == [
        (text[:-1], [0]),
        (text[-1] + "x", [1]),
    ]


def test_logprobs_of_partial_characters_arrive_with_the_character(small_tokenizer: Tokenizer) -> None:
    tokens = [_byte(small_tokenizer, byte) for byte in "🦜".encode()]
    [x] = small_tokenizer.encode("x")
    assert places(spoken(small_tokenizer, [x, *tokens, x])) == [("x", [0]), ("🦜", [1, 2, 3, 4]), ("x", [5])]
    assert places(spoken(small_tokenizer, [x, *tokens[:2]])) == [("x", [0]), ("\ufffd", [1, 2])]


def _byte(tokenizer: Tokenizer, byte: int) -> int:
    return next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([byte]))


def test_logprobs_of_hidden_tokens_go_with_the_next_text(small_tokenizer: Tokenizer) -> None:
    """Hidden tokens: tags, newlines around them, a tool call, a stop string, and tokens that end the answer."""
    encode = small_tokenizer.encode
    think, thought = encode("<think>", control=True), encode("</think>", control=True)
    [newline], [hm], [yes] = encode("\n"), encode("h"), encode("y")
    said = [*think, newline, hm, newline, *thought, newline, yes]
    events = spoken(small_tokenizer, said)
    assert places(events) == [("h", [0, 1, 2]), ("", [3, 4]), ("y", [5, 6])], "the tag belongs to the reasoning"
    assert [event.kind for event in events if event.logprobs] == ["reasoning", "reasoning", "text"]
    call = encode('<tool_call>\n{"name": "f", "arguments": {"a": "y"}}\n</tool_call>', control=True)
    found = places(spoken(small_tokenizer, [yes, *call, newline, yes], find_tool_calls=True))
    assert found == [("y", [0]), ("y", list(range(1, len(call) + 3)))]
    stopped = spoken(small_tokenizer, [yes, *encode("STOP"), yes], stop=("STOP",))
    assert places(stopped) == [("y", [0])]


def test_each_logprob_occurs_once_in_random_answers(small_tokenizer: Tokenizer) -> None:
    """Each token occurs once, in order within a kind, and the tokens of every shown character are included."""
    chance = random.Random(3)
    parts = [
        "hm",
        "\n",
        " the",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "🦜é",
        '{"name": "f"}',
        "stop",
        "st",
        "<",
    ]
    for _ in range(300):
        text = "".join(chance.choice(parts) for _ in range(chance.randrange(1, 14)))
        tokens = small_tokenizer.encode(text, control=chance.random() < 0.5)
        events = spoken(small_tokenizer, tokens, stop=("stop",), find_tool_calls=chance.random() < 0.5)
        for kind in ("reasoning", "text"):
            numbers = [-int(entry.logprob) for event in events if event.kind == kind for entry in event.logprobs]
            assert numbers == sorted(set(numbers))
            come = b"".join(small_tokenizer.token_bytes(tokens[number]) for number in numbers).decode(errors="replace")
            position = 0
            for character in shown(events, kind).decode():
                position = come.find(character, position) + 1
                assert position, (text, events)
        together = [-int(entry.logprob) for event in events for entry in event.logprobs]
        assert sorted(together) == list(range(len(together))), "each token must occur once"
        assert len(together) == len(tokens) or b"stop" in small_tokenizer.decode(tokens).encode()


@pytest.mark.parametrize("held", [1, 2, 3])
def test_reasoning_cut_within_a_character_shows_no_replacement_char(small_tokenizer: Tokenizer, held: int) -> None:
    """The reasoning ends by the model's tag, or by ours when the budget is used up."""
    [think], [thought] = (small_tokenizer.encode(tag, control=True) for tag in ("<think>", "</think>"))
    [newline], [hm], [yes] = (small_tokenizer.encode(text) for text in ("\n", "h", "y"))
    parts = [_byte(small_tokenizer, byte) for byte in "🦜".encode()][:held]
    for closing in ([thought, newline], [newline, thought, newline]):
        answer = OutputProcessor(small_tokenizer, [], (), False)
        events = [event for token in (think, hm, *parts) for event in answer.push(token)]
        if closing[0] == newline:
            answer.drop_partial_character()
        events += [event for token in (*closing, yes) for event in answer.push(token)]
        events += answer.finish("stop")
        assert [(event.kind, event.text) for event in events] == [("reasoning", "h"), ("text", "y")]
