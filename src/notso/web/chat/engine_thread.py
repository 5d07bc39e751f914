"""The one thread in which the engine lives: it loads it, then answers one turn after another."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Literal, cast

from notso.web.chat.engine_port import ChatEngine, EngineSource, Event, ModelError, ModelInfo
from notso.web.chat.turn import Turn
from notso.web.errors import NotsoError

logger = logging.getLogger("notso.web.engine")

EngineState = Literal["loading", "ready", "failed", "stopped"]

EVENT_BATCH_SECONDS = 0.05


class EventPipe:
    """Carries events from the engine's thread to the event loop: the first at once, then a batch every 50 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[Event]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._last_delivery = float("-inf")

    def put(self, event: Event) -> None:
        """Called in the engine's thread."""
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) > 1:
                return  # a delivery is under way and will take this one along
        self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        delay = self._last_delivery + EVENT_BATCH_SECONDS - self._loop.time()
        if delay > 0:
            self._loop.call_later(delay, self.flush)
        else:
            self.flush()

    def flush(self) -> None:
        """Deliver what waits. Called on the loop."""
        with self._lock:
            events, self._waiting = self._waiting, []
        self._last_delivery = self._loop.time()
        if events:
            self._deliver(events)


class Job:
    """A turn on its way through the engine. The callbacks run on the event loop; `ended` comes once and last."""

    def __init__(
        self,
        turn: Turn,
        *,
        began: Callable[[], None],
        events: Callable[[list[Event]], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.turn = turn
        self.began = began
        self.events = events
        self.ended = ended


class EngineThread:
    """Owns the engine. `state`, `info` and `failure` may be read anywhere; the rest is called on the event loop."""

    def __init__(self, source: EngineSource) -> None:
        self.state: EngineState = "loading"
        self.info: ModelInfo | None = None
        self.failure = ""
        self._source = source
        self._jobs: deque[Job] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="notso-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin loading the engine."""
        self._loop = loop
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. It ends with an error when the engine could not be loaded."""
        with self._condition:
            self._jobs.append(job)
            self._condition.notify()

    def withdraw(self, turn: Turn) -> Job | None:
        """Take a job back that has not begun; None when it has."""
        with self._condition:
            job = next((job for job in self._jobs if job.turn is turn), None)
            if job is not None:
                self._jobs.remove(job)
            return job

    def close(self) -> None:
        """End the thread after the running job; `join` waits for it."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def join(self, seconds: float) -> bool:
        """Whether the thread ended in time. Called off the loop."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- in the engine's thread

    def _run(self) -> None:
        engine = self._load()
        while (job := self._next()) is not None:
            if engine is None:
                self._on_loop(lambda job=job: job.ended(ModelError(self.failure)))  # type: ignore[misc]
            else:
                self._answer(engine, job)
        self.state = "stopped"
        if engine is not None:
            engine.close()

    def _load(self) -> ChatEngine | None:
        try:
            engine = self._source()
            self.info = engine.info
            self.state = "ready"
            return engine
        except NotsoError as error:
            self.failure = str(error)
        except Exception:
            logger.exception("the engine could not be loaded")
            self.failure = "the model could not be loaded; the server's log says why"
        self.state = "failed"
        return None

    def _next(self) -> Job | None:
        with self._condition:
            while not self._jobs and not self._closing:
                self._condition.wait()
            return None if self._closing else self._jobs.popleft()

    def _answer(self, engine: ChatEngine, job: Job) -> None:
        turn = job.turn
        pipe = EventPipe(cast(asyncio.AbstractEventLoop, self._loop), job.events)
        failure: BaseException | None = None
        self._on_loop(job.began)
        try:
            events = engine.generate(
                turn.messages,
                turn.params,
                thinking=turn.thinking,
                date=turn.prompt_date,
                cancelled=turn.cancel.is_set,
            )
            with closing(events):  # type: ignore[type-var]
                for event in events:  # a cancelled engine still tells its numbers, then ends by itself
                    pipe.put(event)
        except NotsoError as error:
            failure = error
        except Exception as error:
            logger.exception("the engine failed on an answer")
            failure = error

        def end() -> None:
            pipe.flush()
            job.ended(failure)

        self._on_loop(end)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            cast(asyncio.AbstractEventLoop, self._loop).call_soon_threadsafe(callback)
        except RuntimeError:  # the loop has closed: the server is gone and nobody listens
            logger.debug("an event came after the end")
