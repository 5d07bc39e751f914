"""Where the engine lives on this floor: loading it and exchanging it."""

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
    ModelInfo,
)
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.engine")

EngineState = Literal["loading", "ready", "failed", "stopped"]

SUBMIT_THREADS = 2  # they render templates and tokenise


class EngineHost:
    """Owns the engine. `state`, `info`, `failure` and `engine` may be read anywhere; the rest is called on the loop."""

    def __init__(self, source: EngineSource) -> None:
        self.state: EngineState = "loading"
        self.info: ModelInfo | None = None
        self.failure = ""
        self.engine: ChatEngine | None = None
        self._source = source  # of the engine that is wanted now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._submitters = ThreadPoolExecutor(SUBMIT_THREADS, thread_name_prefix="notso-prompt")
        self._when_loaded: list[Callable[[], None]] = []
        self._one_at_a_time = threading.Lock()
        self._load_number = 0
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load the engine."""
        self._loop = loop
        self._begin_loading()

    def stats(self) -> EngineStats | None:
        """The engine's numbers at this moment, where there is one."""
        engine = self.engine
        return engine.stats() if engine is not None else None

    def switch(self, source: EngineSource) -> None:
        """Close this engine and load another. Running answers end with what they have; waiting ones wait on."""
        self._source = source
        self._begin_loading()

    def when_loaded(self, callback: Callable[[], None]) -> None:
        """Call it, once, when loading has ended in one way or another."""
        self._when_loaded.append(callback)

    async def off_loop(self, work: Callable[[], None]) -> None:
        """Run what asks the engine in one of a few threads of their own."""
        await asyncio.get_running_loop().run_in_executor(self._submitters, work)

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

    def _begin_loading(self) -> None:
        source = self._source
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
        if engine is not None:
            engine.when_lost(lambda: self._on_loop(lambda: self._lost(number)))
        waiting, self._when_loaded = self._when_loaded, []
        for callback in waiting:
            callback()

    def _lost(self, number: int) -> None:
        """Its GPU failed: the same model is loaded again, by the CPU."""
        if number == self._load_number and self.state == "ready":
            logger.warning("the GPU failed; the CPU takes over")
            self._begin_loading()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            cast(asyncio.AbstractEventLoop, self._loop).call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("an engine came after the end")
