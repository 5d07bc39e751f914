"""What front ends have asked this engine for: a session each, which outlives a connection that breaks."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from notso.smollm3 import EngineError
from notso.web.api.shared.services import ApiServices
from notso.web.engine.port import (
    AdapterInfo,
    ChatEngine,
    Event,
    Generation,
    PromptInput,
    RequestOptions,
    SamplingParams,
)
from notso.web.engine.remote.engine_link import About
from notso.web.engine.remote.wire_values import packed
from notso.web.engine.running import OffLoop, RunningRequest

HEARTBEAT_SECONDS = 1.0
SESSION_SECONDS = 30.0
"""So long a front end may be away; then all it asked for is ended. By itself it gives up sooner."""
PREPARED_SECONDS = 10.0
MOST_OPEN = 512
MOST_PREPARED = 64
MOST_SESSIONS = 256
MOST_AT_ONCE = 256
"""Events of one answer in a line: what is read again comes in pieces."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a front end wants answered."""

    prompt: PromptInput
    params: SamplingParams
    options: RequestOptions


@dataclass(slots=True, eq=False)
class _Answer:
    """`begun` ends when the engine has it, or has refused it."""

    running: RunningRequest
    begun: asyncio.Task[None] | None = None
    generation: Generation | None = None
    stopped: bool = False

    def read(self, after: int) -> list[Event]:
        """Of one that was stopped before the engine had it, there is only the end."""
        if self.generation is not None:
            return self.generation.read(after)
        is_over = self.begun is not None and self.begun.done() and not after
        return [Event("end", finish_reason="cancelled")] if is_over else []


@dataclass(slots=True, eq=False)
class _Prepared:
    engine: ChatEngine
    begin: Callable[[], Generation]


@dataclass(slots=True, eq=False)
class _Stream:
    """What one connection has said. Only the newest of a session goes on."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    sent: dict[int, int] = field(default_factory=dict)
    about: Any = None
    stats: Any = None


class Session:
    """Of one front end. On the event loop."""

    def __init__(self, among: FrontEnds) -> None:
        self._among = among
        self._answers: dict[int, _Answer] = {}
        self._stream = _Stream()
        self._expires = asyncio.get_running_loop().call_later(SESSION_SECONDS, among.remove, self)  # until it is read

    @property
    def _open(self) -> int:
        return sum(1 for each in self._answers.values() if each.generation is None or not each.generation.finished)

    def wake(self) -> None:
        """There is something to tell."""
        self._stream.news.set()

    async def begin(self, number: int, asked: Asked, prepared: str | None, off_loop: OffLoop) -> None:
        """Have the engine begin it, once, however often it is asked for. Raises what the engine refuses it with."""
        answer = self._answers.get(number)
        if answer is None:
            shared = self._among.services.shared
            if shared.stopping:
                raise EngineError("the engine is stopping")
            if self._open >= MOST_OPEN:
                raise EngineError(f"this front end has {MOST_OPEN} answers under way already")
            observe = self._among.services.metrics.observe
            answer = self._answers[number] = _Answer(shared.requests.open(asked.options.owner, on_end=observe))
            answer.begun = asyncio.create_task(self._begin(number, answer, asked, prepared, off_loop))
        if answer.begun is not None:
            await asyncio.shield(answer.begun)

    async def _begin(self, number: int, answer: _Answer, asked: Asked, prepared: str | None, off_loop: OffLoop) -> None:
        before = self._among.take_prepared(prepared)
        begun: list[Generation] = []

        def ask(engine: ChatEngine) -> list[Generation]:
            if before is not None and before.engine is engine:
                begun.append(before.begin())
            else:
                begun.append(engine.submit(asked.prompt, asked.params, asked.options))
            return begun

        try:
            await answer.running.begin(ask, off_loop)
        except BaseException:
            self._answers.pop(number, None)
            raise
        wakes, loop = self._among.services.shared.requests.wakes, asyncio.get_running_loop()
        for generation in begun:
            answer.generation = generation
            generation.subscribe(partial(wakes.wake, loop, self.wake))
        loop.call_soon(self.wake)

    def steer(self, stop: list[int], answer_now: list[int]) -> None:
        """End some, close the thoughts of some."""
        for number in stop:
            if (answer := self._answers.get(number)) is not None:
                answer.stopped = True
                answer.running.stop()
        for number in answer_now:
            if (answer := self._answers.get(number)) is not None:
                answer.running.answer_now()

    async def lines(self, read: Mapping[int, int], pending: frozenset[int], up_to: int) -> AsyncIterator[bytes]:
        """All that there is to tell, from the events that were `read` on, for as long as this is the newest connection.
        What the front end does not know any more up to that number is ended."""
        self._expires.cancel()
        old, self._stream = self._stream, _Stream(sent=dict(read))
        old.news.set()
        stream = self._stream
        for number in [each for each in self._answers if each <= up_to and each not in read and each not in pending]:
            self._drop(number)
        try:
            yield self._line(stream, known=[number for number in read if number in self._answers])
            while stream is self._stream:
                stream.news.clear()
                line = self._line(stream)
                yield line
                if self._among.services.shared.stopping and not self._open:
                    return
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await stream.news.wait()
                except TimeoutError:
                    continue
        finally:
            if stream is self._stream:
                self._expires = asyncio.get_running_loop().call_later(SESSION_SECONDS, self._among.remove, self)

    def end(self) -> None:
        """Nobody comes back for what there is."""
        for number in list(self._answers):
            self._drop(number)

    def _line(self, stream: _Stream, **more: Any) -> bytes:
        """What is new, as one line; without news an empty one, so that the other end hears of us."""
        told: dict[str, Any] = dict(more)
        answers = {}
        for number, answer in self._answers.items():
            after = stream.sent.get(number, 0)
            events = answer.read(after)[:MOST_AT_ONCE]
            if events:
                stream.sent[number] = after + len(events)
                answers[str(number)] = [after, packed(self._ending(number, answer, events))]
                if len(events) == MOST_AT_ONCE:
                    stream.news.set()  # there may be more
        stats, about = packed(self._among.services.shared.engine.stats()), packed(self._among.about())
        if stats is not None and stats != stream.stats:
            told["stats"] = stream.stats = stats
        if about != stream.about:
            told["about"] = stream.about = about
        if answers:
            told["answers"] = answers
        return json.dumps(told).encode() + b"\n"

    def _ending(self, number: int, answer: _Answer, events: list[Event]) -> list[Event]:
        """If the last event is among them, the request is closed; it is kept for a while, should the line be lost."""
        last = events[-1]
        if last.kind not in ("end", "error"):
            return events
        answer.running.close()
        asyncio.get_running_loop().call_later(SESSION_SECONDS, self._answers.pop, number, None)
        if self._among.services.shared.stopping and last.finish_reason == "cancelled" and not answer.stopped:
            return [*events[:-1], Event("error", error=EngineError("the engine was stopped while it answered"))]
        return events

    def _drop(self, number: int) -> None:
        answer = self._answers.pop(number)
        answer.stopped = True
        answer.running.close()


class FrontEnds:
    """The sessions of all. On the event loop."""

    def __init__(self, services: ApiServices) -> None:
        self.services = services
        self._sessions: dict[str, Session] = {}
        self._prepared: dict[str, _Prepared] = {}
        self._adapters: Mapping[str, AdapterInfo] = {}

    def about(self) -> About:
        """What this engine says of itself."""
        shared = self.services.shared
        host = shared.engine
        if host.engine is not None:
            self._adapters = dict(host.engine.adapters.infos)
        state = "stopping" if shared.stopping or shared.leaving else host.state
        return About(state, host.failure, host.info, self._adapters)

    def session(self, name: str) -> Session:
        """The one of that name, new where there is none. Raises EngineError where there are too many."""
        if name not in self._sessions:
            if len(self._sessions) >= MOST_SESSIONS:
                raise EngineError("too many front ends")
            if not self._sessions:
                self.services.shared.engine.when_changed(self._changed)
            self._sessions[name] = Session(self)
        return self._sessions[name]

    def known(self, name: str) -> Session:
        """Raises EngineError where there is none."""
        session = self._sessions.get(name)
        if session is None:
            raise EngineError("the engine was started anew; ask once more")
        return session

    def remove(self, session: Session) -> None:
        """It was away for too long."""
        session.end()
        self._sessions = {name: each for name, each in self._sessions.items() if each is not session}

    async def load(self, running: RunningRequest) -> ChatEngine:
        """The default model's engine, held by a request. Raises ModelError."""
        engine = await running.load()
        if engine is None:
            raise EngineError("the engine is stopping")
        return engine

    async def prepare(self, asked: Asked, off_loop: OffLoop) -> str:
        """Have the prompt written, and keep it for a moment under the name that comes back."""
        running = self.services.shared.requests.open("", counts=False)
        try:
            engine = await self.load(running)
            begun: list[Callable[[], Generation]] = []
            await off_loop(lambda: begun.append(engine.prepare(asked.prompt, asked.params, asked.options)))
        finally:
            running.close()
        name = secrets.token_hex(16)
        while len(self._prepared) >= MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[name] = _Prepared(engine, begun[0])
        asyncio.get_running_loop().call_later(PREPARED_SECONDS, self._prepared.pop, name, None)
        return name

    def take_prepared(self, name: str | None) -> _Prepared | None:
        """It is begun once."""
        return self._prepared.pop(name, None) if name is not None else None

    def _changed(self) -> None:
        """Its model, or what it does with it."""
        for session in self._sessions.values():
            session.wake()
        if self._sessions:
            self.services.shared.engine.when_changed(self._changed)
