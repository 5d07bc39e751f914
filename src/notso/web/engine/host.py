"""Where the engine lives on this floor: loading it, exchanging it, and carrying questions in and events out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, cast

from notso.web.engine.port import (
    ChatEngine,
    EngineSource,
    EngineStats,
    Event,
    Generation,
    ModelError,
    ModelInfo,
    Request,
)
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.engine")

EngineState = Literal["loading", "ready", "failed", "stopped"]

EVENT_BATCH_SECONDS = 0.05
SUBMIT_THREADS = 2  # they render templates and tokenise


class Job:
    """A question on its way through the engine. The callbacks run on the event loop; `ended` comes once and last.

    `dropped` says that the engine goes away and will end this with what it has.
    """

    def __init__(
        self,
        request: Request,
        *,
        events: Callable[[list[Event]], None],
        ended: Callable[[BaseException | None], None],
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self.events = events
        self.ended = ended
        self.dropped = dropped
        self.generation: Generation | None = None
        self.stop_asked = self.answer_asked = False

    def stop(self) -> None:
        """End it wherever it is. Called on the loop."""
        self.stop_asked = True
        if self.generation is not None:
            self.generation.stop()

    def answer_now(self) -> None:
        """End its thinking. Called on the loop."""
        self.answer_asked = True
        if self.generation is not None:
            self.generation.answer_now()


class EventPump:
    """Carries a generation's events to the event loop: the first at once, then a batch every 50 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop, job: Job, generation: Generation) -> None:
        self._loop = loop
        self._job = job
        self._generation = generation
        self._lock = threading.Lock()
        self._scheduled = False
        self._read = 0
        self._last_delivery = float("-inf")
        self._ended = False

    def start(self) -> None:
        """Begin to carry. Called on the loop."""
        self._generation.subscribe(self._notify)
        self._flush()

    def _notify(self) -> None:
        """Called in the engine's thread."""
        with self._lock:
            if self._scheduled:
                return  # a delivery is under way and will take this one along
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._schedule)
        except RuntimeError:  # the loop has closed: the server is gone and nobody listens
            logger.debug("an event came after the end")

    def _schedule(self) -> None:
        delay = self._last_delivery + EVENT_BATCH_SECONDS - self._loop.time()
        if delay > 0:
            self._loop.call_later(delay, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            self._scheduled = False
        if self._ended:
            return
        finished = self._generation.finished  # asked before reading, so that nothing can come between
        events = self._generation.read(self._read)
        self._read += len(events)
        self._last_delivery = self._loop.time()
        if events:
            self._job.events(events)
        if finished:
            self._ended = True
            error = next((event.error for event in events if event.kind == "error"), None)
            self._job.ended(error)


class EngineHost:
    """Owns the engine. `state`, `info`, `failure` and `engine` may be read anywhere; the rest is called on the loop."""

    def __init__(self, source: EngineSource) -> None:
        self.state: EngineState = "loading"
        self.info: ModelInfo | None = None
        self.failure = ""
        self.engine: ChatEngine | None = None
        self._source = source
        self._loop: asyncio.AbstractEventLoop | None = None
        self._submitters = ThreadPoolExecutor(SUBMIT_THREADS, thread_name_prefix="notso-prompt")
        self._waiting: list[Job] = []
        self._running: set[Job] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = threading.Lock()
        self._load_number = 0
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load the engine."""
        self._loop = loop
        self._begin_loading(self._source)

    def stats(self) -> EngineStats | None:
        """The engine's numbers at this moment, where there is one."""
        engine = self.engine
        return engine.stats() if engine is not None else None

    def switch(self, source: EngineSource) -> None:
        """Close this engine and load another. Running answers end with what they have; waiting ones wait on."""
        for job in list(self._running):
            job.dropped()
            job.stop()
        self._begin_loading(source)

    def submit(self, job: Job) -> None:
        """Ask. While the engine loads the job waits; it ends with an error when there is no engine."""
        if self.state == "loading":
            self._waiting.append(job)
        elif self.engine is None:
            self._on_loop(lambda: job.ended(ModelError(self.failure)))
        else:
            self._hand_over(job, self.engine)

    def withdraw(self, job: Job) -> bool:
        """Take back a job that no engine has seen; False when one has."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        return True

    def close(self) -> None:
        """End the engine; `join` waits for it. What it was doing should have been stopped before."""
        self._load_number += 1
        self.state = "stopped"
        engine, self.engine = self.engine, None
        self._submitters.shutdown(wait=False, cancel_futures=True)
        if engine is not None:
            self._thread = threading.Thread(target=engine.close, name="notso-close", daemon=True)
            self._thread.start()

    def join(self, seconds: float) -> bool:
        """Whether the engine ended in time. Called off the loop."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- loading

    def _begin_loading(self, source: EngineSource) -> None:
        self._load_number += 1
        self.state, self.failure, self.info = "loading", "", None
        old, self.engine = self.engine, None
        number = self._load_number
        self._thread = threading.Thread(target=lambda: self._load(source, old, number), name="notso-load", daemon=True)
        self._thread.start()

    def _load(self, source: EngineSource, old: ChatEngine | None, number: int) -> None:
        with self._one_at_a_time:
            engine, failure = None, ""
            try:
                if old is not None:
                    old.close()  # first: there may be no memory for two
                if number == self._load_number:
                    engine = source()
            except NotsoError as error:
                failure = str(error)
            except Exception:
                logger.exception("the engine could not be loaded")
                failure = "the model could not be loaded; the server's log says why"
            if number != self._load_number:
                if engine is not None:
                    engine.close()  # while it loaded, another was asked for, or none
                return
            self._on_loop(lambda: self._loaded(engine, failure, number))

    def _loaded(self, engine: ChatEngine | None, failure: str, number: int) -> None:
        if number != self._load_number:
            if engine is not None:
                threading.Thread(target=engine.close, name="notso-close", daemon=True).start()
            return
        self.engine, self.failure = engine, failure
        self.info = engine.info if engine is not None else None
        self.state = "ready" if engine is not None else "failed"
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self.submit(job)

    # ---- asking

    def _hand_over(self, job: Job, engine: ChatEngine) -> None:
        self._running.add(job)
        task = asyncio.ensure_future(self._submit(job, engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, job: Job, engine: ChatEngine) -> None:
        request = job.request

        def submit() -> Generation:
            return engine.submit(request.messages, request.params, request.options)

        ended = job.ended

        def end(failure: BaseException | None) -> None:
            self._running.discard(job)
            ended(failure)

        job.ended = end
        if job.stop_asked:
            end(None)
            return
        try:
            generation = await asyncio.get_running_loop().run_in_executor(self._submitters, submit)
        except NotsoError as error:
            end(error)
        except Exception as error:
            logger.exception("the engine failed on a question")
            end(error)
        else:
            job.generation = generation
            if job.stop_asked:
                generation.stop()
            if job.answer_asked:
                generation.answer_now()
            EventPump(cast(asyncio.AbstractEventLoop, self._loop), job, generation).start()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            cast(asyncio.AbstractEventLoop, self._loop).call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("an engine came after the end")
