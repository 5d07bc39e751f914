"""The engine contract that the web layer relies on, checked on the scripted engine and on the real one with the demo
model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say
from smollm3.held_engine import held

from notso.smollm3 import (
    ContextLengthError,
    Engine,
    EngineStats,
    Event,
    Message,
    NotsoError,
    RequestOptions,
    SamplingParams,
    Tool,
)
from notso.web.engine.port import ChatEngine, Generation
from notso.web.engine.remote.remote_engine import RemoteEngine

QUESTION = (Message("user", "What is 27 + 48?"),)
GREEDY = SamplingParams(temperature=0.0)
LONG = "Tell me everything you know about SmolLM3, and then about yourself."


def endless(messages: object, thinking: bool) -> Iterator[Event]:
    while True:
        yield from say("word ", "hm " if thinking else "")


@pytest.fixture(scope="module", params=["scripted", "demo", "remote scripted", "remote demo"])
def engine(request: pytest.FixtureRequest, elsewhere: Elsewhere) -> Iterator[ChatEngine]:
    engine: ChatEngine = ScriptedEngine(slots=4) if "scripted" in request.param else Engine.load()
    if "remote" in request.param:
        with elsewhere(engine) as remote:
            BEHIND[remote] = engine
            yield remote
            del BEHIND[remote]
    else:
        yield engine
    engine.close()


Elsewhere = Callable[[ChatEngine], contextlib.AbstractContextManager[ChatEngine]]
BEHIND: dict[ChatEngine, ChatEngine] = {}
"""Remote engine -> the local engine that computes for it."""


def scripted(engine: ChatEngine) -> ScriptedEngine | None:
    """Return the scripted engine, local or behind a remote one; None for the real engine."""
    behind = BEHIND.get(engine, engine)
    return behind if isinstance(behind, ScriptedEngine) else None


@contextlib.contextmanager
def waiting(engine: ChatEngine) -> Iterator[None]:
    """Hold the engine so that it emits no events."""
    engine = BEHIND.get(engine, engine)
    if isinstance(engine, Engine):
        with held(engine):
            yield
    else:
        assert isinstance(engine, ScriptedEngine)
        engine.gate.clear()
        yield
        engine.gate.set()


def kinds(events: list[Event]) -> list[str]:
    """Return the event kinds in order, with consecutive repetitions removed."""
    return [event.kind for at, event in enumerate(events) if at == 0 or events[at - 1].kind != event.kind]


def text(events: list[Event], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def ended(generation: Generation, seconds: float = 60) -> list[Event]:
    deadline = time.monotonic() + seconds
    while not generation.finished:
        assert time.monotonic() < deadline, "the generation did not end"
        time.sleep(0.005)
    return generation.read()


def test_text_prompt_is_completed_and_rejects_continue_last(engine: ChatEngine) -> None:
    events = list(engine.submit("Once upon a time", SamplingParams(temperature=0.0, max_tokens=20)).events())
    assert events[-1].kind == "end"
    with pytest.raises(NotsoError):
        engine.submit("Once upon a time", options=RequestOptions(continue_last=True))


def test_detokenize_reverses_tokenize(engine: ChatEngine) -> None:
    ids = engine.tokenize("Grüße, 27!")
    assert ids and engine.detokenize(ids) == "Grüße, 27!"
    assert b"".join(engine.token_bytes(ids)).decode() == "Grüße, 27!"
    assert [engine.detokenize([id]) for id in ids] == [
        each.decode("utf-8", "replace") for each in engine.token_bytes(ids)
    ]
    assert engine.tokenize("") == [] and engine.detokenize([]) == "" and engine.token_bytes([]) == []


def test_prompt_can_be_rendered_and_counted(engine: ChatEngine) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert "27 + 48" in engine.render(QUESTION)
    assert engine.count_tokens(QUESTION, RequestOptions(tools=[tool])) > engine.count_tokens(QUESTION)


@pytest.mark.parametrize("alternatives", [None, 0, 2])
def test_events_contain_requested_logprobs(engine: ChatEngine, alternatives: int | None) -> None:
    events = list(engine.submit(QUESTION, GREEDY, RequestOptions(top_logprobs=alternatives)).events())
    for kind in ("reasoning", "text"):
        entries = [entry for event in events if event.kind == kind for entry in event.logprobs]
        joined = b"".join(bytes(entry.bytes) for entry in entries).decode()
        assert not joined if alternatives is None else text(events, kind) in joined
        assert all(entry.logprob <= 0 and len(entry.top) == alternatives for entry in entries)


def test_invalid_request_options_are_rejected(engine: ChatEngine) -> None:
    for options in ({"top_logprobs": 21}, {"tool_choice": "often"}, {"owner": "\ud800"}, {"when_full": "explode"}):
        with pytest.raises(NotsoError):
            engine.submit(QUESTION, GREEDY, RequestOptions(**options))  # type: ignore[arg-type]


def test_answer_events_arrive_in_order(engine: ChatEngine) -> None:
    events = list(engine.submit(QUESTION, GREEDY).events())
    assert [kind for kind in kinds(events) if kind != "queued"] == ["progress", "reasoning", "text", "usage", "end"]
    assert events[-1].finish_reason == "stop"
    usage = events[-2].usage
    assert usage is not None and usage.completion_tokens > usage.reasoning_tokens > 0
    tokens = [event.tokens for event in events if event.kind in ("reasoning", "text")]
    assert tokens == sorted(tokens) and tokens[0] >= 1


def test_prompt_progress_is_monotonic(engine: ChatEngine) -> None:
    events = list(engine.submit((Message("user", "one two three " * 60),), GREEDY).events())
    steps = [event.progress for event in events if event.progress is not None]
    done = [step.done_tokens for step in steps]
    assert done == sorted(done) and {step.total_tokens for step in steps} == {steps[0].total_tokens}
    assert all(0 <= step.cached_tokens <= step.done_tokens <= step.total_tokens for step in steps)


def test_disabled_thinking_emits_no_reasoning(engine: ChatEngine) -> None:
    assert "reasoning" not in kinds(list(engine.submit(QUESTION, GREEDY, RequestOptions(thinking=False)).events()))


def test_event_log_can_be_read_from_any_position(engine: ChatEngine) -> None:
    generation = engine.submit(QUESTION, GREEDY)
    events = list(generation.events())
    assert generation.finished
    assert generation.read() == events == list(generation.events())
    assert generation.read(3) == events[3:] == list(generation.events(3))
    assert generation.read(len(events)) == []


def test_subscriber_is_notified_of_events_and_end(engine: ChatEngine) -> None:
    generation = engine.submit(QUESTION, GREEDY)
    heard = threading.Event()
    generation.subscribe(heard.set)
    seen: list[Event] = []
    deadline = time.monotonic() + 60
    while not (seen and seen[-1].kind == "end"):
        assert heard.wait(deadline - time.monotonic()), "the listener was not notified of new events"
        heard.clear()
        seen += generation.read(len(seen))
    assert seen == list(generation.events())


def test_stop_ends_generation_promptly(engine: ChatEngine) -> None:
    if (script := scripted(engine)) is not None:
        script.script, before = endless, script.script
        script.pace_seconds = 0.001
    generation = engine.submit((Message("user", LONG),), SamplingParams(temperature=2.0, max_tokens=3000))
    while not any(event.kind in ("reasoning", "text") for event in generation.read()):
        assert not generation.finished
        time.sleep(0.001)
    generation.stop()
    seen = len(generation.read())
    events = ended(generation)
    if engine not in BEHIND:  # a remote engine receives the stop later, so the limit does not apply
        assert len(events) - seen < 12, "after a stop, only the current step and held-back text may follow"
    assert [event.kind for event in events[-2:]] == ["usage", "end"]
    if script is not None:
        script.script, script.pace_seconds = before, 0.0
        assert events[-1].finish_reason == "cancelled"


def test_queued_generation_can_be_stopped() -> None:
    engine = ScriptedEngine(slots=1)
    engine.gate.clear()
    first, second = engine.submit(QUESTION), engine.submit(QUESTION)
    second.stop()
    assert ended(second)[-1].finish_reason == "cancelled"
    assert not first.finished
    engine.gate.set()
    ended(first)


def test_answer_now_shortens_reasoning(engine: ChatEngine) -> None:
    whole = list(engine.submit(QUESTION, GREEDY).events())
    with waiting(engine):
        generation = engine.submit(QUESTION, GREEDY)
        generation.answer_now()
        if isinstance(engine, RemoteEngine):
            engine._link._steering.join()  # wait until the remote engine has received the request
    hurried = ended(generation)
    assert len(text(hurried, "reasoning")) < len(text(whole, "reasoning"))
    assert text(hurried, "text") and hurried[-1].finish_reason == "stop"


def test_thinking_budget_limits_reasoning(engine: ChatEngine) -> None:
    params = SamplingParams(temperature=0.0, thinking_budget=4)
    events = list(engine.submit(QUESTION, params).events())
    usage = events[-2].usage
    assert usage is not None and usage.reasoning_tokens < 12
    assert text(events, "text")


def test_continue_last_returns_only_new_text(engine: ChatEngine) -> None:
    answered = (*QUESTION, Message("assistant", "27 + 48 is"))
    events = list(engine.submit(answered, GREEDY, RequestOptions(thinking=False, continue_last=True)).events())
    assert not text(events, "text").startswith("27 + 48 is"), "only the new text is sent"
    assert events[-1].finish_reason == "stop"


def test_unfinished_reasoning_is_continued(engine: ChatEngine) -> None:
    thinking = (*QUESTION, Message("assistant", "", reasoning_content="27 + 48"))
    events = list(engine.submit(thinking, GREEDY, RequestOptions(continue_last=True)).events())
    assert text(events, "reasoning") and not text(events, "reasoning").startswith("27 + 48")
    assert text(events, "text")


def test_concurrent_generations_return_same_answer(engine: ChatEngine) -> None:
    generations = [engine.submit(QUESTION, GREEDY, RequestOptions(owner=str(number))) for number in range(6)]
    answers = {text(ended(generation), "text") for generation in generations}
    assert len(answers) == 1


def test_token_count_and_estimate_are_in_range(engine: ChatEngine) -> None:
    short, longer = engine.count_tokens(QUESTION), engine.count_tokens((Message("user", "What is 27 + 48? " * 9),))
    assert 0 < short < longer
    ended(engine.submit(QUESTION, GREEDY, RequestOptions(date=date(2025, 7, 8))))
    estimate = engine.estimate(QUESTION, RequestOptions(date=date(2025, 7, 8)))
    assert 0 <= estimate.cached_tokens <= estimate.prompt_tokens
    assert estimate.seconds is None or estimate.seconds >= 0


def test_token_count_matches_reported_usage(engine: ChatEngine) -> None:
    parameters: Any = {"type": "object", "properties": {}}
    tools: list[Tool] = [{"name": "clock", "description": "Say the time", "parameters": parameters}]
    options = RequestOptions(tools=tools, date=date(2025, 7, 8))
    events = ended(engine.submit(QUESTION, GREEDY, options))
    (usage,) = (event.usage for event in events if event.usage is not None)
    assert usage.prompt_tokens == engine.count_tokens(QUESTION, options) > engine.count_tokens(QUESTION)


def test_speculative_prefill_does_not_change_answer(engine: ChatEngine) -> None:
    options: dict[str, Any] = {"thinking": False, "date": date(2025, 7, 8), "when_full": "drop_oldest"}
    before = list(engine.submit(QUESTION, GREEDY, RequestOptions(**options)).events())
    engine.speculative_prefill(QUESTION, GREEDY, RequestOptions(**options))
    engine.speculative_prefill(
        (*QUESTION, Message("assistant", "75"), Message("user", "And")), GREEDY, RequestOptions(**options)
    )
    assert text(list(engine.submit(QUESTION, GREEDY, RequestOptions(**options)).events()), "text") == text(
        before, "text"
    )
    answered = (*QUESTION, Message("assistant", "75"))
    for messages, wrong in (((), {}), (answered, {}), (QUESTION, {"owner": "\ud800"}), (QUESTION, {"when_full": "x"})):
        with pytest.raises(NotsoError):
            engine.speculative_prefill(messages, GREEDY, RequestOptions(**wrong))  # type: ignore[arg-type]


def test_slot_is_free_when_end_is_reported(engine: ChatEngine) -> None:
    ended(engine.submit(QUESTION, GREEDY))
    heard = threading.Event()
    running: list[int] = []

    def look() -> None:
        if generation.finished:
            running.append(engine.stats().running)
            heard.set()

    with waiting(engine):
        generation = engine.submit(QUESTION, GREEDY)
        generation.subscribe(look)
    assert heard.wait(60) and running == [0]


def test_idle_engine_reports_no_running_or_waiting_requests(engine: ChatEngine) -> None:
    ended(engine.submit(QUESTION, GREEDY))
    deadline = time.monotonic() + 60
    while (stats := engine.stats()).running + stats.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prompt_beyond_context_is_rejected_or_trimmed() -> None:
    with Engine.load() as engine:
        turns = [Message(role, "word " * 400) for _ in range(8) for role in ("user", "assistant")]
        with pytest.raises(NotsoError, match="tokens"):
            engine.submit([*turns, *QUESTION], GREEDY)
        events = list(engine.submit([*turns, *QUESTION], GREEDY, RequestOptions(when_full="drop_oldest")).events())
        trimmed = [event.dropped_messages for event in events if event.kind == "trimmed"]
        assert len(trimmed) == 1 and 0 < trimmed[0] < 16
        assert events[-1].finish_reason in ("stop", "length")


@pytest.mark.parametrize("make", [lambda: ScriptedEngine(endless, slots=2), Engine.load])
def test_close_ends_running_generations(make: Callable[[], Any]) -> None:
    engine = make()
    generations = [engine.submit((Message("user", LONG),), SamplingParams(temperature=2.0)) for _ in range(3)]
    engine.close()
    for generation in generations:
        assert ended(generation)[-1].kind in ("end", "error")


def test_prepared_request_gives_same_answer_as_submitted_request(engine: ChatEngine) -> None:
    def counts() -> EngineStats:  # speeds are averages over the last seconds
        return replace(engine.stats(), prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0)

    before = counts()
    begin = engine.prepare(QUESTION, GREEDY)
    assert counts() == before, "preparing must not start the generation"
    assert text(ended(begin()), "text") == text(ended(engine.submit(QUESTION, GREEDY)), "text")
    with pytest.raises(ContextLengthError) as caught:
        engine.prepare((Message("user", "word " * 50_000),), GREEDY)
    assert caught.value.needed_tokens > caught.value.context_tokens == engine.info.context_tokens
