"""The request lifecycle: admission, reading and wake-ups, and which generations a stop reaches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import Event, FinishReason, Message, ModelError, RequestOptions, Usage
from notso.smollm3.output.generation import Generation
from notso.web.engine.host import EngineHost
from notso.web.engine.port import Request
from notso.web.engine.running import (
    MOST_AT_ONCE,
    PreparedRequest,
    RunningRequest,
    RunningRequests,
    prepare,
    submissions_for,
)
from notso.web.values.fair_queue import FairQueue

END = Event("end", finish_reason="stop")


def texts(*words: str) -> list[Event]:
    return [Event("text", text=word) for word in words]


class House:
    """A host whose loaded engine returns plain generations that the test writes to."""

    def __init__(self, most_waiting: int = 2) -> None:
        self.host = EngineHost(lambda: None)  # type: ignore[arg-type, return-value]
        engine = SimpleNamespace(info=None, when_lost=lambda callback: None)
        self.host.default.state, self.host.default.engine = "ready", engine  # type: ignore[assignment]
        self.requests = RunningRequests(self.host, most_waiting)

    async def begun(self, *generations: Generation, **options: Any) -> RunningRequest:
        running = self.requests.open("", choices=len(generations), **options)
        await running.begin(lambda engine: generations)
        return running


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def all_of(running: RunningRequest) -> list[tuple[int, Event]]:
    return [(number, event) async for number, events in running.events() for event in events]


@on_loop
async def test_admitted_requests_count_toward_limit_immediately() -> None:
    """Admission counts at once, so no request can pass the limit between the check and the submission."""
    house = House(most_waiting=2)
    generations = [Generation() for _ in range(2)]
    first, second = house.requests.admit("a"), house.requests.admit("a")
    assert first is not None and second is not None and house.requests.admit("a") is None
    for running, generation in zip((first, second), generations, strict=True):
        await running.begin(lambda engine, generation=generation: [generation])
    generations[0].write([Event("queued", place=1)])
    assert house.requests.waiting == 2 and house.requests.admit("a") is None
    generations[0].write(texts("a"))
    assert house.requests.waiting == 1
    third = house.requests.admit("c", choices=3)
    assert third is not None and house.requests.waiting == 4
    third.close()
    house.requests.open("", counts=False)
    assert house.requests.waiting == 1
    second.stop()
    assert house.requests.waiting == 0


@on_loop
async def test_queue_places_are_shared_between_owners() -> None:
    requests = House(most_waiting=32).requests
    greedy = [requests.admit("greedy") for _ in range(70)]
    assert [each is not None for each in greedy] == [True] * 32 + [False] * 38, "one owner alone gets every place"
    modest = [requests.admit("modest") for _ in range(20)]
    assert [each is not None for each in modest] == [True] * 16 + [False] * 4, "two owners get half of the places each"
    assert requests.admit("greedy") is None and requests.admit("other") is not None
    others = [requests.admit(f"other {number}") for number in range(200)]
    assert sum(each is not None for each in others) == 128 - 49, "the total is limited"


@on_loop
async def test_failed_submission_releases_queue_place() -> None:
    house = House(most_waiting=1)

    def refuse(engine: object) -> Any:
        raise ModelError("no")

    running = house.requests.admit("a")
    assert running is not None
    with pytest.raises(ModelError, match="no"):
        await running.begin(refuse)
    assert house.requests.waiting == 0
    await house.requests.wait_for_all()


@on_loop
async def test_every_reader_gets_every_event_of_every_choice_in_order() -> None:
    house, generations = House(), [Generation(), Generation()]
    running = await house.begun(*generations)
    early = asyncio.create_task(all_of(running))
    await asyncio.sleep(0)
    said = [texts("a", "b"), texts("c")]

    def write() -> None:
        for generation, events in zip(generations, said, strict=True):
            for event in events:
                generation.write([event])
            generation.write([END], last=True)

    await asyncio.to_thread(write)
    for found in (await early, await all_of(running)):
        for number, events in enumerate(said):
            assert [event for at, event in found if at == number] == [*events, END]


@on_loop
async def test_engine_step_wakes_event_loop_once() -> None:
    house, generations = House(), [Generation() for _ in range(64)]
    wakes: list[object] = []
    loop = asyncio.get_running_loop()
    call = loop.call_soon_threadsafe
    running = [await house.begun(generation) for generation in generations]
    readers = [asyncio.create_task(all_of(each)) for each in running[:-1]]
    await asyncio.sleep(0)

    def counted(callback: Any, *args: Any, **kwargs: Any) -> Any:
        wakes.append(callback)
        return call(callback, *args, **kwargs)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    for number in range(10):  # one engine step: the event loop does not run in between
        for generation in generations:
            generation.write(texts(str(number)))
    assert len(wakes) == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for generation in generations:
        generation.write([END], last=True)
    assert len(wakes) == 2
    assert {len(events) for events in await asyncio.gather(*readers)} == {11}


@on_loop
async def test_paced_reader_receives_events_in_batches() -> None:
    house, generation = House(), Generation()
    running = await house.begun(generation)
    batches: list[int] = []
    first = asyncio.Event()

    async def read() -> None:
        async for _, events in running.events(pace_s=0.5):
            batches.append(len(events))
            first.set()

    reader = asyncio.create_task(read())
    generation.write(texts("at once"))
    await first.wait()
    for _ in range(5):
        generation.write(texts("together"))
        await asyncio.sleep(0)
    generation.write([END], last=True)
    await reader
    assert batches == [1, 6]


@on_loop
async def test_late_reader_yields_to_other_tasks() -> None:
    house, generation = House(), Generation()
    generation.write(texts(*map(str, range(1000))))
    generation.write([END], last=True)
    running = await house.begun(generation)
    between, going = 0, True

    async def others() -> None:
        nonlocal between
        while going:
            between += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    batches = [events async for _, events in running.events()]
    going = False
    await task
    assert sum(map(len, batches)) == 1001 and max(map(len, batches)) == MOST_AT_ONCE
    assert between >= len(batches) - 1


@on_loop
async def test_silence_yields_empty_batches_without_ending() -> None:
    house, generation = House(), Generation()
    running = await house.begun(generation)
    found: list[list[Event]] = []
    async for _, events in running.events(silence_s=0.01):
        found.append(events)
        if len(found) == 2:
            generation.write([END], last=True)
    assert found[:2] == [[], []] and found[-1] == [END]


@on_loop
async def test_end_callback_runs_once_with_or_without_readers() -> None:
    ends: list[tuple[Usage | None, FinishReason | None]] = []
    usage = Usage(prompt_tokens=1, completion_tokens=2)

    def on_end(usage: Usage | None, reason: FinishReason | None) -> None:
        ends.append((usage, reason))

    house, generation = House(), Generation()
    running = await house.begun(generation, on_end=on_end)
    generation.write([Event("usage", usage=usage), END], last=True)
    for _ in range(2):
        await all_of(running)
    running.close()
    assert ends == [(usage, "stop")]
    left = Generation()
    running = await house.begun(left, on_end=on_end)
    running.close()
    assert left.stop_requested and not house.requests._open and len(ends) == 1
    left.write([Event("end", finish_reason="cancelled")], last=True)
    await asyncio.sleep(0)
    assert ends[1:] == [(None, "cancelled")]


@on_loop
async def test_stop_reaches_request_being_submitted() -> None:
    house, submitted, go_on = House(), threading.Event(), threading.Event()
    generations = [Generation(), Generation(), Generation()]
    handed: list[Generation] = []

    def ask(engine: object) -> Any:
        for generation in generations:
            handed.append(generation)
            yield generation
            submitted.set()
            assert go_on.wait(60)

    running = house.requests.open("", choices=3)
    running.answer_now()
    beginning = asyncio.create_task(running.begin(ask))
    await asyncio.to_thread(submitted.wait, 60)
    running.stop()
    go_on.set()
    await beginning
    assert len(handed) == 2, "the remaining choices are not submitted"
    assert all(each.stop_requested and each.answer_requested for each in handed)


@pytest.mark.parametrize("how", ["canceled", "failed"])
def test_end_of_generation_is_reported_if_submission_does_not_complete(how: str) -> None:
    """One generation has begun when the submission of the second one fails, or before it is canceled."""

    async def run() -> None:
        house, generation, ends = House(), Generation(), list[FinishReason | None]()
        is_submitting, go, ended = threading.Event(), threading.Event(), asyncio.Event()

        def submit(engine: object) -> Any:
            is_submitting.set()
            go.wait(60)
            yield generation
            raise ModelError("no")

        def on_end(usage: Usage | None, reason: FinishReason | None) -> None:
            ends.append(reason)
            ended.set()

        running = house.requests.open("", choices=2, on_end=on_end)
        beginning = asyncio.create_task(running.begin(submit))
        await asyncio.to_thread(is_submitting.wait, 60)
        if how == "canceled":
            beginning.cancel()
            await asyncio.wait([beginning])
        go.set()
        await asyncio.wait([beginning])
        assert beginning.cancelled() if how == "canceled" else isinstance(beginning.exception(), ModelError)
        while not generation.stop_requested:
            await asyncio.sleep(0)
        generation.write([Event("usage", usage=Usage(1, 0)), Event("end", finish_reason="cancelled")], last=True)
        await ended.wait()
        assert ends == ["cancelled"]

    asyncio.run(asyncio.wait_for(run(), 60))


@on_loop
async def test_request_canceled_before_its_submission_leaves_the_queue() -> None:
    house, queue = House(), FairQueue("test")
    running = house.requests.open("")
    async with queue.turn("other"):
        beginning = asyncio.create_task(running.begin(lambda engine: [], lambda work: queue.run("", work)))
        while not queue.waiting:
            await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.wait([beginning])
        assert not queue.waiting
    assert not house.requests._open
    queue.close()


@pytest.mark.parametrize("how", ["loaded", "failed", "stopped"])
def test_request_waiting_for_model_handles_load_failure_and_stop(how: str) -> None:
    async def test() -> None:
        house, generation = House(), Generation()
        model = house.host.default
        engine, model.engine, model.state = model.engine, None, "loading"
        generation.write([END], last=True)
        running = house.requests.admit("a")
        assert running is not None
        beginning: Awaitable[None] = asyncio.ensure_future(running.begin(lambda engine: [generation]))
        await asyncio.sleep(0)
        assert house.requests.waiting == 1
        if how == "stopped":
            running.stop()
        else:
            model.engine, model.state = (engine, "ready") if how == "loaded" else (None, "failed")
            model.failure = "it broke"
            house.host._notify_changed()
        if how == "failed":
            with pytest.raises(ModelError, match="it broke"):
                await beginning
        else:
            await beginning
            assert await all_of(running) == ([(0, END)] if how == "loaded" else [])

    asyncio.run(asyncio.wait_for(test(), 60))


def test_prepared_request_is_used_only_for_same_engine_and_request() -> None:
    engines = [ScriptedEngine() for _ in range(2)]
    request = Request((Message("user", "one"),), options=RequestOptions(owner="a"))
    other = replace(request, messages=(Message("user", "two"),))
    for engine, asked, is_prepared in ((engines[0], request, 1), (engines[0], other, 0), (engines[1], request, 0)):
        begun: list[Generation] = []
        prepared = prepare(engines[0], request)

        def begin(prepared: PreparedRequest = prepared, begun: list[Generation] = begun) -> Any:
            begun.append(prepared.begin())  # type: ignore[arg-type]
            return begun[-1]

        [generation] = submissions_for(replace(asked), replace(prepared, begin=begin))(engine)
        assert begun == [generation] * is_prepared
        assert list(generation.events())[-1].finish_reason == "stop"
        assert engine.requests[-1] == asked
