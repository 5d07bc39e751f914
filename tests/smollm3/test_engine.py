"""The engine: streams of events, where they end, what is refused, and that no answer leaves a trace for the next.

Most tests script the tokens that are "sampled", so that they say exactly what the stream must be; the model still runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.random_models import RANDOM, RandomModel

from notso.qtensor import backend
from notso.qtensor.errors import GGUFError, KernelChoiceError
from notso.smollm3 import (
    ContextLengthError,
    Engine,
    EngineError,
    Event,
    InvalidRequestError,
    Message,
    ModelFileError,
    SamplingParams,
)
from notso.smollm3 import engine as engine_module

SMALL = replace(RANDOM, layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=300)
END, THINK, THOUGHT = 258, 259, 260
"""Ids of `<|im_end|>`, `<think>` and `</think>` in a random model; those below 256 are bytes."""
PROMPT = [10, 20, 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A small random model with room for 40 tokens."""
    path = SMALL.write(tmp_path_factory.mktemp("engine") / "small.gguf")
    with Engine.load(path, context_tokens=40, threads=2) as loaded:
        yield loaded


@dataclass
class Script:
    """Tokens in place of sampled ones; after the last it raises, or goes on with `then`."""

    tokens: list[int] = field(default_factory=list)
    then: int | None = None
    drawn: int = 0
    pause_s: float = 0.0
    actions: dict[int, Callable[[], None]] = field(default_factory=dict)

    def at(self, draw: int, action: Callable[[], None]) -> None:
        """What to do just before a draw (1 is the first) returns."""
        self.actions[draw] = action

    def say(self, *parts: int | str) -> None:
        """Ids, and texts as their bytes."""
        for part in parts:
            self.tokens += [part] if isinstance(part, int) else part.encode()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    state = Script()

    class Scripted:
        def __init__(self, *_: object) -> None:
            pass

        def sample(self, logits: np.ndarray, history: Sequence[int], position: int) -> int:
            assert np.isfinite(logits).all()
            assert len(history) == position
            state.drawn += 1
            time.sleep(state.pause_s)
            state.actions.get(state.drawn, lambda: None)()
            if state.drawn > len(state.tokens) and state.then is not None:
                return state.then
            return state.tokens[state.drawn - 1]

    monkeypatch.setattr(engine_module, "Sampler", Scripted)
    return state


def answered(events: Iterable[Event]) -> list[Event]:
    """Without those that tell of the way to the first token."""
    return [event for event in events if event.kind not in ("queued", "progress")]


def run(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> list[Event]:
    """All events, after a look at their grammar: reasoning, text and calls, one usage, one end."""
    params = options.pop("params", None) or SamplingParams(
        **{name: options.pop(name) for name in ("max_tokens", "stop", "seed", "logit_bias") if name in options}
    )
    events = answered(engine.generate(prompt, params, **options))
    assert [event.kind for event in events[-2:]] == ["usage", "end"]
    assert {event.kind for event in events[:-2]} <= {"reasoning", "text", "tool_call"}
    for event in events[:-2]:
        assert bool(event.text) == (event.kind != "tool_call")
        assert event.usage is None
        assert event.finish_reason is None
    return events


def told(events: list[Event], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def tokens_used(events: list[Event]) -> tuple[int, int]:
    """Completion and reasoning tokens."""
    usage = events[-2].usage
    assert usage is not None
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.prompt_ms > 0
    assert usage.completion_ms >= 0
    return usage.completion_tokens, usage.reasoning_tokens


# ---------------------------------------------------------------- the stream


def test_an_answer_with_reasoning(engine: Engine, script: Script) -> None:
    script.say(THINK, "plan", THOUGHT, "Done.", END)
    events = run(engine)
    assert (told(events, "reasoning"), told(events, "text")) == ("plan", "Done.")
    kinds = [event.kind for event in events]
    assert kinds == sorted(kinds, key=["reasoning", "text", "usage", "end"].index)
    assert len(events) > 6  # token by token, not all at the end
    assert events[-1].finish_reason == "stop"
    assert tokens_used(events) == (12, 6)


def test_a_prompt_that_opens_the_thinking(engine: Engine, script: Script) -> None:
    script.say("plan", THOUGHT, "Done.", END)
    events = run(engine, [10, 20, THINK])
    assert (told(events, "reasoning"), told(events, "text")) == ("plan", "Done.")


def test_a_prompt_that_closed_the_thinking(engine: Engine, script: Script) -> None:
    script.say("Done.", END)
    events = run(engine, [THINK, 10, THOUGHT])
    assert (told(events, "reasoning"), told(events, "text")) == ("", "Done.")


def test_reasoning_cut_off_by_max_tokens(engine: Engine, script: Script) -> None:
    script.say(THINK, "planning")
    events = run(engine, max_tokens=5)
    assert (told(events, "reasoning"), told(events, "text")) == ("plan", "")
    assert events[-1].finish_reason == "length"
    assert tokens_used(events) == (5, 5)
    assert script.drawn == 5


def test_a_character_split_over_tokens_comes_whole(engine: Engine, script: Script) -> None:
    script.say("a🎉é", END)
    events = run(engine)
    assert [event.text for event in events[:-2]] == ["a", "🎉", "é"]


def test_a_character_cut_off_is_shown_as_such(engine: Engine, script: Script) -> None:
    script.say("a", *"🎉".encode()[:2])
    events = run(engine, max_tokens=3)
    assert told(events, "text") == "a\N{REPLACEMENT CHARACTER}"


def test_max_tokens_of_one(engine: Engine, script: Script) -> None:
    script.say("a")
    events = run(engine, max_tokens=1)
    assert told(events, "text") == "a"
    assert events[-1].finish_reason == "length"


def test_an_end_at_once(engine: Engine, script: Script) -> None:
    script.say(END)
    events = run(engine)
    assert len(events) == 2
    assert events[-1].finish_reason == "stop"
    assert tokens_used(events) == (1, 0)


def test_a_stop_string_over_several_tokens(engine: Engine, script: Script) -> None:
    script.say("one STOP two", END)
    events = run(engine, stop=("STOP",))
    assert told(events, "text") == "one "
    assert events[-1].finish_reason == "stop"
    assert script.drawn == len("one STOP")


def test_the_beginning_of_a_stop_string_is_given_back_if_it_does_not_go_on(engine: Engine, script: Script) -> None:
    script.say("one STO two ST", END)
    events = run(engine, stop=("STOP",))
    assert told(events, "text") == "one STO two ST"


def test_a_stop_string_in_the_reasoning_does_not_stop(engine: Engine, script: Script) -> None:
    script.say(THINK, "STOP", THOUGHT, "ok STOP", END)
    events = run(engine, stop=("STOP",))
    assert (told(events, "reasoning"), told(events, "text")) == ("STOP", "ok ")


def test_a_tool_call(engine: Engine, script: Script) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with Engine.load(engine.info.path, context_tokens=128) as roomy:  # a call with its tags spelt out is long
        script.say(THINK, "f", THOUGHT, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', END)
        events = run(roomy, tools=[tool])
    calls = [event.tool_call for event in events if event.tool_call is not None]
    assert [(call.name, call.arguments.replace(" ", "")) for call in calls] == [("f", '{"x":1}')]
    assert told(events, "text").strip() == ""
    assert events[-1].finish_reason == "tool_calls"


def test_without_tools_a_call_is_text(engine: Engine, script: Script) -> None:
    script.say("<tool_call>{}", END)
    assert told(run(engine), "text") == "<tool_call>{}"


def test_events_are_values() -> None:
    assert Event("text", "a") == Event("text", "a")
    with pytest.raises(AttributeError):
        Event("text", "a").text = "b"  # type: ignore[misc]


# ---------------------------------------------------------------- the end of the context


def test_without_max_tokens_an_answer_may_fill_the_context(engine: Engine, script: Script) -> None:
    script.then = ord("a")
    events = run(engine)
    assert tokens_used(events) == (40 - len(PROMPT), 0)
    assert events[-1].finish_reason == "length"


def test_the_last_token_of_the_context_can_be_answered(engine: Engine, script: Script) -> None:
    script.then = ord("a")
    events = answered(engine.generate([1] * 39, SamplingParams(max_tokens=1)))
    assert told(events, "text") == "a"


@pytest.mark.parametrize(("length", "most", "needed"), [(40, None, 41), (41, None, 42), (30, 11, 41), (1, 1000, 1001)])
def test_what_cannot_fit_is_refused_when_asked(engine: Engine, length: int, most: int | None, needed: int) -> None:
    with pytest.raises(ContextLengthError) as caught:
        engine.generate([1] * length, SamplingParams(max_tokens=most))
    assert (caught.value.needed_tokens, caught.value.context_tokens) == (needed, 40)
    assert caught.value.param == "messages"


def test_logits_fill_the_context_but_no_more(engine: Engine) -> None:
    assert engine.logits([1] * 40).shape == (40, SMALL.vocab)
    with pytest.raises(ContextLengthError):
        engine.logits([1] * 41)
    assert engine.logits([1]).shape == (1, SMALL.vocab)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("ids", [[], [-1], [300], [1 << 40], [1, 2, 300]], ids=repr)
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, ids: list[int]) -> None:
    for call in (engine.logits, engine.generate):
        with pytest.raises(InvalidRequestError):
            call(ids)


@pytest.mark.parametrize("ids", ["hello", ["a"], [1.5], [None], [[1]], [1, "x"], [Message("user", "a"), 5]], ids=repr)
def test_what_is_no_list_of_ids_is_refused(engine: Engine, ids: Any) -> None:
    with pytest.raises((InvalidRequestError, ModelFileError)):
        engine.generate(ids)


def test_ids_may_be_a_tuple_or_an_array(engine: Engine) -> None:
    expected = engine.logits([1, 2, 3])
    np.testing.assert_array_equal(engine.logits((1, 2, 3)), expected)
    np.testing.assert_array_equal(engine.logits(np.array([1, 2, 3], np.uint16)), expected)


def test_a_bias_on_no_token_is_refused_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(PROMPT, SamplingParams(logit_bias={300: 1.0}))
    assert caught.value.param == "logit_bias"


def test_a_file_without_a_template_takes_ids_only(engine: Engine) -> None:
    for call in (engine.generate, engine.render, engine.encode_chat):
        with pytest.raises(ModelFileError, match="no chat template"):
            call([Message("user", "hello")])


@pytest.mark.parametrize("context", [0, -1, 1025, 1 << 40])
def test_a_context_that_cannot_be_is_refused(engine: Engine, context: int) -> None:
    with pytest.raises(InvalidRequestError, match="from 1 to 1,024") as caught:
        Engine.load(engine.info.path, context_tokens=context)
    assert caught.value.param == "context_tokens"


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    for path in (tmp_path / "text.gguf", tmp_path / "nothing.gguf", tmp_path, str(tmp_path / "text.gguf")):
        with pytest.raises(GGUFError):
            Engine.load(path)


def test_kernels_that_do_not_exist_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, own_kernels: None
) -> None:
    monkeypatch.setenv(backend.KERNELS_VARIABLE, "abacus")
    with pytest.raises(KernelChoiceError, match="generic"):
        Engine.load(engine.info.path, context_tokens=16)
    monkeypatch.setenv(backend.KERNELS_VARIABLE, "generic")
    with Engine.load(engine.info.path, context_tokens=16, threads=3) as slow:
        assert (slow.info.kernels, slow.info.threads) == ("generic", 3)


# ---------------------------------------------------------------- sampling


def answer(engine: Engine, **params: Any) -> str:
    return told(list(engine.generate(PROMPT, SamplingParams(**({"max_tokens": 12} | params)))), "text")


def test_a_seed_decides_the_answer(engine: Engine) -> None:
    warm = {"temperature": 2.0, "top_p": 1.0}
    answers = {seed: answer(engine, seed=seed, **warm) for seed in range(5)}
    assert len(set(answers.values())) == 5
    assert {seed: answer(engine, seed=seed, **warm) for seed in reversed(range(5))} == answers


def test_without_a_seed_each_answer_is_drawn_anew(engine: Engine) -> None:
    assert len({answer(engine, temperature=2.0, top_p=1.0) for _ in range(4)}) > 1


def test_greedy_takes_the_likeliest_token_each_time(engine: Engine) -> None:
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(engine.logits(ids)[-1].argmax()))
    assert END not in ids
    events = run(engine, params=GREEDY)
    everything = told(events, "reasoning") + told(events, "text")
    assert everything == engine.tokenizer.decode(ids[len(PROMPT) :], skip_control=True)
    assert everything == answer(engine, temperature=0, seed=5) + told(events, "reasoning")


def test_a_bias_forces_a_token_or_rules_it_out(engine: Engine) -> None:
    assert answer(engine, temperature=0, logit_bias={ord("x"): 100.0}) == "x" * 12
    first = int(engine.logits(PROMPT)[-1].argmax())
    ruled_out = run(engine, params=SamplingParams(max_tokens=1, temperature=0, logit_bias={first: -100.0}))
    assert told(ruled_out, "text") != told(run(engine, params=replace(GREEDY, max_tokens=1)), "text")


# ---------------------------------------------------------------- stopping and failing


def test_cancelled_before_anything_was_read(engine: Engine) -> None:
    events = run(engine, cancelled=lambda: True)
    assert events[-1].finish_reason == "cancelled"
    assert tokens_used(events)[0] < 40 - len(PROMPT)


def test_cancelled_on_the_way(engine: Engine, script: Script) -> None:
    """Three steps are waited for, and the one that was under way is the last."""
    script.then, script.pause_s = ord("a"), 0.1
    events = run(engine, cancelled=lambda: script.drawn >= 3)
    assert told(events, "text") == "a" * tokens_used(events)[0]
    assert events[-1].finish_reason == "cancelled"
    assert 3 <= script.drawn <= 4


def test_a_stopped_answer_gives_back_what_was_held(engine: Engine, script: Script) -> None:
    script.say("one ST", *([ord("x")] * 9))
    script.at(6, lambda: generation.stop())
    generation = engine.submit(PROMPT, SamplingParams(stop=("STOP",)))
    events = answered(generation.events())
    assert told(events, "text") == "one ST"
    assert events[-1].finish_reason == "cancelled"


def test_an_end_token_wins_over_being_stopped(engine: Engine, script: Script) -> None:
    script.say("a", END)
    script.at(2, lambda: generation.stop())
    generation = engine.submit(PROMPT)
    assert list(generation.events())[-1].finish_reason == "stop"


def interrupted_by_closing(engine: Engine) -> None:
    stream = engine.generate(PROMPT, SamplingParams(temperature=2.0, seed=1))
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def interrupted_by_forgetting(engine: Engine) -> None:
    stream = engine.generate([*PROMPT, 7, 7], SamplingParams(temperature=2.0, seed=1))
    next(stream)
    del stream
    gc.collect()


def interrupted_by_cancelling(engine: Engine) -> None:
    calls = iter([False, False, False])
    list(engine.generate([*PROMPT, 8], SamplingParams(temperature=2.0, seed=1), cancelled=lambda: next(calls, True)))


def interrupted_by_failing(engine: Engine) -> None:
    def fail() -> bool:
        raise KeyError("somebody else's bug")

    with pytest.raises(KeyError):
        list(engine.generate([*PROMPT, 9], GREEDY, cancelled=fail))


def unstarted(engine: Engine) -> None:
    engine.generate(PROMPT, GREEDY)


@pytest.mark.parametrize(
    "interrupt",
    [
        interrupted_by_closing,
        interrupted_by_forgetting,
        interrupted_by_cancelling,
        interrupted_by_failing,
        unstarted,
    ],
)
def test_after_an_interrupted_answer_the_next_is_as_ever(engine: Engine, interrupt: Callable[[Engine], None]) -> None:
    engine.logits([1])
    expected = run(engine, params=GREEDY)
    interrupt(engine)
    again = run(engine, params=GREEDY)
    assert [e for e in again if e.kind != "usage"] == [e for e in expected if e.kind != "usage"]


def test_logits_that_are_not_numbers_are_an_error_each_time(tmp_path: Path) -> None:
    class Spoilt(RandomModel):
        def weights(self) -> Iterator[tuple[str, np.ndarray]]:
            for name, values in SMALL.weights():
                yield name, values * np.float32(np.nan) if name == "output_norm.weight" else values

    path = Spoilt(**{name: getattr(SMALL, name) for name in RandomModel.__slots__}).write(tmp_path / "nan.gguf")
    with Engine.load(path, context_tokens=16) as engine:
        for _ in range(2):
            with pytest.raises(EngineError):
                list(engine.generate([1, 2], SamplingParams(max_tokens=2, temperature=0)))


def test_an_answer_under_way_keeps_nobody_waiting(engine: Engine, script: Script) -> None:
    """Not even the thread that holds an unfinished iterator."""
    script.then, script.pause_s = ord("a"), 0.02
    stream = engine.generate(PROMPT)
    next(stream)
    assert engine.logits([1, 2]).shape == (2, SMALL.vocab)
    other = run(engine, max_tokens=2)
    assert told(other, "text") == "aa"
    assert told([next(stream), *stream], "text").count("a") > 2


def test_a_closed_engine_answers_nothing(engine: Engine) -> None:
    one = Engine.load(engine.info.path, context_tokens=16)
    logits = one.logits([1])
    started = one.generate([1], GREEDY)
    one.close()
    one.close()
    for call in (lambda: one.logits([1]), lambda: list(started), lambda: list(one.generate([1], GREEDY))):
        with pytest.raises(InvalidRequestError, match="closed"):
            call()
    np.testing.assert_array_equal(engine.logits([1]), logits)


# ---------------------------------------------------------------- what is known of a model


def test_what_an_engine_says_of_a_file(engine: Engine) -> None:
    info = engine.info
    assert (info.name, info.is_demo, info.context_tokens, info.threads) == ("random weights", False, 40, 2)
    assert info.size_bytes == Path(info.path).stat().st_size
    assert info.parameter_count == sum(int(np.prod(shape)) for shape, _ in SMALL.tensors().values())
    assert info.quantisation == {"F32": 2 + 9 * 4}
    assert info.kernels in backend.available_kernels()


def test_the_context_is_what_was_trained_unless_asked(engine: Engine) -> None:
    with Engine.load(engine.info.path) as one:
        assert one.info.context_tokens == SMALL.context
    with Engine.load(engine.info.path, context_tokens=2 * SMALL.context) as two:
        assert two.info.context_tokens == 2 * SMALL.context


# ---------------------------------------------------------------- the demo model


def test_no_argument_loads_the_demo_model(demo_engine: Engine) -> None:
    assert demo_engine.info.is_demo
    assert set(demo_engine.info.quantisation) == {"Q4_K", "Q6_K", "F32"}
    assert demo_engine.info.context_tokens == demo_engine.config.max_position_embeddings


@pytest.mark.parametrize("thinking", [True, False])
def test_the_demo_model_thinks_if_it_is_to(demo_engine: Engine, thinking: bool) -> None:
    params = SamplingParams(max_tokens=200, temperature=0)
    events = list(demo_engine.generate([Message("user", "hello")], params, thinking=thinking))
    assert bool(told(events, "reasoning")) is thinking
    assert told(events, "text").strip()
    assert not any(tag in event.text for event in events for tag in ("<think>", "</think>", "<|im_end|>"))
    assert events[-1].finish_reason == "stop"


def test_the_ids_of_a_chat_are_those_of_its_text(demo_engine: Engine) -> None:
    messages = [Message("system", "Be brief."), Message("user", "hello")]
    text = demo_engine.render(messages, thinking=False)
    assert demo_engine.encode_chat(messages, thinking=False) == demo_engine.tokenizer.encode(text, control=True)
    assert demo_engine.tokenizer.decode(demo_engine.encode_chat(messages), skip_control=False) == demo_engine.render(
        messages
    )
