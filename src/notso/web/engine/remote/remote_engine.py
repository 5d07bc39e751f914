"""ChatEngine of a front end, which forwards all work to the engine of another server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notso.smollm3 import EngineError, Generation
from notso.web.engine.port import (
    AdapterInfo,
    AdapterSource,
    EngineStats,
    InvalidRequestError,
    Message,
    ModelInfo,
    PromptEstimate,
    PromptInput,
    RequestOptions,
    SamplingParams,
)
from notso.web.engine.remote.engine_link import MAX_NUMBER, EngineLink, checked_numbers
from notso.web.engine.remote.wire_values import packed, types_of


class RemoteSource:
    """EngineSource that connects to an engine server, and reports when it is available again."""

    def __init__(self, url: str, key: str) -> None:
        # `key` is the value of NOTSO_ENGINE_KEY, which must be equal on the engine's server.
        self._lock = threading.Lock()
        self._link = EngineLink(url, key, self._changed)
        self._started = False
        self._engine: RemoteEngine | None = None
        self._when_back: list[Callable[[], object]] = []

    def __call__(self) -> RemoteEngine:
        """Wait until the engine can answer. Raises EngineError if it cannot or is unreachable."""
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
        self._changed()  # the connection may have been lost before `_engine` was set
        return engine

    def when_back(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._when_back = [callback]
        self._changed()

    def close(self) -> None:
        self._link.close()

    def _changed(self) -> None:
        link, about = self._link, self._link.about
        with self._lock:
            engine, back = self._engine, []
            if engine is not None and (not link.is_up or about.has_failed or about.info != engine.info):
                self._engine = None
            else:
                engine = None
            if link.is_up and about.can_answer:
                back, self._when_back = self._when_back, []
        if engine is not None:
            engine.lose()
        for callback in back:
            callback()


class RemoteAdapters:
    """Adapters, which only the engine's own server can load and unload."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        return self._link.about.adapters

    def add(self, source: AdapterSource) -> AdapterInfo:
        """Raise InvalidRequestError."""
        # The path may not exist on the engine's machine.
        raise InvalidRequestError("adapters must be loaded at the engine, not at a front end", param="adapter")

    def remove(self, name: str) -> None:
        raise InvalidRequestError("adapters must be unloaded at the engine, not at a front end", param="adapter")


class RemoteEngine:
    """ChatEngine that uses an EngineLink. Raises EngineError if the engine is unreachable."""

    # While answers are generated, `stats` is at most a second old.

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
        # `prepared` identifies the prompt on the engine's server, which keeps it for a few seconds. Afterwards, the
        # server renders the prompt again from the rest of the body.
        body = _body(messages, params, options)
        prepared = self._open_link.call("prepare", body)
        return lambda: self._open_link.begin({**body, "prepared": prepared})

    def speculative_prefill(
        self, messages: Sequence[Message], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> None:
        self._call("speculative_prefill", messages, params, options)

    def render(self, messages: Sequence[Message], options: RequestOptions | None = None) -> str:
        text: str = self._call("render", messages, options)
        return text

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self._call("tokenize", text, special=special)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._call("detokenize", ids)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = self._call("token_texts", ids)
        return texts

    def encode_chat(self, messages: Sequence[Message], options: RequestOptions | None = None) -> list[int]:
        ids: list[int] = self._call("encode_chat", messages, options)
        return ids

    def count_tokens(self, messages: Sequence[Message], options: RequestOptions | None = None) -> int:
        count: int = self._call("count_tokens", messages, options, check=_count)
        return count

    def estimate(self, messages: Sequence[Message], options: RequestOptions | None = None) -> PromptEstimate:
        estimate: PromptEstimate = self._call("estimate", messages, options, check=checked_numbers)
        return estimate

    def receipt(
        self,
        messages: PromptInput,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        sealed: bool = False,
    ) -> Mapping[str, Any]:
        receipt: Mapping[str, Any] = self._call("receipt", messages, params, options, sealed=sealed)
        return receipt

    def stats(self) -> EngineStats:
        return self._link.stats

    def clear_cache(self, owner: str | None = None, conversation: str | None = None) -> None:
        self._call("clear_cache", owner, conversation)

    def forget_reading(self, name: str, *, scope: str | None = None) -> None:
        self._call("forget_reading", name, scope=scope)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the engine becomes unreachable, stops, or changes its model."""
        with self._lock:
            if not self._lost:
                self._when_lost.append(callback)
                return
        callback()

    def lose(self) -> None:
        with self._lock:
            self._lost, callbacks = True, self._when_lost
            self._when_lost = []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """End running answers and calls."""
        self._closed = True
        # After a loss, another RemoteEngine uses the link, and its answers must continue.
        if not self._lost:
            self._link.end_all()

    @property
    def _open_link(self) -> EngineLink:
        if self._closed:  # calls still queued for a thread must fail at once, not wait for an unresponsive engine
            raise EngineError("the engine was closed")
        return self._link

    def _call(self, name: str, *arguments: Any, check: Callable[[Any], Any] = lambda told: told, **named: Any) -> Any:
        types = types_of(name)
        told = self._open_link.call("call", {"method": name, "arguments": types.pack(*arguments, **named)})
        try:
            return check(types.unpack_result(told))
        except ValueError:
            raise EngineError(f"{self._link.name} returned an invalid result of {name}") from None


def _count(told: int) -> int:
    if not 0 <= told < MAX_NUMBER:
        raise ValueError("not a count")
    return told


def _body(messages: PromptInput, params: SamplingParams | None, options: RequestOptions | None) -> dict[str, Any]:
    asked = packed(options) if options is not None else {}
    return {"prompt": packed(messages), "params": packed(params or SamplingParams()), "options": asked}
