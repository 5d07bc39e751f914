"""The answers to one request while they are written: asked for off the event loop, followed on it, stopped with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from notso.smollm3 import Event
from notso.web.api.api_error import ApiError
from notso.web.api.chat_request import ChatRequest
from notso.web.api.chat_response import Choice
from notso.web.chat.engine_port import ChatEngine, Generation

PING_SECONDS = 15.0


class OpenAnswers:
    """The requests of programs that are being answered, so that a stopping server can wait for them. On the loop."""

    def __init__(self) -> None:
        self._open: set[RunningAnswers] = set()
        self._one_less = asyncio.Event()

    def add(self, answers: RunningAnswers) -> None:
        """One more."""
        self._open.add(answers)

    def discard(self, answers: RunningAnswers) -> None:
        """It has ended, one way or another."""
        self._open.discard(answers)
        self._one_less.set()

    async def settled(self) -> None:
        """Return when none is left."""
        while self._open:
            self._one_less.clear()
            await self._one_less.wait()

    def stop_all(self) -> None:
        """The server is going away: each is told so, by an error."""
        for answers in self._open:
            answers.end()


class RunningAnswers:
    """One generation for each choice. Who starts them must `stop` them in the end, whatever happens."""

    def __init__(self, engine: ChatEngine, request: ChatRequest, owner: str, among: OpenAnswers) -> None:
        self._among = among
        self.choices = [Choice(request.raw_thinking) for _ in request.params]
        self._engine = engine
        self._request = request
        self._owner = owner
        self._generations: list[Generation] = []
        self._read: list[int] = [0] * len(request.params)
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Ask. Raises what the engine's `submit` raises."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                loop.call_soon_threadsafe(self._news.set)

        self._among.add(self)
        try:
            await asyncio.to_thread(self._submit)
        except BaseException:
            self.stop()
            raise
        for generation in self._generations:
            generation.subscribe(tell)

    def stop(self) -> None:
        """End what has not ended; nobody listens any more."""
        self._among.discard(self)
        self.end()

    def end(self) -> None:
        """End what has not ended; who listens hears of it."""
        for generation in self._generations:
            if not generation.finished:
                generation.stop()

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the choice, event) as they come, to the last; None where nothing came for a while.

        Raises the error of an answer, and ApiError (503) if the engine goes away.
        """
        while True:
            self._news.clear()
            ended = all(generation.finished for generation in self._generations)  # asked before reading
            for number, generation in enumerate(self._generations):
                events = generation.read(self._read[number])
                self._read[number] += len(events)
                for event in events:
                    if event.kind == "end" and event.finish_reason == "cancelled":
                        raise ApiError(503, "shutting_down", "the engine stopped on the way", retry_after_seconds=5)
                    yield number, event
            if ended:
                return
            try:
                await asyncio.wait_for(self._news.wait(), PING_SECONDS)
            except TimeoutError:
                yield None

    async def whole(self, on_end: Callable[[Choice], None]) -> list[Choice]:
        """All choices, once they have ended."""
        async for item in self.events():
            if item is not None:
                number, event = item
                self.choices[number].add(event)
                if event.kind == "end":
                    on_end(self.choices[number])
        return self.choices

    def _submit(self) -> None:
        request = self._request
        for params in request.params:
            generation = self._engine.submit(
                request.messages,
                params,
                thinking=request.thinking,
                tools=request.tools,
                priority="api",
                owner=self._owner,
                continue_last=request.continue_last,
            )
            self._generations.append(generation)
