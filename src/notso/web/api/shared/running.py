"""The answers to one request while they are written: asked for off the event loop, followed on it, stopped with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from notso.smollm3 import Event, FinishReason, Usage
from notso.web.api.shared.question import Question
from notso.web.edge.api_error import ApiError
from notso.web.engine.port import ChatEngine, Generation

PING_SECONDS = 15.0
MOST_AT_ONCE = 32

OnEnd = Callable[[Usage | None, FinishReason | None], None]


class OpenAnswers:
    """The requests of programs that are being answered, so that a stopping server can wait for them. On the loop."""

    def __init__(self) -> None:
        self._open: dict[str, RunningAnswers] = {}
        self._one_less = asyncio.Event()

    def add(self, answers: RunningAnswers) -> None:
        """One more."""
        self._open[answers.id] = answers

    def discard(self, answers: RunningAnswers) -> None:
        """It has ended, one way or another."""
        self._open.pop(answers.id, None)
        self._one_less.set()

    def find(self, id: str, asker: str) -> RunningAnswers | None:
        """The one of that name, if it is this asker's."""
        answers = self._open.get(id)
        return answers if answers is not None and answers.asker == asker else None

    async def settled(self) -> None:
        """Return when none is left."""
        while self._open:
            self._one_less.clear()
            await self._one_less.wait()

    def stop_all(self) -> None:
        """The server is going away: each is told so, by an error."""
        for answers in self._open.values():
            answers.end()


class RunningAnswers:
    """One generation for each choice. Who starts them must `stop` them in the end, whatever happens.

    `id` is what the answer is called, `asker` whose it is; `owner` is whose cached prompts may be used,
    `conversation` by what name they can be forgotten. `on_end` is told once of each choice's end.
    """

    def __init__(
        self,
        engine: ChatEngine,
        question: Question,
        *,
        id: str,
        asker: str,
        owner: str,
        conversation: str | None = None,
        among: OpenAnswers,
        on_end: OnEnd,
    ) -> None:
        self.id = id
        self.asker = asker
        self._engine = engine
        self._question = question
        self._owner = owner
        self._conversation = conversation
        self._among = among
        self._on_end = on_end
        self._generations: list[Generation] = []
        self._usage: dict[int, Usage | None] = {}
        self._told: set[int] = set()
        self._stopped_by_asker = False
        self._left_alone = False
        self._readers: set[asyncio.Event] = set()

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(generation.finished for generation in self._generations)

    async def start(self, off_loop: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Ask, by what runs the asking off the loop. Raises what that and the engine's `submit` raise."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                loop.call_soon_threadsafe(self._wake)

        self._among.add(self)
        try:
            await off_loop(self._submit)
        except BaseException:
            self.stop()
            raise
        for generation in self._generations:
            generation.subscribe(tell)

    def stop(self) -> None:
        """End what has not ended; nobody listens any more, but how it ends is still told."""
        self._among.discard(self)
        self._left_alone = True
        self.end()
        self._note_ends()

    def end(self) -> None:
        """End what has not ended; who listens hears of it."""
        for generation in self._generations:
            if not generation.finished:
                generation.stop()

    def stop_for_asker(self) -> None:
        """End it as asked: what there is, is the answer."""
        self._stopped_by_asker = True
        self.end()

    def answer_now(self) -> None:
        """Close the thoughts, so that the answers begin."""
        for generation in self._generations:
            generation.answer_now()

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the choice, event) from the first to the last; None where nothing came for a while.

        Any number of readers may follow. Raises ApiError (503) if the engine goes away.
        """
        news = asyncio.Event()
        self._readers.add(news)
        read = [0] * len(self._generations)
        try:
            while True:
                news.clear()
                ended = self.finished  # asked before reading
                for number, generation in enumerate(self._generations):
                    events = generation.read(read[number])
                    read[number] += len(events)
                    for at, event in enumerate(events, start=1):
                        if at % MOST_AT_ONCE == 0:
                            await asyncio.sleep(0)  # a late reader has much to catch up with: others come between
                        self._note(number, event)
                        if event.finish_reason == "cancelled" and not self._stopped_by_asker:
                            raise ApiError(503, "shutting_down", "the engine stopped on the way", retry_after_seconds=5)
                        yield number, event
                if ended:
                    return
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        await news.wait()
                except TimeoutError:
                    yield None
        finally:
            self._readers.discard(news)

    def _note(self, number: int, event: Event) -> None:
        if event.kind == "usage":
            self._usage[number] = event.usage
        elif event.kind == "end" and number not in self._told:
            self._told.add(number)
            self._on_end(self._usage.get(number), event.finish_reason)

    def _note_ends(self) -> None:
        for number, generation in enumerate(self._generations):
            if number not in self._told and generation.finished:
                for event in generation.read(0):
                    self._note(number, event)

    def _wake(self) -> None:
        for news in self._readers:
            news.set()
        if self._left_alone:
            self._note_ends()

    def _submit(self) -> None:
        options = self._question.options_for(self._owner, conversation=self._conversation)
        for prompt, params in self._question.choices:
            self._generations.append(self._engine.submit(prompt, params, options))
