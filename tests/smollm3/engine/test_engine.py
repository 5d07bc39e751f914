"""The engine: its events, where streams end, and independence of successive answers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from golden.random_models import RandomModel
from scripted_tokens import (
    END,
    GREEDY,
    PROMPT,
    SMALL,
    THINK,
    THOUGHT,
    Script,
    answered,
    run,
    scripted,
    tokens_used,
    told,
)

from notso.smollm3 import ContextLengthError, Engine, EngineError, Event, InvalidRequestError, SamplingParams
from notso.smollm3.output.generation import Generation


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Load a small random model with a context of 40 tokens, without drafts, whose number depends on measured times."""
    path = SMALL.write(tmp_path_factory.mktemp("engine") / "small.gguf")
    with Engine.load(path, context_tokens=40, threads=2, speculation=False) as loaded:
        yield loaded


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return scripted(monkeypatch)


# ---------------------------------------------------------------- the stream


def test_answer_streams_reasoning_before_text(engine: Engine, script: Script) -> None:
    script.say(THINK, "plan", THOUGHT, "Done.", END)
    events = run(engine)
    assert (told(events, "reasoning"), told(events, "text")) == ("plan", "Done.")
    kinds = [event.kind for event in events]
    assert kinds == sorted(kinds, key=["reasoning", "text", "usage", "end"].index)
    assert len(events) > 6  # token by token, not all at the end
    assert events[-1].finish_reason == "stop"
    assert tokens_used(events) == (12, 6)


def test_prompt_with_open_think_tag_starts_with_reasoning(engine: Engine, script: Script) -> None:
    script.say("plan", THOUGHT, "Done.", END)
    events = run(engine, [10, 20, THINK])
    assert (told(events, "reasoning"), told(events, "text")) == ("plan", "Done.")


def test_prompt_with_closed_think_tag_yields_text_only(engine: Engine, script: Script) -> None:
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


def test_character_split_across_tokens_is_one_event(engine: Engine, script: Script) -> None:
    script.say("a🎉é", END)
    events = run(engine)
    assert [event.text for event in events[:-2]] == ["a", "🎉", "é"]


def test_incomplete_character_becomes_replacement_character(engine: Engine, script: Script) -> None:
    script.say("a", *"🎉".encode()[:2])
    events = run(engine, max_tokens=3)
    assert told(events, "text") == "a\N{REPLACEMENT CHARACTER}"


def test_max_tokens_of_one_yields_one_token(engine: Engine, script: Script) -> None:
    script.say("a")
    events = run(engine, max_tokens=1)
    assert told(events, "text") == "a"
    assert events[-1].finish_reason == "length"


def test_immediate_end_token_yields_empty_answer(engine: Engine, script: Script) -> None:
    script.say(END)
    events = run(engine)
    assert len(events) == 2
    assert events[-1].finish_reason == "stop"
    assert tokens_used(events) == (1, 0)


def test_stop_string_across_tokens_ends_the_answer(engine: Engine, script: Script) -> None:
    script.say("one STOP two", END)
    events = run(engine, stop=("STOP",))
    assert told(events, "text") == "one "
    assert events[-1].finish_reason == "stop"
    assert script.drawn == len("one STOP")


def test_partial_stop_string_is_emitted_if_not_completed(engine: Engine, script: Script) -> None:
    script.say("one STO two ST", END)
    events = run(engine, stop=("STOP",))
    assert told(events, "text") == "one STO two ST"


def test_stop_string_is_ignored_in_reasoning(engine: Engine, script: Script) -> None:
    script.say(THINK, "STOP", THOUGHT, "ok STOP", END)
    events = run(engine, stop=("STOP",))
    assert (told(events, "reasoning"), told(events, "text")) == ("STOP", "ok ")


def test_tool_call_text_becomes_a_tool_call_event(engine: Engine, script: Script) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with Engine.load(engine.info.path, context_tokens=128) as roomy:  # a call with tags as ordinary text is long
        script.say(THINK, "f", THOUGHT, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', END)
        events = run(roomy, tools=[tool])
    calls = [event.tool_call for event in events if event.tool_call is not None]
    assert [(call.name, call.arguments.replace(" ", "")) for call in calls] == [("f", '{"x":1}')]
    assert told(events, "text").strip() == ""
    assert events[-1].finish_reason == "tool_calls"


def test_tool_call_tag_without_tools_is_text(engine: Engine, script: Script) -> None:
    script.say("<tool_call>{}", END)
    assert told(run(engine), "text") == "<tool_call>{}"


def test_events_compare_by_value_and_are_immutable() -> None:
    assert Event("text", "a") == Event("text", "a")
    with pytest.raises(AttributeError):
        Event("text", "a").text = "b"  # type: ignore[misc]


# ---------------------------------------------------------------- the end of the context


def test_answer_without_max_tokens_fills_the_context(engine: Engine, script: Script) -> None:
    script.then = ord("a")
    events = run(engine)
    assert tokens_used(events) == (40 - len(PROMPT), 0)
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize("most", [40 - len(PROMPT), 40 - len(PROMPT) + 1, 1 << 31])
def test_max_tokens_is_limited_to_remaining_context(engine: Engine, script: Script, most: int) -> None:
    script.then = ord("a")
    events = run(engine, params=SamplingParams(max_tokens=most))
    assert tokens_used(events) == (40 - len(PROMPT), 0)
    assert events[-1].finish_reason == "length"


def test_answer_can_use_the_last_context_token(engine: Engine, script: Script) -> None:
    script.then = ord("a")
    events = answered(engine.generate([1] * 39, SamplingParams(max_tokens=1)))
    assert told(events, "text") == "a"


@pytest.mark.parametrize(("length", "most", "needed"), [(40, None, 41), (41, None, 42), (40, 11, 41)])
def test_generate_rejects_prompt_that_fills_the_context(
    engine: Engine, length: int, most: int | None, needed: int
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        engine.generate([1] * length, SamplingParams(max_tokens=most))
    assert (caught.value.needed_tokens, caught.value.context_tokens) == (needed, 40)
    assert caught.value.param == "messages"


def test_logits_accept_prompts_up_to_context_length(engine: Engine) -> None:
    assert engine.logits([1] * 40).shape == (40, SMALL.vocab)
    with pytest.raises(ContextLengthError):
        engine.logits([1] * 41)
    assert engine.logits([1]).shape == (1, SMALL.vocab)


# ---------------------------------------------------------------- stopping and failing


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set an event when a generation is stopped, for scripts that must wait until another thread stops it."""
    heard, stop = threading.Event(), Generation.stop

    def noted(generation: Generation) -> None:
        stop(generation)
        heard.set()

    monkeypatch.setattr(Generation, "stop", noted)
    return heard


def test_immediate_cancellation_ends_the_answer_early(engine: Engine, script: Script, stopped: threading.Event) -> None:
    script.then = ord("a")
    script.at(1, lambda: stopped.wait(60))
    events = run(engine, cancelled=lambda: True)
    assert events[-1].finish_reason == "cancelled"
    assert tokens_used(events)[0] < 40 - len(PROMPT)


def test_cancellation_during_decoding_keeps_generated_text(
    engine: Engine, script: Script, stopped: threading.Event
) -> None:
    """Cancellation arrives during the fourth step, which is the last."""
    script.then = ord("a")
    script.at(4, lambda: stopped.wait(60))
    events = run(engine, cancelled=lambda: script.drawn >= 3)
    assert told(events, "text") == "a" * tokens_used(events)[0]
    assert events[-1].finish_reason == "cancelled"
    assert 3 <= script.drawn <= 4


def test_stopped_answer_emits_held_back_text(engine: Engine, script: Script) -> None:
    script.say("one ST", *([ord("x")] * 9))
    script.at(6, lambda: generation.stop())
    generation = engine.submit(PROMPT, SamplingParams(stop=("STOP",)))
    events = answered(generation.events())
    assert told(events, "text") == "one ST"
    assert events[-1].finish_reason == "cancelled"


def test_end_token_takes_precedence_over_stop_call(engine: Engine, script: Script) -> None:
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
        raise KeyError("error in the callback")

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
def test_interrupted_answer_does_not_affect_the_next(engine: Engine, interrupt: Callable[[Engine], None]) -> None:
    engine.logits([1])
    expected = run(engine, params=GREEDY)
    interrupt(engine)
    again = run(engine, params=GREEDY)
    assert [e for e in again if e.kind != "usage"] == [e for e in expected if e.kind != "usage"]


def test_nan_logits_raise_engine_error_every_time(tmp_path: Path) -> None:
    class Spoilt(RandomModel):
        def weights(self) -> Iterator[tuple[str, np.ndarray]]:
            for name, values in SMALL.weights():
                yield name, values * np.float32(np.nan) if name == "output_norm.weight" else values

    path = Spoilt(**{name: getattr(SMALL, name) for name in RandomModel.__slots__}).write(tmp_path / "nan.gguf")
    with Engine.load(path, context_tokens=16) as engine:
        for _ in range(2):
            with pytest.raises(EngineError):
                list(engine.generate([1, 2], SamplingParams(max_tokens=2, temperature=0)))


def test_unfinished_stream_does_not_block_other_requests(engine: Engine, script: Script) -> None:
    """Not even a thread that holds an unfinished iterator blocks other requests."""
    script.then, script.pause_s = ord("a"), 0.02
    stream = engine.generate(PROMPT)
    next(stream)
    assert engine.logits([1, 2]).shape == (2, SMALL.vocab)
    other = run(engine, max_tokens=2)
    assert told(other, "text") == "aa"
    assert told([next(stream), *stream], "text").count("a") > 2


def test_closed_engine_rejects_all_calls(engine: Engine) -> None:
    one = Engine.load(engine.info.path, context_tokens=16)
    logits = one.logits([1])
    started = one.generate([1], GREEDY)
    one.close()
    one.close()
    for call in (lambda: one.logits([1]), lambda: list(started), lambda: list(one.generate([1], GREEDY))):
        with pytest.raises(InvalidRequestError, match="closed"):
            call()
    np.testing.assert_array_equal(engine.logits([1]), logits)
