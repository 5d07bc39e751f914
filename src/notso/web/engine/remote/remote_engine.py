"""ChatEngine of a front end: forwards all work to the engine of another server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from notso.smollm3 import (
    AdapterInfo,
    AdapterSource,
    EngineError,
    EngineStats,
    Generation,
    InvalidRequestError,
    ModelInfo,
    PromptInput,
    RequestOptions,
    SamplingParams,
)
from notso.web.engine.port import ChatEngine
from notso.web.engine.remote.engine_link import MAX_NUMBER, EngineLink, validate_numbers
from notso.web.engine.remote.wire_values import method_types, to_wire
from notso.web.values.errors import EngineUnavailableError

P = ParamSpec("P")
T = TypeVar("T")


class RemoteSource:
    """EngineSource that connects to an engine server, and reports when it is available again."""

    def __init__(self, url: str, key: str) -> None:
        # `key` is the value of NOTSO_ENGINE_KEY, which must be the same on the engine's server.
        self._lock = threading.Lock()
        self._link = EngineLink(url, key, self._on_link_changed)
        self._started = False
        self._engine: RemoteEngine | None = None
        self._when_back: list[Callable[[], object]] = []

    def __call__(self) -> RemoteEngine:
        """Wait until the engine can answer. Raises EngineError."""
        with self._lock:
            if not self._started:
                self._started = True
                self._link.start()
        about = self._link.wait()
        if about.info is None:
            raise EngineError(f"{self._link.name} has no model")
        engine = RemoteEngine(self._link, about.info)
        with self._lock:
            self._engine = engine
        self._on_link_changed()  # the connection may have been lost before `_engine` was set
        return engine

    def when_back(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._when_back = [callback]
        self._on_link_changed()

    def close(self) -> None:
        self._link.close()

    def _on_link_changed(self) -> None:
        link, about = self._link, self._link.about
        with self._lock:
            engine, callbacks = self._engine, []
            if engine is not None and (not link.is_up or about.has_failed or not _is_same(about.info, engine.info)):
                self._engine = None
            else:
                engine = None
            if link.is_up and about.can_answer:
                callbacks, self._when_back = self._when_back, []
        if engine is not None:
            engine.mark_lost()
        for callback in callbacks:
            callback()


def _is_same(info: ModelInfo | None, other: ModelInfo) -> bool:
    # Ignore `memory`: after a model has been unloaded and loaded again, the available memory differs.
    return info is not None and replace(info, memory=other.memory) == other


class RemoteAdapters:
    """Adapters of a remote engine. They can be loaded and unloaded only on its server."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        return self._link.about.adapters

    def add(self, source: AdapterSource) -> AdapterInfo:
        # The path might not exist on the engine's machine.
        raise InvalidRequestError("adapters must be loaded on the engine, not on a front end", param="adapter")

    def remove(self, name: str) -> None:
        raise InvalidRequestError("adapters must be unloaded on the engine, not on a front end", param="adapter")


def _remote(
    method: Callable[Concatenate[Any, P], T], *, check: Callable[[Any], T] = lambda result: result
) -> Callable[Concatenate[RemoteEngine, P], T]:
    # Turn a method of ChatEngine into one that calls the other server's engine.
    name = method.__name__

    def call(self: RemoteEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        types = method_types(name)
        result = self._open_link.call("call", {"method": name, "arguments": types.pack(*args, **kwargs)})
        try:
            return check(types.unpack_result(result))
        except ValueError:
            raise EngineError(f"{self._link.name} returned an invalid result for {name}") from None

    return call


def _validate_count(count: int) -> int:
    if not 0 <= count < MAX_NUMBER:
        raise ValueError("not a count")
    return count


class RemoteEngine:
    """ChatEngine that uses an EngineLink. Methods that call the engine raise EngineError if it is unreachable."""

    # While the link is up, `stats` is at most about a second old.

    def __init__(self, link: EngineLink, info: ModelInfo) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._when_lost: list[Callable[[], None]] = []
        self._lost = self._closed = False
        self.info = info
        self.adapters = RemoteAdapters(link)

    def submit(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Generation:
        return self._open_link.begin(_body(messages, params, options))

    def prepare(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Callable[[], Generation]:
        # `prepared` identifies the prompt on the engine's server, which keeps it for a few seconds. Afterward, the
        # server renders the prompt again from the rest of the body.
        body = _body(messages, params, options)
        prepared = self._open_link.call("prepare", body)
        return lambda: self._open_link.begin({**body, "prepared": prepared})

    speculative_prefill = _remote(ChatEngine.speculative_prefill)
    render = _remote(ChatEngine.render)
    tokenize = _remote(ChatEngine.tokenize)
    detokenize = _remote(ChatEngine.detokenize)
    token_bytes = _remote(ChatEngine.token_bytes)
    encode_chat = _remote(ChatEngine.encode_chat)
    count_tokens = _remote(ChatEngine.count_tokens, check=_validate_count)
    estimate = _remote(ChatEngine.estimate, check=validate_numbers)
    receipt = _remote(ChatEngine.receipt)
    clear_cache = _remote(ChatEngine.clear_cache)
    forget_reading = _remote(ChatEngine.forget_reading)

    def stats(self) -> EngineStats:
        return self._link.stats

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the engine becomes unreachable, stops, or changes its model."""
        with self._lock:
            if not self._lost:
                self._when_lost.append(callback)
                return
        callback()

    def mark_lost(self) -> None:
        with self._lock:
            self._lost, callbacks = True, self._when_lost
            self._when_lost = []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """End running answers and calls."""
        self._closed = True
        # If this engine was lost, the link may now be used by another RemoteEngine, and its answers must not be ended.
        if not self._lost:
            self._link.end_all()

    @property
    def _open_link(self) -> EngineLink:
        if self._closed:  # calls still queued for a thread must fail at once, not wait for an unresponsive engine
            raise EngineUnavailableError("the engine was closed")
        return self._link


def _body(messages: PromptInput, params: SamplingParams | None, options: RequestOptions | None) -> dict[str, Any]:
    options_json = to_wire(options) if options is not None else {}
    return {"prompt": to_wire(messages), "params": to_wire(params or SamplingParams()), "options": options_json}
