"""Scripted engine for tests of the pages and APIs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from notso.smollm3 import (
    AdapterInfo,
    AdapterSource,
    ContextLengthError,
    EngineError,
    EngineStats,
    Event,
    FinishReason,
    InvalidRequestError,
    Message,
    ModelInfo,
    Priority,
    Progress,
    PromptEstimate,
    PromptInput,
    RequestOptions,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from notso.web.engine.port import Request
from notso.web.values.errors import NotsoError

IMPORTABLE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
"""Code that lets another Python import this module."""
DEFAULT_REASONING = "The user greets me. I should answer politely and say what I am."
DEFAULT_ANSWER = "Hello! I say what my **script** says."
TEMPLATE_TOKENS = 20
PREFILL_TOKENS_PER_S = 100.0
PRIORITIES: tuple[Priority, ...] = ("interactive", "api", "background")

Script = Callable[[Sequence[Message], bool], Iterable[Event]]
"""Function from messages and thinking flag to events, without usage and end. May block."""


def say(answer: str, thoughts: str = "", *, piece: int = 4) -> list[Event]:
    """Return reasoning and text events of `piece` characters each."""
    reasoning = [Event("reasoning", text=thoughts[at : at + piece]) for at in range(0, len(thoughts), piece)]
    return reasoning + [Event("text", text=answer[at : at + piece]) for at in range(0, len(answer), piece)]


def default_script(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
    return say(DEFAULT_ANSWER, DEFAULT_REASONING if thinking else "")


def _request(asked: PromptInput, params: SamplingParams | None, options: RequestOptions | None) -> Request:
    params, options = params or SamplingParams(), options or RequestOptions()
    if not isinstance(asked, str) and (not len(asked) or isinstance(asked[0], Message)):
        return Request(tuple(cast(Sequence[Message], asked)), params, options)
    options.require_for_prompt(is_text=isinstance(asked, str))
    told = asked if isinstance(asked, str) else " ".join(map(str, asked))
    return Request((Message("user", told),), params, options)


def _logprobs(text: str, alternatives: int | None) -> tuple[TokenLogprob, ...]:
    if alternatives is None:
        return ()
    # The whole text counts as one token; each alternative has one more quotation mark.
    spelt = [text + "'" * number for number in range(alternatives)]
    top = tuple(TokenLogprob(each, tuple(each.encode()), -0.5 - at) for at, each in enumerate(spelt))
    return (TokenLogprob(text, tuple(text.encode()), -0.5, top),)


def _read(message: Message) -> str:
    return f"{message.reasoning_content} {message.content}" if message.keep_reasoning else message.content


QUEUE_SECONDS = 0.5  # interval of checks in the queue without a notification; long, because dozens of requests wait


class ScriptedGeneration:
    """One answer of the scripted engine."""

    def __init__(self, request: Request, wake: Callable[[], None]) -> None:
        self.request = request
        self._wake = wake  # notifies the queue
        self.stopped = threading.Event()
        self.hurried = threading.Event()
        self._events: list[Event] = []
        self._listeners: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    @property
    def finished(self) -> bool:
        with self._changed:
            return bool(self._events) and self._events[-1].kind in ("end", "error")

    def read(self, after: int = 0) -> list[Event]:
        """Return the events from index `after`."""
        with self._changed:
            return self._events[after:]

    def wait(self, after: int, timeout_s: float | None = None) -> bool:
        """Wait for more than `after` events, or the last one."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._events) > after or self.finished, timeout_s)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield events from index `after` to the last one."""
        while self.wait(after):
            events = self.read(after)
            if not events:
                return
            after += len(events)
            yield from events

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` for new events, and immediately if there are any."""
        with self._changed:
            self._listeners.append(notify)
            is_new = bool(self._events)
        if is_new:
            notify()

    def stop(self) -> None:
        self.stopped.set()
        self._wake()

    def answer_now(self) -> None:
        """Skip the rest of the reasoning."""
        self.hurried.set()

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for notify in listeners:
            notify()


class ScriptedAdapters:
    """Accepts any adapter."""

    def __init__(self) -> None:
        self.infos: dict[str, AdapterInfo] = {}

    def add(self, source: AdapterSource) -> AdapterInfo:
        if source.name in self.infos:
            raise InvalidRequestError(f"adapter {source.name} is already loaded", param="adapter")
        self.infos[source.name] = AdapterInfo(source.name, source.path, source.scale, 8, 1 << 20, 7)
        return self.infos[source.name]

    def remove(self, name: str) -> None:
        if self.infos.pop(name, None) is None:
            raise InvalidRequestError("the adapter is not loaded", param="adapter")


class ScriptedEngine:
    """A ChatEngine that follows a script.

    `pace_seconds` precedes each event. `requests` and `drafts` record submitted and prefilled requests. `failure` ends
    the script; `refusal` is raised immediately. Clearing `gate` pauses output. `slots` is the number of concurrent
    answers. With `ends_at_limit`, answers end at max_tokens, with one token per event.
    """

    def __init__(
        self,
        script: Script = default_script,
        *,
        pace_seconds: float = 0.0,
        failure: NotsoError | None = None,
        refusal: Exception | None = None,
        is_demo: bool = True,
        slots: int = 1,
        name: str = "Scripted",
        ends_at_limit: bool = False,
        most_prompt_bytes: int = 0,
    ) -> None:
        self.script = script
        self.pace_seconds = pace_seconds
        self.failure = failure
        self.refusal = refusal
        self.slots = slots
        self.ends_at_limit = ends_at_limit
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[Request] = []
        self.drafts: list[Request] = []
        self.cleared: list[tuple[str | None, str | None]] = []
        self.forgotten: list[tuple[str | None, str]] = []
        self.closed = False
        self.lose: Callable[[], None] = self.close
        self.adapters = ScriptedAdapters()
        self._running = 0
        self._queue: list[ScriptedGeneration] = []
        self._moved = threading.Condition()
        self.info = ModelInfo(
            name=name,
            path="",
            is_demo=is_demo,
            size_bytes=8_000_000,
            parameter_count=10_000_000,
            context_tokens=4096,
            quantization={"Q4_K": 48, "Q6_K": 9, "F32": 17},
            max_num_seqs=slots,
            most_prompt_bytes=most_prompt_bytes,
            end_token="\x00",
        )

    def submit(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> ScriptedGeneration:
        """Queue the script. Raw prompts arrive as one message."""
        return self.prepare(messages, params, options)()

    def prepare(
        self, messages: PromptInput, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Callable[[], ScriptedGeneration]:
        """Check that the prompt fits; other errors are raised when the answer starts."""
        request = _request(messages, params or SamplingParams(), options)
        self._require_room(request)
        return lambda: self._begin(request)

    def _require_room(self, request: Request) -> None:
        messages = request.messages
        if request.options.when_full == "drop_oldest":  # older messages may be dropped
            messages = (*(message for message in messages[:1] if message.role == "system"), messages[-1])
        length = self.count_tokens(messages, RequestOptions(tools=request.options.tools))
        context = self.info.context_of(request.options)
        if length >= context:
            raise ContextLengthError(length + 1, context)

    def _begin(self, request: Request) -> ScriptedGeneration:
        if self.refusal is not None:
            raise self.refusal
        generation = ScriptedGeneration(request, self._wake)
        with self._moved:
            self._queue.append(generation)
            self._queue.sort(key=lambda each: PRIORITIES.index(each.request.options.priority))
        threading.Thread(target=self._play, args=(generation,), name="notso-script", daemon=True).start()
        return generation

    def speculative_prefill(
        self, messages: Sequence[Message], params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> None:
        if not messages or messages[-1].role != "user":
            raise InvalidRequestError("only a user message can be prefilled in advance", param="messages")
        self.drafts.append(_request(messages, params, options))

    def render(self, messages: Sequence[Message], options: RequestOptions | None = None) -> str:
        return "".join(f"<{message.role}>{message.content}\n" for message in messages)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        # One token per character: its code point.
        return [ord(character) for character in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        try:
            return "".join(map(chr, ids))
        except (ValueError, OverflowError):
            raise InvalidRequestError("unknown token id", param="messages") from None

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [chr(each).encode() for each in ids]

    def encode_chat(self, messages: Sequence[Message], options: RequestOptions | None = None) -> list[int]:
        return self.tokenize(self.render(messages, options))

    def count_tokens(self, messages: Sequence[Message], options: RequestOptions | None = None) -> int:
        """Count one token per word and ten per tool."""
        tools = options.tools if options is not None else None
        return sum(len(_read(message).split()) for message in messages) + TEMPLATE_TOKENS + 10 * len(tools or ())

    def estimate(self, messages: Sequence[Message], options: RequestOptions | None = None) -> PromptEstimate:
        # As if all but the last message were cached.
        tokens, cached = self.count_tokens(messages, options), self.count_tokens(messages[:-1], options)
        return PromptEstimate(tokens, cached, (tokens - cached) / PREFILL_TOKENS_PER_S)

    def receipt(
        self,
        messages: PromptInput,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        sealed: bool = False,
    ) -> Mapping[str, Any]:
        """Raise an error, because nothing is computed here."""
        raise InvalidRequestError("a scripted answer has no receipt", param="replay")

    def stats(self) -> EngineStats:
        with self._moved:
            return EngineStats(running=self._running, waiting=len(self._queue))

    def clear_cache(self, owner: str | None = None, conversation: str | None = None) -> None:
        self.cleared.append((owner, conversation))

    def forget_reading(self, name: str, *, scope: str | None = None) -> None:
        self.forgotten.append((scope, name))

    def when_lost(self, callback: Callable[[], None]) -> None:
        # Calling `lose` simulates a GPU failure.
        self.lose = callback

    def close(self) -> None:
        self.closed = True
        with self._moved:
            self._moved.notify_all()

    # ---- in the thread of a generation

    def _play(self, generation: ScriptedGeneration) -> None:
        if not self._wait_in_queue(generation):
            generation.put(Event("end", finish_reason="cancelled"))
            return
        try:
            self.requests.append(generation.request)
            last = self._perform(generation)
        except Exception as error:  # an error in a script must end its generation, too
            last = Event("error", error=EngineError(f"the script failed: {error}"))
        with self._moved:
            self._running -= 1
            self._moved.notify_all()
        generation.put(last)  # after the slot is free, because readers may submit again immediately

    def _wait_in_queue(self, generation: ScriptedGeneration) -> bool:
        place = 0
        while True:
            with self._moved:
                at = self._queue.index(generation) + 1
                is_over = generation.stopped.is_set() or self.closed
                if is_over or (at == 1 and self._running < self.slots):
                    self._queue.remove(generation)
                    self._running += not is_over
                    self._moved.notify_all()
                    return not is_over
                if at == place:
                    self._moved.wait(QUEUE_SECONDS)
                    continue
                place = at
            generation.put(Event("queued", place=place))

    def _wake(self) -> None:
        with self._moved:
            self._moved.notify_all()

    def _perform(self, generation: ScriptedGeneration) -> Event:
        """Add all events but the last, which is returned."""
        request, params = generation.request, generation.request.params
        started = time.perf_counter()
        counts = {"reasoning": 0, "text": 0}
        budget = params.thinking_budget
        stopped = called = full = False
        length = self.count_tokens(request.messages, RequestOptions(tools=request.options.tools))
        generation.put(Event("progress", progress=Progress(0, length, 0)))
        script = self.script(request.messages, request.options.thinking)
        for event in [Event("embedding", embedding=(0.6, 0.8))] if request.options.embedding else script:
            cut_short = generation.hurried.is_set() or (budget is not None and counts["reasoning"] >= budget)
            if event.kind == "reasoning" and cut_short:
                continue
            if stopped := self._is_stopped(generation):
                break
            if full := self.ends_at_limit and event.kind in counts and sum(counts.values()) == params.max_tokens:
                break
            if event.kind in counts:
                counts[event.kind] += 1
                logprobs = _logprobs(event.text, request.options.top_logprobs)
                event = replace(event, tokens=sum(counts.values()), logprobs=logprobs)
            called = called or event.kind == "tool_call"
            generation.put(event)
        if self.failure is not None and not stopped:
            return Event("error", error=self.failure)
        usage = Usage(
            prompt_tokens=length,
            completion_tokens=sum(counts.values()),
            reasoning_tokens=counts["reasoning"],
            completion_ms=1000 * (time.perf_counter() - started),
        )
        generation.put(Event("usage", usage=usage))
        reason: FinishReason = "cancelled" if stopped else "length" if full else "tool_calls" if called else "stop"
        return Event("end", finish_reason=reason)

    def _is_stopped(self, generation: ScriptedGeneration) -> bool:
        """Wait for `pace_seconds`; return whether the generation was stopped."""
        ready = time.monotonic() + self.pace_seconds
        while True:
            if generation.stopped.is_set() or self.closed:
                return True
            left = ready - time.monotonic()
            if left <= 0 and self.gate.wait(0.01):  # the generation may have been stopped before the gate was opened
                return generation.stopped.is_set() or self.closed
            if left > 0:
                time.sleep(min(left, 0.02))
