"""An engine that another server runs: a front end keeps and shows, and computes nothing."""

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
    """Connects with the engine at an address; an EngineSource, and one that says when it is worth asking again."""

    def __init__(self, url: str, key: str) -> None:
        """Nothing is asked of it yet. url: http://HOST[:PORT]; key: what that server's NOTSO_ENGINE_KEY is."""
        self._lock = threading.Lock()
        self._link = EngineLink(url, key, self._changed)
        self._started = False
        self._engine: RemoteEngine | None = None
        self._when_back: list[Callable[[], None]] = []

    def __call__(self) -> RemoteEngine:
        """The engine, once its model is loaded. Raises EngineError: it does not answer, or cannot."""
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
        self._changed()  # it may be lost by now
        return engine

    def when_back(self, callback: Callable[[], None]) -> None:
        """Call it, once, from any thread, when the engine can answer."""
        with self._lock:
            self._when_back = [callback]
        self._changed()

    def close(self) -> None:
        """Follow it no more."""
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
    """Those of the engine, where they are loaded and removed."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    @property
    def infos(self) -> Mapping[str, AdapterInfo]:
        """Those that there are now."""
        return self._link.about.adapters

    def add(self, source: AdapterSource) -> AdapterInfo:
        """Raises InvalidRequestError: a path says nothing here."""
        raise InvalidRequestError("adapters are loaded at the engine, not at its front ends", param="adapter")

    def remove(self, name: str) -> None:
        """Raises InvalidRequestError."""
        raise InvalidRequestError("adapters are removed at the engine, not at its front ends", param="adapter")


class RemoteEngine:
    """A ChatEngine; see there. Methods raise EngineError where the engine does not answer, else what it raises. What
    `stats` says is a second old at the most while answers are written."""

    def __init__(self, link: EngineLink, info: ModelInfo) -> None:
        """Use RemoteSource."""
        self._link = link
        self._lock = threading.Lock()
        self._when_lost: list[Callable[[], None]] = []
        self._lost = False
        self.info = info
        self.adapters = RemoteAdapters(link)

    def submit(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Generation:
        """Queue a question."""
        return self._link.begin(_body(messages, params, options))

    def prepare(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Callable[[], Generation]:
        """The engine keeps what was written for a minute; after that it writes it anew."""
        body = _body(messages, params, options)
        prepared = self._link.call("prepare", body)
        return lambda: self._link.begin({**body, "prepared": prepared})

    def speculative_prefill(
        self, messages: Sequence[Message], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> None:
        """A person still types."""
        self._call("speculative_prefill", messages, params, options)

    def render(self, messages: Sequence[Message], options: RequestOptions | None = None) -> str:
        """The prompt as text."""
        text: str = self._call("render", messages, options)
        return text

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._call("tokenize", text, special=special)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._call("detokenize", ids)
        return text

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        texts: list[str] = self._call("token_texts", ids)
        return texts

    def count_tokens(self, messages: Sequence[Message], options: RequestOptions | None = None) -> int:
        """Length of the whole rendered prompt."""
        count: int = self._call("count_tokens", messages, options, check=_count)
        return count

    def estimate(self, messages: Sequence[Message], options: RequestOptions | None = None) -> PromptEstimate:
        """What reading that prompt would cost now."""
        estimate: PromptEstimate = self._call("estimate", messages, options, check=checked_numbers)
        return estimate

    def stats(self) -> EngineStats:
        """As the engine told last; never blocks."""
        return self._link.stats

    def clear_cache(self, owner: str | None = None, conversation: str | None = None) -> None:
        """Remove what the engine has cached of a conversation."""
        self._call("clear_cache", owner, conversation)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call it, once, when the engine does not answer any more, is stopping, or has another model."""
        with self._lock:
            if not self._lost:
                self._when_lost.append(callback)
                return
        callback()

    def lose(self) -> None:
        """It can answer no more in this form."""
        with self._lock:
            self._lost, callbacks = True, self._when_lost
            self._when_lost = []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """End what runs. Where the engine was exchanged for another, what it still writes goes on to its end."""
        if not self._lost:
            self._link.end_all()

    def _call(self, name: str, *arguments: Any, check: Callable[[Any], Any] = lambda told: told, **named: Any) -> Any:
        types = types_of(name)
        told = self._link.call("call", {"method": name, "arguments": types.pack(*arguments, **named)})
        try:
            return check(types.unpack_result(told))
        except ValueError:
            raise EngineError(f"{self._link.name} gave what is no result of {name}") from None


def _count(told: int) -> int:
    if not 0 <= told < MAX_NUMBER:
        raise ValueError("no count")
    return told


def _body(messages: PromptInput, params: SamplingParams | None, options: RequestOptions | None) -> dict[str, Any]:
    asked = packed(options) if options is not None else {}
    return {"prompt": packed(messages), "params": packed(params or SamplingParams()), "options": asked}
