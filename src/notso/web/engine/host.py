"""Load and unload the default model and the models named in requests, and change the default."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, cast

from notso.smollm3 import (
    AdapterSource,
    EngineStats,
    ModelError,
    ModelInfo,
    OutOfMemoryError,
    available_memory,
    release_freed_memory,
)
from notso.system.memory import is_memory_shortage
from notso.web.engine.port import ChatEngine, EngineSource, ReturningSource
from notso.web.values.errors import NotsoError
from notso.web.values.fair_queue import WorkerThreads

EngineState = Literal["unloaded", "loading", "ready", "failed", "stopped"]

BesideSource = Callable[[int], ChatEngine]
"""Function that loads an engine while other engines stay loaded. Its argument is the planned memory of the other
engines in bytes. Raises NotsoError. If the remaining memory is too small, raises OutOfMemoryError instead of reducing
the engine's default settings."""


@dataclass(eq=False, slots=True)
class ServedModel:
    """A model and its loading state."""

    # Any thread may read `state`, `info`, `failure` and `engine`. Use everything else on the event loop, except
    # `load_with_adapters`.

    key: str  # value of `Request.model`; '': the initial default model
    load: EngineSource
    load_beside: BesideSource | None = None
    name: str = ""  # name in listings; '': use the name in the file's metadata
    path: Path | None = None
    state: EngineState = "unloaded"
    info: ModelInfo | None = None  # set when the model is loaded, and kept when it is unloaded
    failure: str = ""
    engine: ChatEngine | None = None
    adapters: tuple[AdapterSource, ...] | None = None  # saved when the model is unloaded, and loaded again with it
    loads: int = 0  # number of loads so far
    users: int = 0  # number of requests that keep the model loaded
    leaving: bool = False  # accepts no new requests, because it may have to make room for another model
    idle_since: float = 0.0
    keep_alive_s: float | None = None  # idle time set by the last request (negative: unlimited); None: host's default
    expires: asyncio.TimerHandle | None = None  # timer that unloads the model

    @property
    def planned_bytes(self) -> int:
        if self.info is None:
            return 0
        return self.info.memory.needed_bytes if self.info.memory is not None else self.info.size_bytes

    @property
    def accepts_requests(self) -> bool:
        return self.engine is not None and not self.leaving

    @property
    def retry_seconds(self) -> int:
        # Value of the Retry-After header after a failed load. It is higher if the host does not retry the load by
        # itself, because an operator must then remove the cause.
        return 5 if isinstance(self.load, ReturningSource) else 60

    def mark_loaded(self, engine: ChatEngine) -> None:
        self.loads += 1
        self.engine, self.info, self.failure, self.state = engine, engine.info, "", "ready"
        self.keep_alive_s = None  # the current value may come from a request to unload
        if self.info is not None and self.info.path:
            self.path = Path(self.info.path).resolve()

    def load_with_adapters(self, load: EngineSource) -> ChatEngine:
        """Load the engine and restore its adapters. Blocks. Raises the same errors as `load`."""
        engine = load()
        if self.adapters is None:
            return engine
        saved, loaded = {source.name: source for source in self.adapters}, set(engine.adapters.infos)
        for name in saved.keys() ^ loaded:
            try:
                if name in loaded:
                    engine.adapters.remove(name)
                else:
                    engine.adapters.add(saved[name])
            # The file of the adapter may have been deleted. The model is useful without the adapter.
            except NotsoError as error:
                logger.warning("adapter %s was not loaded again: %s", name, error)
        return engine

    def forget_adapter(self, name: str) -> None:
        if self.adapters is not None:
            self.adapters = tuple(source for source in self.adapters if source.name != name)

    def mark_unloaded(self) -> ChatEngine | None:
        """Mark as unloaded; return the engine to close."""
        engine, self.engine = self.engine, None
        self.state, self.leaving = "unloaded", False
        if engine is not None:
            self.adapters = tuple(AdapterSource(i.name, i.path, i.scale) for i in engine.adapters.infos.values())
        return engine


logger = logging.getLogger("notso.web.engine")

T = TypeVar("T")

SUBMIT_THREADS = 2  # threads that render chat templates and tokenize prompts
FOR_EVER = -1.0
OTHERS_STAY_SECONDS = 300.0
"""Default idle time after which models other than the default are unloaded."""


class EngineHost:
    """Owns all engines. Use on the event loop; other threads may read the default model's properties.

    A request calls `acquire`, which keeps its model loaded, and `release` when it ends.
    """

    # keep_alive_s: idle time in seconds after which a model is unloaded. Negative: never. None: never for the default
    # model, OTHERS_STAY_SECONDS for others.
    def __init__(self, source: EngineSource, keep_alive_s: float | None = None) -> None:
        self.default = ServedModel("", source)
        self._models = {"": self.default}
        self._keep_alive_s = keep_alive_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self.submitters = WorkerThreads(SUBMIT_THREADS, thread_name_prefix="notso-prompt")
        self.when_changed: list[Callable[[], None]] = []  # each is called once, at the next change
        # Models are loaded and unloaded one at a time, in the order in which this was requested. If there is
        # not enough memory for an additional model, another model is unloaded first, once its requests have ended.
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads: set[threading.Thread] = set()

    @property
    def state(self) -> EngineState:
        return self.default.state

    @property
    def info(self) -> ModelInfo | None:
        # Requests are accepted and wait while the model is unloaded or being loaded again.
        return self.default.info if self.default.state not in ("failed", "stopped") else None

    @property
    def failure(self) -> str:
        return self.default.failure

    @property
    def engine(self) -> ChatEngine | None:
        return self.default.engine

    def stats(self) -> EngineStats | None:
        engine = self.engine
        return engine.stats() if engine is not None else None

    def models(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def is_loading(self) -> bool:
        return any(each.state == "loading" for each in self.models())

    def loaded(self) -> list[ServedModel]:
        return [each for each in self.models() if each.engine is not None]

    async def clear_cache(self, owner: str, conversation: str) -> None:
        for each in self.loaded():
            if each.engine is not None:
                await asyncio.to_thread(each.engine.clear_cache, owner, conversation)

    async def forget_reading(self, scope: str, name: str) -> None:
        for each in self.loaded():
            if each.engine is not None:
                await asyncio.to_thread(each.engine.forget_reading, name, scope=scope)

    def model(self, key: str | None) -> ServedModel:
        return self.default if key is None else self._models[key]

    def find_by_path(self, path: Path) -> ServedModel | None:
        return next((each for each in self.models() if each.path == path), None)

    def add(self, path: Path, name: str, load: EngineSource, load_beside: BesideSource | None = None) -> ServedModel:
        """Register the model at a resolved path, without loading it."""
        served = self.find_by_path(path)
        if served is None:
            served = self._models[str(path)] = ServedModel(str(path), load, load_beside, name, path)
        served.name, served.load_beside = name, served.load_beside or load_beside
        return served

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.request_load(self.default)

    def switch(self, to: EngineSource | ServedModel) -> None:
        """Make another model the default; running requests continue."""
        # Requests that wait for the old default model will wait for the new one.
        old = self.default
        if isinstance(to, ServedModel):
            self.default = to
        else:
            key = f"switched {len(self._models)}"
            self.default = self._models[key] = ServedModel(key, to)
        if old.state == "loading" and old is not self.default:
            old.state = "unloaded"  # abandon the load; a request that names the model starts a new load
        if self.default.state == "failed":
            self.default.state = "unloaded"
        self.request_load(self.default)
        for each in (old, self.default):
            self._schedule_unload(each)
        self._notify_changed()

    def switch_when_loaded(self, served: ServedModel) -> None:
        """Load a model, then make it the default unless loading failed or the default has changed meanwhile."""
        old = self.default

        def switch_if_ready() -> None:
            if served.state == "loading":
                self.when_changed.append(switch_if_ready)
            elif self.default is old and served.state == "ready":
                self.switch(served)
            elif self.default is old:
                self.request_load(old)  # the old model may have been unloaded to make room

        self.request_load(served)
        switch_if_ready()

    def request_load(self, served: ServedModel) -> None:
        if served.state == "unloaded":
            served.state, served.failure = "loading", ""
            self._enqueue(lambda: self._load(served))

    def allow_retry(self, key: str | None) -> None:
        # The file or the available memory may have changed. A default model that has never been loaded is not retried,
        # because the page asks the user what to do.
        served = self.model(key)
        if served.state == "failed" and (served is not self.default or served.info is not None):
            served.state = "unloaded"

    def acquire(self, key: str | None) -> ServedModel | None:
        """Return a model and keep it loaded. If it is not ready yet, return None; callers retry at the next change.

        Raises ModelError if loading failed or the host is closed.
        """
        served = self.model(key)
        if served.state in ("failed", "stopped"):
            raise ModelError(served.failure or "the server is stopping")
        self.request_load(served)
        if not served.accepts_requests:
            return None
        served.users += 1
        if served.expires is not None:
            served.expires.cancel()
            served.expires = None
        return served

    def release(self, served: ServedModel) -> None:
        served.users -= 1
        if not served.users:
            served.idle_since = self._now()
            self._schedule_unload(served)
            self._notify_changed()

    def keep(self, served: ServedModel, seconds: float | None) -> None:
        """Set the idle time before unloading (negative: unlimited; None: the default). The next request resets it."""
        served.keep_alive_s = seconds
        self._schedule_unload(served)

    def idle_timeout_s(self, served: ServedModel) -> float:
        """Return the idle time in seconds before unloading (negative: unlimited)."""
        if served.keep_alive_s is not None:
            return served.keep_alive_s
        if self._keep_alive_s is not None:
            return self._keep_alive_s
        return FOR_EVER if served is self.default else OTHERS_STAY_SECONDS

    async def wait_for_first_load(self) -> None:
        # Before the first load, the names of the default model are unknown.
        while self.default.state == "loading" and self.default.info is None:
            await self._wait_for_change()

    def close(self) -> None:
        """Start closing all engines; `join` waits for them. Callers must first stop all requests."""
        for served in self.models():
            engine = served.engine
            served.engine, served.state = None, "stopped"
            if served.expires is not None:
                served.expires.cancel()
            if engine is not None:
                self._start_thread(engine.close)
        self.submitters.shutdown(wait=False, cancel_futures=True)
        for task in self._tasks:
            task.cancel()
        self._notify_changed()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for each engine; return whether all were closed in time. Blocks."""
        for thread in list(self._threads):
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    async def _load(self, served: ServedModel) -> None:
        if served.state != "loading":
            return
        engine, failure = None, ""
        try:
            engine = await self._load_engine(served)
        except Exception as error:
            reason = ""
            if is_memory_shortage(error):
                memory = available_memory()
                left = f"{memory.source} leaves {memory.available_bytes >> 20:,} MiB"
                reason = f", probably for lack of memory: {left}"
            if isinstance(error, NotsoError) and not reason:
                failure = error.sentence
            else:
                logger.exception("the engine could not be loaded%s", reason)
                failure = f"the model could not be loaded{reason}; see the server's log"
        finally:
            for each in self.models():
                each.leaving = False
        if served.state != "loading":  # another default was chosen during the load, so the engine is not needed
            if engine is not None:
                await self._in_thread(engine.close)
        elif engine is None:
            served.state, served.failure = "failed", failure
            if isinstance(served.load, ReturningSource):
                served.load.when_back(lambda: self._call_on_loop(lambda: self._retry_load(served)))
        else:
            served.mark_loaded(engine)
            loads = served.loads

            def on_lost() -> None:
                # Called from any thread. This function must not refer to the engine: a reference cycle would delay the
                # release of the engine's memory.
                self._call_on_loop(lambda: self._reload_lost_engine(served, loads))

            engine.when_lost(on_lost)
            self._schedule_unload(served)
        self._notify_changed()

    async def _load_engine(self, served: ServedModel) -> ChatEngine | None:
        # Keep the other engines loaded if possible. Otherwise, close them one after another until the new one fits.
        while served.state == "loading":
            others = [each for each in self.loaded() if each is not served]
            if not others:
                return await self._in_thread(partial(served.load_with_adapters, served.load))
            if served.load_beside is not None:
                load = partial(served.load_beside, sum(each.planned_bytes for each in others))
                try:
                    return await self._in_thread(partial(served.load_with_adapters, load))
                except OutOfMemoryError as error:
                    logger.info("model unloaded to make room for another: %s", error)
            await self._evict_one(others, served)
        return None

    async def _evict_one(self, others: list[ServedModel], served: ServedModel) -> None:
        # Close the engine that has been idle longest, but the default engine only if no other is idle. If no engine is
        # idle, wait until one is idle or none is left.
        while served.state == "loading" and any(each.engine is not None for each in others):
            idle = [each for each in others if not each.users and each.engine is not None]
            if idle:
                await self._unload_model(min(idle, key=lambda each: (each is self.default, each.idle_since)))
                return
            # Meanwhile, accept no new requests: if requests kept arriving, no engine would ever become idle.
            for each in others:
                each.leaving = True
            await self._wait_for_change()

    async def _unload_model(self, served: ServedModel) -> None:
        engine = served.mark_unloaded()
        if engine is not None:
            await self._in_thread(engine.close)
            del engine
            await self._in_thread(_free_memory)  # now, because the next load measures the available memory
        self._notify_changed()

    async def _unload_if_idle(self, served: ServedModel) -> None:
        if served.engine is not None and not served.users and served.expires is None:
            logger.info("model unloaded after %g s without a request", self.idle_timeout_s(served))
            await self._unload_model(served)

    def _retry_load(self, served: ServedModel) -> None:
        if served.state == "failed":
            served.state = "unloaded"
            self.request_load(served)

    def _reload_lost_engine(self, served: ServedModel, load: int) -> None:
        # Loading again uses the CPU if the GPU failed, and reconnects if the engine is remote. `load` is the value of
        # `loads` for the lost engine: if `loads` has increased since, the engine in use is newer and is kept.
        if served.loads == load and served.engine is not None:
            logger.warning("the engine no longer responds; loading it again")
            self._enqueue(partial(self._in_thread, served.engine.close))
            served.mark_unloaded()
            self.request_load(served)
            self._notify_changed()

    def _schedule_unload(self, served: ServedModel) -> None:
        if served.expires is not None:
            served.expires.cancel()
            served.expires = None
        seconds = self.idle_timeout_s(served)
        if served.engine is None or served.users or seconds < 0 or self._loop is None:
            return

        def expired() -> None:
            served.expires = None
            self._enqueue(lambda: self._unload_if_idle(served))

        served.expires = self._loop.call_later(seconds, expired)

    async def _wait_for_change(self) -> None:
        changed = asyncio.Event()
        self.when_changed.append(changed.set)
        await changed.wait()

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def _notify_changed(self) -> None:
        waiting, self.when_changed = self.when_changed, []
        for callback in waiting:
            callback()

    def _enqueue(self, work: Callable[[], Awaitable[None]]) -> None:
        async def in_turn() -> None:
            async with self._one_at_a_time:
                await work()

        if self._loop is not None:
            task = self._loop.create_task(in_turn())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # At exit, the interpreter would wait for an executor's threads, but not for daemon threads. A long load
        # therefore does not delay shutdown.
        future: asyncio.Future[T] = cast(asyncio.AbstractEventLoop, self._loop).create_future()

        def done(result: T | None, error: BaseException | None) -> None:
            if future.done():  # canceled
                _close_if_engine(result)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(T, result))

        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:
                failure = error
            if not self._call_on_loop(lambda: done(result, failure)):
                _close_if_engine(result)

        self._start_thread(run)
        return await future

    def _start_thread(self, work: Callable[[], None]) -> None:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=work, name="notso-load", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _call_on_loop(self, callback: Callable[[], None]) -> bool:
        try:
            cast(asyncio.AbstractEventLoop, self._loop).call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("an engine reported a change after shutdown")
            return False
        return True


def _free_memory() -> None:
    # Only the garbage collector frees an engine that is in a reference cycle.
    gc.collect()
    release_freed_memory()


def _close_if_engine(result: object) -> None:
    close = getattr(result, "close", None)
    if close is not None:
        threading.Thread(target=close, name="notso-close", daemon=True).start()
