"""Control of concurrent answers during generation: stopping, answering immediately, and a thinking budget."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from smollm3.held_engine import held

from notso.smollm3 import Engine, Event, Generation, Message, RequestOptions, SamplingParams

SUM = [Message("user", "What is 345 + 678?")]
GREEDY = SamplingParams(max_tokens=300, temperature=0)


def text(events: list[Event], kind: str = "text") -> str:
    return "".join(event.text for event in events if event.kind == kind)


def test_thinking_budget_ends_reasoning_and_answer_follows(demo_engine: Engine) -> None:
    free = list(demo_engine.generate(SUM, GREEDY))
    thought = text(free, "reasoning")
    usage = free[-2].usage
    assert usage is not None
    assert usage.reasoning_tokens > 20
    short = list(demo_engine.generate(SUM, SamplingParams(max_tokens=300, temperature=0, thinking_budget=10)))
    assert thought.startswith(text(short, "reasoning"))
    assert short[-2].usage is not None
    assert short[-2].usage.reasoning_tokens <= 10 + 3  # and the tokens that end the reasoning
    assert text(short)
    assert short[-1].finish_reason == "stop"


def test_zero_thinking_budget_skips_reasoning(demo_engine: Engine) -> None:
    events = list(demo_engine.generate(SUM, SamplingParams(max_tokens=300, temperature=0, thinking_budget=0)))
    assert text(events, "reasoning") == ""
    assert text(events)


def test_unused_thinking_budget_does_not_change_the_answer(demo_engine: Engine) -> None:
    wide = SamplingParams(max_tokens=300, temperature=0, thinking_budget=5000)
    for kind in ("reasoning", "text"):
        assert text(list(demo_engine.generate(SUM, wide)), kind) == text(list(demo_engine.generate(SUM, GREEDY)), kind)


@pytest.mark.parametrize("early", [True, False])
def test_answer_now_shortens_reasoning(demo_engine: Engine, early: bool) -> None:
    """Called before the reasoning or during it."""
    with held(demo_engine):
        generation = demo_engine.submit(SUM, GREEDY)
        if early:
            generation.answer_now()
        else:  # in the engine's thread, because the reasoning would end before another thread reacts
            generation.subscribe(lambda: generation.answer_now() if text(generation.read(), "reasoning") else None)
    events = list(generation.events())
    full = text(list(demo_engine.generate(SUM, GREEDY)), "reasoning")
    assert len(text(events, "reasoning")) < len(full)
    assert text(events)
    assert events[-1].finish_reason == "stop"


def test_concurrent_readers_see_the_same_events(demo_engine: Engine) -> None:
    generation = demo_engine.submit(SUM, GREEDY)
    first = generation.events()
    next(first)
    lists: list[list[Event]] = [[] for _ in range(8)]
    readers = [threading.Thread(target=lambda into=into: into.extend(generation.events())) for into in lists]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert all(events == lists[0] for events in lists)
    assert generation.finished
    assert generation.read() == lists[0]
    assert generation.read(5) == lists[0][5:]
    assert list(generation.events(after=len(lists[0]))) == []
    assert lists[0][-1].kind == "end"


def test_raising_subscriber_is_notified_until_the_end(demo_engine: Engine) -> None:
    heard = threading.Event()

    def notify() -> None:
        if generation.finished:
            heard.set()
        raise RuntimeError("error in the subscriber")

    with held(demo_engine):  # a subscriber that is notified immediately gets its own error, in its own thread
        generation = demo_engine.submit(SUM, GREEDY)
        generation.subscribe(notify)
    assert heard.wait(60)
    assert text(list(generation.events()))


def test_subscriber_of_a_finished_log_is_notified_although_it_has_no_events() -> None:
    generation, notified = Generation(), list[bool]()
    generation.write([], last=True)
    generation.subscribe(lambda: notified.append(generation.finished))
    assert notified == [True]


def test_queued_requests_report_positions_and_can_be_stopped() -> None:
    with Engine.load(context_tokens=512, max_num_seqs=1) as engine:
        with held(engine):
            first = engine.submit(SUM, GREEDY)
            others = [engine.submit([Message("user", f"What is {n} + 2?")], GREEDY) for n in range(3)]
            others[1].subscribe(others[1].stop)
        ends = [list(generation.events()) for generation in (first, *others)]
        assert [events[-1].finish_reason for events in ends] == ["stop", "stop", "cancelled", "stop"]
        places = [[event.place for event in events if event.kind == "queued"] for events in ends]
        assert places[0] == []
        assert places[3][0] in (2, 3)
        assert places[3] == sorted(places[3], reverse=True)
        assert places[3][-1] == 1
        usage = ends[2][-2].usage
        assert usage is not None
        assert usage.completion_tokens == 0
        assert ends[3][-2].usage.queue_ms > 0  # type: ignore[union-attr]


def test_requests_run_in_priority_order() -> None:
    order: list[str] = []
    with Engine.load(context_tokens=512, max_num_seqs=1) as engine:
        generations = []
        with held(engine):
            for priority in ("background", "api", "interactive"):
                generation = engine.submit(
                    SUM, SamplingParams(max_tokens=2, temperature=0), RequestOptions(priority=priority)
                )  # type: ignore[arg-type]
                generation.subscribe(
                    lambda g=generation, p=priority: order.append(p) if g.finished and p not in order else None  # type: ignore[misc]
                )
                generations.append(generation)
        for generation in generations:
            list(generation.events())
    assert order == ["interactive", "api", "background"]


def test_close_ends_running_answers() -> None:
    engine = Engine.load(context_tokens=512)
    generations = [engine.submit(SUM, GREEDY) for _ in range(5)]
    time.sleep(0.02)
    engine.close()
    for generation in generations:
        assert list(generation.events())[-1].kind == "end"


def test_statistics_return_to_idle_after_answers(demo_engine: Engine) -> None:
    before = demo_engine.stats()
    generations = [demo_engine.submit(SUM, GREEDY) for _ in range(6)]
    for generation in generations:
        list(generation.events())
    after = demo_engine.stats()
    assert (after.running, after.waiting, after.kv_blocks_used) == (0, 0, 0)
    assert after.generated_tokens_total > before.generated_tokens_total
    assert after.steps_total > before.steps_total
    assert after.cached_tokens_total > before.cached_tokens_total


def test_engine_thread_ends_when_engine_is_garbage_collected() -> None:
    engine = Engine.load(context_tokens=512)
    thread = engine._core._thread
    generation = engine.submit(SUM, GREEDY)
    list(generation.events())
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
