"""Asyncio interface of the engine, separate from `notso.smollm3`, which does not use asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Unpack

from notso.smollm3.engine.engine import MAX_BATCHED, Engine, Floats
from notso.smollm3.output.generation import Generation
from notso.smollm3.values.chat_input import ChatInput, Turn, conversation, split_batch
from notso.smollm3.values.engine_config import EngineConfig, EngineSettings
from notso.smollm3.values.events import Completion, Event, Usage
from notso.smollm3.values.request_options import AnswerSettings, RequestOptions, apply_settings
from notso.smollm3.values.sampling_params import SamplingParams

Prepare = Callable[[], Callable[[], Generation]]


class AsyncAnswerStream(AsyncIterator[Event]):
    """Asynchronous iterator over an answer's events.

    Generation starts on entering `async with`, or when the first event or `result` is awaited. Leaving `async with`
    stops the answer. Raises the same errors as `Engine.chat`, and those that occur during generation.
    """

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._generation: Generation | None = None
        self._start_lock = asyncio.Lock()  # several tasks may await the answer, but it must be started only once
        self._events = self._run()

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def result(self) -> Completion:
        """Wait for the complete answer and return it. Cancellation stops the answer."""
        generation = await self._start_once()
        try:
            return Completion.from_events([event async for event in _follow_events(generation)])
        finally:
            generation.stop()

    async def close(self) -> None:
        """Stop the answer; `result` then returns the part generated so far, with finish reason "cancelled"."""
        async with self._start_lock:  # if the answer is being started, wait until it can be stopped
            if self._generation is None:
                self._generation = Generation()
                end = [Event("usage", usage=Usage(0, 0)), Event("end", finish_reason="cancelled")]
                self._generation.write(end, last=True)
            self._generation.stop()
        with suppress(RuntimeError):  # raised if another task is iterating; that task reads the remaining events
            await self._events.aclose()

    async def __aenter__(self) -> AsyncAnswerStream:
        await self._start_once()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start_once(self) -> Generation:
        async with self._start_lock:
            if self._generation is None:
                begin = await asyncio.to_thread(self._prepare)  # tokenizing a long prompt takes a while
                self._generation = begin()
                weakref.finalize(self, self._generation.stop)
            return self._generation

    async def _run(self) -> AsyncGenerator[Event, None]:
        generation = await self._start_once()
        try:
            async with aclosing(_follow_events(generation)) as events:
                async for event in events:
                    if event.error is not None:
                        raise event.error
                    yield event
        finally:
            generation.stop()


async def _follow_events(generation: Generation) -> AsyncGenerator[Event, None]:
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # raised if the event loop is closed
            loop.call_soon_threadsafe(changed.set)

    generation.subscribe(notify)
    after = 0
    while True:
        changed.clear()
        finished = generation.finished  # read before the events: the last ones may arrive in between
        events = generation.read(after)
        after += len(events)
        for event in events:
            yield event
        if finished:
            return
        if not events:
            await changed.wait()


class AsyncEngine:
    """Asyncio wrapper around an `Engine`; waiting for an answer does not block a thread.

    The methods have the same parameters and errors as the `Engine` methods of the same name.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    async def load(
        cls, model: str | Path | EngineConfig | None = None, **settings: Unpack[EngineSettings]
    ) -> AsyncEngine:
        """Run `Engine.load` in a thread."""
        return cls(await asyncio.to_thread(lambda: Engine.load(model, **settings)))

    def stream(
        self,
        messages: ChatInput,
        *more: Turn,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> AsyncAnswerStream:
        """Return an asynchronous iterator over an answer's events."""
        sampling, request_options = apply_settings(params, options, settings)
        return AsyncAnswerStream(lambda: self.engine.prepare(conversation(messages, *more), sampling, request_options))

    async def chat(
        self,
        messages: ChatInput,
        *more: Turn,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> Completion:
        """Asynchronous `Engine.chat`. Cancellation stops the answer."""
        return await self.stream(messages, *more, params=params, options=options, **settings).result()

    async def batch(
        self,
        conversations: Iterable[ChatInput],
        *,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> list[Completion]:
        """Asynchronous `Engine.batch`. Cancellation stops the answers."""
        each_conversation = split_batch(conversations)
        sampling, request_options = apply_settings(params, options, settings)
        turns = [conversation(each) for each in each_conversation]
        begins = await asyncio.to_thread(
            lambda: [self.engine.prepare(each, sampling, request_options) for each in turns]
        )
        slots = asyncio.Semaphore(MAX_BATCHED)

        async def answer(begin: Callable[[], Generation]) -> Completion:
            async with slots:
                return await AsyncAnswerStream(lambda: begin).result()

        tasks = [asyncio.ensure_future(answer(begin)) for begin in begins]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def continue_text(
        self,
        text: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **settings: Unpack[AnswerSettings],
    ) -> Completion:
        """Asynchronous `Engine.continue_text`. Cancellation stops the answer."""
        sampling, request_options = apply_settings(params, options, settings)
        return await AsyncAnswerStream(lambda: self.engine.prepare(text, sampling, request_options)).result()

    async def embed(self, texts: str | Sequence[str], *, owner: str = "", adapter: str | None = None) -> Floats:
        """Asynchronous `Engine.embed`. Cancellation does not stop the computation."""
        return await asyncio.to_thread(lambda: self.engine.embed(texts, owner=owner, adapter=adapter))

    async def close(self) -> None:
        """Stop all answers and release the model file and the cache."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncEngine of {self.engine!r}>"
