"""The asynchronous engine gives the same answers: awaited, streamed, in batches, and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from notso import (
    AsyncAnswerStream,
    AsyncEngine,
    Completion,
    Engine,
    EngineError,
    Event,
    Generation,
    InvalidRequestError,
)

SUM = "What is 27 + 48?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load() as loaded:
        yield loaded


def test_async_answers_equal_synchronous_ones(engine: Engine) -> None:
    async def ask() -> tuple[list[str], str, str]:
        aware = AsyncEngine(engine)
        answers = await asyncio.gather(*(aware.chat(f"What is {n} + 1?", temperature=0, max_tokens=99) for n in (1, 2)))
        async with aware.stream(SUM, temperature=0, max_tokens=300) as stream:
            text = "".join([event.text async for event in stream if event.kind == "text"])
            assert (await stream.result()).text == text
        return [each.text for each in answers], text, (await aware.continue_text("text", seed=1, max_tokens=5)).text

    answers, text, more = asyncio.run(ask())
    assert answers == [engine.chat(f"What is {n} + 1?", temperature=0, max_tokens=99).text for n in (1, 2)]
    assert text == engine.chat(SUM, temperature=0, max_tokens=300).text and "75" in text
    assert more == engine.continue_text("text", seed=1, max_tokens=5).text


def test_two_tasks_share_one_answer(engine: Engine) -> None:
    async def ask() -> None:
        stream = AsyncEngine(engine).stream(SUM, seed=1, max_tokens=20)
        one, other = await asyncio.gather(stream.result(), stream.result())
        assert one == other

    before = engine.stats().prompt_tokens_total
    asyncio.run(ask())
    assert engine.stats().prompt_tokens_total - before == engine.count_tokens(SUM)


def test_async_engine_loads_and_closes() -> None:
    async def ask() -> None:
        async with await AsyncEngine.load("demo", context_tokens=256) as aware:
            assert (await aware.chat("hello", max_tokens=2)).finish_reason == "length"
            assert "AsyncEngine" in repr(aware)
            assert (await aware.embed(["a", "b"])).shape == (2, aware.engine.config.hidden_size)
        with pytest.raises(InvalidRequestError, match="closed"):
            await aware.chat("hello")

    asyncio.run(ask())


def test_async_batch_equals_single_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.async_engine.MAX_BATCHED", 2)

    async def ask() -> list[str]:
        aware = AsyncEngine(engine)
        with pytest.raises(InvalidRequestError):
            await aware.batch(["x", []])
        answers = await aware.batch([f"What is {n} + 2?" for n in range(5)], temperature=0, thinking=False)
        return [each.text for each in answers]

    expected = [engine.chat(f"What is {n} + 2?", temperature=0, thinking=False).text for n in range(5)]
    assert asyncio.run(ask()) == expected


def test_cancelled_task_stops_the_generation(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Generation] = []
    submit = engine._core.submit
    monkeypatch.setattr(engine._core, "submit", lambda request: (begun.append(request.generation), submit(request)))

    async def ask() -> None:
        aware = AsyncEngine(engine)
        answer = asyncio.create_task(aware.chat(SUM, seed=1, ignore_eos=True, min_tokens=3000))
        while not begun:
            await asyncio.sleep(0)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        async with aware.stream(SUM, seed=1, ignore_eos=True) as stream:
            await anext(stream)
        cut = await stream.result()
        assert cut.finish_reason == "cancelled"

    asyncio.run(ask())
    assert [generation.result().finish_reason for generation in begun] == ["cancelled"] * len(begun) and begun


@pytest.mark.parametrize("leaves", [False, True])
def test_closing_a_stream_stops_the_answer_that_another_task_reads(engine: Engine, leaves: bool) -> None:
    async def run() -> list[Event]:
        reads, events = asyncio.Event(), list[Event]()
        stream = AsyncEngine(engine).stream(SUM, seed=1, ignore_eos=True)

        async def read() -> None:
            async for event in stream:
                events.append(event)
                reads.set()

        async with contextlib.AsyncExitStack() as stack:
            if leaves:
                await stack.enter_async_context(stream)
            reader = asyncio.ensure_future(read())
            await reads.wait()
            if not leaves:
                await stream.close()
        await reader
        return events

    assert asyncio.run(run())[-1].finish_reason == "cancelled"


def test_stream_that_was_closed_before_its_start_never_starts(engine: Engine) -> None:
    async def ask() -> list[Completion]:
        stream = AsyncEngine(engine).stream(SUM, seed=1, max_tokens=20)
        await stream.close()
        assert [event async for event in stream] == []
        async with stream:
            return [await stream.result(), await stream.result()]

    before = engine.stats().prompt_tokens_total
    for answer in asyncio.run(ask()):
        assert (answer.text, answer.finish_reason, answer.usage.total_tokens) == ("", "cancelled", 0)
    assert engine.stats().prompt_tokens_total == before


def test_closing_a_stream_stops_an_answer_that_is_being_started() -> None:
    generation = Generation()
    is_starting, may_start = threading.Event(), threading.Event()

    def prepare() -> Callable[[], Generation]:
        is_starting.set()
        may_start.wait()
        generation.write([Event("end", finish_reason="cancelled")], last=True)
        return lambda: generation

    async def run() -> tuple[bool, Event]:
        stream = AsyncAnswerStream(prepare)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(is_starting.wait)
        closing = asyncio.ensure_future(stream.close())
        may_start.set()
        await closing
        return generation.stop_requested, await reader

    stopped, event = asyncio.run(run())
    assert stopped and event.kind == "end"


def test_engine_error_is_raised_to_the_caller(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("a logit is not finite")

    monkeypatch.setattr("notso.smollm3.engine.request.Request.sample", fail)

    async def ask() -> None:
        aware = AsyncEngine(engine)
        with pytest.raises(EngineError, match="not finite"):
            await aware.chat(SUM)
        with pytest.raises(EngineError, match="not finite"):
            [event async for event in aware.stream(SUM)]
        with pytest.raises(EngineError, match="not finite"):
            await aware.batch([SUM, SUM])

    asyncio.run(ask())
