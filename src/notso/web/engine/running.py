"""Request lifecycle shared by the chat pages and the APIs: admission, submission, streaming and cancellation.

If the owner has a quota, a request first reserves tokens, up to the number that it can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

from notso.smollm3 import (
    ContextLengthError,
    EngineError,
    Event,
    FinishReason,
    InvalidRequestError,
    Message,
    PromptInput,
    RequestOptions,
    SamplingParams,
    Usage,
)
from notso.web.engine.host import EngineHost, ServedModel
from notso.web.engine.port import ChatEngine, Generation, Request
from notso.web.values.fair_queue import has_capacity
from notso.web.values.quotas import MaxTokenUse, Reservation


class Quotas(Protocol):
    """Token quotas of owners. Use on the event loop."""

    def has_quota(self, owner: str) -> bool: ...

    async def reserve(self, owner: str, uses: Sequence[MaxTokenUse]) -> list[Reservation]:
        """Reserve tokens for each request, up to its maximum use. Raises QuotaError or StorageError."""

    async def allows(self, owner: str, prompt_tokens: int) -> bool:
        """Return whether the quota allows a prompt of this length and one answer token."""

    def ended(self, owner: str, usage: Usage | None, reservation: Reservation | None) -> None: ...

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Free the reservations of requests that never started."""


@dataclass(frozen=True, slots=True)
class Submission:
    prompt: PromptInput
    params: SamplingParams
    options: RequestOptions
    engine: ChatEngine | None = None
    begin: Callable[[], Generation] | None = None  # submits the prompt that `engine` has prepared; call once
    limit: str = "max_tokens"  # what determined `params.max_tokens`, for the log

    def submit_to(self, engine: ChatEngine) -> Generation:
        """Submit to an engine. Raises ModelError."""
        if self.begin is not None and self.engine is engine:
            return self.begin()
        return engine.submit(self.prompt, self.params, self.options)

    def with_token_limit(self, answer_tokens: int) -> Submission:
        most = self.params.max_tokens
        if not answer_tokens or (most is not None and most <= answer_tokens):
            return self
        least = min(self.params.min_tokens, answer_tokens)
        params = replace(self.params, max_tokens=answer_tokens, min_tokens=least)
        # Drop the prepared request, because it contains the old limit.
        return replace(self, params=params, engine=None, begin=None, limit="quota")


@dataclass(frozen=True, slots=True)
class Submissions:
    each: tuple[Submission, ...]

    def __call__(self, engine: ChatEngine) -> Iterator[Generation]:
        for index, each in enumerate(self.each):
            try:
                generation = each.submit_to(engine)
            except InvalidRequestError as error:
                error.index = index
                raise
            yield generation


LARGE_PROMPT = 4 << 20
"""Number of characters in the `repr` of messages and tools above which a prompt counts as large."""


def count_prompt(engine: ChatEngine, messages: Sequence[Message], options: RequestOptions) -> int:
    """Return a prompt's token count. Raises ContextLengthError if it is large and far exceeds the context. Blocks."""
    # Tokenizing takes up to 36 bytes of memory per character, so `estimate` is used for large prompts: before
    # tokenizing, it rejects those that far exceed the context. It is not used for all prompts, because it waits until
    # the engine has completed a step.
    if len(repr((messages, options.tools))) <= LARGE_PROMPT:
        return engine.count_tokens(messages, options)
    return engine.estimate(messages, options).prompt_tokens


def max_token_use(engine: ChatEngine, submission: Submission) -> MaxTokenUse:
    """Return a submission's maximum token use. Raises ModelError. Blocks."""
    prompt, options = submission.prompt, submission.options
    context = engine.info.context_of(options)
    if isinstance(prompt, str):
        length = len(engine.tokenize(prompt))
    elif len(prompt) and isinstance(prompt[0], int):
        length = len(prompt)
    else:
        try:
            length = count_prompt(engine, cast(Sequence[Message], prompt), options)
        except ContextLengthError:  # far too long to be tokenized
            length = context
    length = min(length, context)  # the engine trims or rejects longer prompts
    room = max(1, context - length)
    return MaxTokenUse(length, 0 if options.prompt_only else min(submission.params.max_tokens or room, room))


access_log = logging.getLogger("notso.access")

Submitter = Callable[[ChatEngine], Iterable[Generation]]
"""Function that submits to an engine. It may block and raise ModelError. For owners with a quota, it must be a
Submissions object, so that the number of tokens to reserve can be computed."""
OffLoop = Callable[[Callable[[], None]], Awaitable[None]]
OnEnd = Callable[[Usage | None, FinishReason | None], None]
"""Function that is called when a generation ends. The finish reason is None if the generation failed; `on_end` is not
called then."""

MOST_AT_ONCE = 32
"""Maximum number of events per batch, so that a reader that is catching up does not block the event loop."""
BEFORE_THE_FIRST_STEP = ("queued", "trimmed")


class CallbackQueue:
    """Queues callbacks from other threads, and wakes the event loop once for several callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: list[Callable[[], None]] = []

    def wake(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop. Thread-safe."""
        with self._lock:
            self._due.append(callback)
            if len(self._due) > 1:
                return
        with contextlib.suppress(RuntimeError):  # raised if the loop is closed
            loop.call_soon_threadsafe(self._run_due)

    def _run_due(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for callback in due:
            callback()


class RunningRequest:
    """A request with one generation per choice. Use on the event loop.

    `on_end` is called once for each generation that has not failed. The code that opens a request must `close` it.
    """

    def __init__(self, requests: RunningRequests, name: str, owner: str, choices: int, on_end: OnEnd | None) -> None:
        self.name = name
        self.owner = owner
        self.stopped_by: Literal["", "client", "user"] = ""
        self._requests = requests
        self._on_end = on_end
        self._choices = choices
        self._generations: list[Generation] = []
        self._started_choices: set[int] = set()
        self._notified: set[int] = set()
        self._stopped = self._answer_now_requested = self._started = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._served: ServedModel | None = None
        self._reader_waits = False
        self._readers: set[asyncio.Event] = set()
        self._context = contextvars.copy_context()
        self._reserved: list[Reservation] = []
        self._limited_submissions: tuple[Submissions, Submissions] | None = None
        self._submissions: tuple[Submission, ...] = ()
        self._submitting = False

    @property
    def finished(self) -> bool:
        return self._started and all(generation.finished for generation in self._generations)

    @property
    def is_incomplete(self) -> bool:
        # Whether the request was stopped before all of its prompts were submitted.
        return self.finished and len(self._generations) < max(1, len(self._submissions))

    def use_current_context(self) -> None:
        self._context = contextvars.copy_context()

    @property
    def waiting(self) -> int:
        for number, generation in enumerate(self._generations):
            if number not in self._started_choices and any(
                event.kind not in BEFORE_THE_FIRST_STEP for event in generation.read()
            ):
                self._started_choices.add(number)
        return 0 if self._stopped else max(0, self._choices - len(self._started_choices))

    async def load(self, model: str | None = None) -> ChatEngine | None:
        """Wait until a model is loaded, and keep it loaded until `close`.

        Returns None if the request is stopped meanwhile. Raises ModelError if loading fails.
        """
        host = self._requests.host
        if self._served is not None and self._served.engine is None:  # unloaded, for example after a GPU failure
            self._release_model()
        if self._served is None:
            host.allow_retry(model)
        while self._served is None and not self._stopped:
            self._served = host.acquire(model)
            if self._served is None:
                self._waiter = self._loop.create_future()
                host.when_changed.append(self._wake_loader)
                await self._waiter
        return self._served.engine if self._served is not None else None

    async def begin(self, submit: Submitter, off_loop: OffLoop | None = None, *, model: str | None = None) -> None:
        """Submit to the engine of `model`, unless the request is stopped meanwhile.

        Raises the same errors as `submit`, `load` and `reserve`.
        """
        try:
            off_loop = off_loop or self._requests.host.submitters.run
            engine = await self.load(model)
            if engine is not None and not self._stopped:
                submit = await self.reserve(engine, submit, off_loop)
                self._submissions = submit.each if isinstance(submit, Submissions) else ()
            if engine is not None and not self._stopped:
                context = contextvars.copy_context()  # so that the engine's log records contain the request id
                await off_loop(lambda: context.run(self._submit, engine, submit))
                if self._served is not None:
                    self._requests.host.keep(self._served, None)
            else:
                self._follow_generations()
        except BaseException:
            self.close()
            raise

    async def reserve(self, engine: ChatEngine, submit: Submitter, off_loop: OffLoop | None = None) -> Submitter:
        """Reserve quota until `close`; return `submit` with `max_tokens` limited to the reservation.

        Repeated calls with an equal `submit` reserve only once. Raises QuotaError, StorageError or ModelError.
        """
        quotas = self._requests.quotas
        if quotas is None or not quotas.has_quota(self.owner):
            return submit
        if not isinstance(submit, Submissions):
            raise EngineError("the cost of this request cannot be determined")
        if self._limited_submissions is not None and self._limited_submissions[0] == submit:
            return self._limited_submissions[1]
        self._release_unused_reservations()
        uses: list[MaxTokenUse] = []
        await (off_loop or self._requests.host.submitters.run)(
            lambda: uses.extend(max_token_use(engine, each) for each in submit.each)
        )
        reserved = await quotas.reserve(self.owner, uses)
        if self._stopped:
            quotas.release(reserved)
            return submit
        self._reserved = reserved
        pairs = zip(submit.each, uses, reserved, strict=True)
        limited = [
            each if granted.answer_tokens >= use.answer_tokens else each.with_token_limit(granted.answer_tokens)
            for each, use, granted in pairs
        ]
        self._limited_submissions = submit, Submissions(tuple(limited))
        return self._limited_submissions[1]

    async def events(
        self, *, pace_s: float = 0.0, silence_s: float | None = None
    ) -> AsyncIterator[tuple[int, list[Event]]]:
        """Yield (choice number, new events) until the end, and (0, []) after `silence_s` seconds without events.

        Reads are at least `pace_s` seconds apart; each can yield several batches. Concurrent readers are allowed.
        """
        has_events = asyncio.Event()
        self._readers.add(has_events)
        read = [0] * len(self._generations)
        due = 0.0
        try:
            while True:
                has_events.clear()
                self._reader_waits = True  # before reading, so that later events wake this reader
                ended = self.finished
                if ended:
                    self._report_ended_generations()
                due = self._loop.time() + pace_s
                for number, generation in enumerate(self._generations):
                    events = generation.read(read[number])
                    read[number] += len(events)
                    for start in range(0, len(events), MOST_AT_ONCE):
                        if start:
                            await asyncio.sleep(0)
                        yield number, events[start : start + MOST_AT_ONCE]
                if ended:
                    return
                try:
                    async with asyncio.timeout(silence_s):
                        await has_events.wait()
                except TimeoutError:
                    yield 0, []
                if (early := due - self._loop.time()) > 0:
                    await asyncio.sleep(early)
        finally:
            self._readers.discard(has_events)

    def stop(self, by: Literal["", "client", "user"] = "") -> None:
        """Stop the request. `by`: the origin of the stop; if set, the text so far counts as the answer."""
        self.stopped_by = self.stopped_by or by
        self._stopped = True  # set before the loop below; `_submit` stops the generations that it adds later
        self._wake_loader()
        for generation in list(self._generations):
            if not generation.finished:
                generation.stop()

    def answer_now(self) -> None:
        self._answer_now_requested = True
        for generation in list(self._generations):
            generation.answer_now()

    def close(self) -> None:
        """Stop the request and release its model and unused quota. `on_end` is still called."""
        self._requests.discard(self)
        self._reader_waits = True
        self.stop()
        self._report_ended_generations()
        if not self._submitting:
            self._release_unused_reservations()
        self._release_model()

    def _release_unused_reservations(self) -> None:
        begun_count = len(self._generations)
        unused, self._reserved = self._reserved[begun_count:], self._reserved[:begun_count]
        if unused and self._requests.quotas is not None:
            self._requests.quotas.release(unused)

    def _release_model(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            self._requests.host.release(served)

    def _follow_generations(self) -> None:
        self._submitting = False
        self._release_unused_reservations()
        self._started = True
        for generation in self._generations:
            generation.subscribe(self._on_write)

    def _submit(self, engine: ChatEngine, submit: Submitter) -> None:
        self._submitting = True  # set first, because `close` sets `_stopped` and then reads `_submitting`
        try:
            for generation in () if self._stopped else submit(engine):
                # Append before checking the flags, because `stop`, in another thread, sets its flag and then reads the
                # list.
                self._generations.append(generation)
                if self._answer_now_requested:
                    generation.answer_now()
                if self._stopped:
                    generation.stop()
                    return
        finally:
            # This is done here and not in `begin`, which can be canceled while this thread continues. Even after an
            # error, the generations that were started must be followed.
            self._requests.wakes.wake(self._loop, self._follow_generations)

    def _on_write(self) -> None:
        # The engine calls this in its thread after each write. The event loop is woken only if a reader is waiting for
        # events.
        if self._reader_waits:
            self._reader_waits = False
            self._requests.wakes.wake(self._loop, self._wake_readers)

    def _wake_readers(self) -> None:
        self._report_ended_generations()
        for has_events in self._readers:
            has_events.set()
        if not self._readers and not self.finished:
            self._reader_waits = True  # even without a reader, the end of the generation must be handled

    def _wake_loader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _report_ended_generations(self) -> None:
        for number, generation in enumerate(self._generations):
            if number not in self._notified and generation.finished:
                self._notified.add(number)
                events = generation.read()
                usage = next((event.usage for event in events if event.kind == "usage"), None)
                reason = next((event.finish_reason for event in events if event.kind == "end"), None)
                self._context.run(self._log_end, number, events, usage, reason)
                if self._requests.quotas is not None:
                    reservation = self._reserved[number] if number < len(self._reserved) else None
                    self._requests.quotas.ended(self.owner, usage, reservation)
                # Run the callbacks in the saved context, because it contains the request id.
                for callback in self._requests.at_end:
                    self._context.run(callback, usage, reason)
                if reason is not None and self._on_end is not None:
                    self._on_end(usage, reason)

    def _log_end(self, number: int, events: list[Event], usage: Usage | None, reason: FinishReason | None) -> None:
        outcome: str = reason or "failed"
        if reason is None:
            error = next((each.error for each in events if each.error is not None), None)
            access_log.warning("generation failed: %s", error or "unknown reason")
        elif reason == "cancelled" and self.stopped_by:
            outcome = f"stopped by the {self.stopped_by}"
        elif reason == "length" and usage is not None and number < len(self._submissions):
            outcome += f" ({_reached_limit(self._submissions[number], usage)})"
        name = f"; id {self.name}" if self.name else ""
        if usage is None:
            access_log.info("generation ended: %s%s", outcome, name)
            return
        access_log.info(
            "generation ended: %s%s; %d prompt tokens (%d cached), %d generated; queue %d, prefill %d, decode %d ms",
            outcome,
            name,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.queue_ms,
            usage.prompt_ms,
            usage.completion_ms,
        )


def _reached_limit(submission: Submission, usage: Usage) -> str:
    if submission.options.prompt_only:
        return "prompt only"
    most = submission.params.max_tokens
    return submission.limit if most is not None and usage.completion_tokens >= most else "context"


class RunningRequests:
    """All open requests, and the limit on those that are waiting. Use on the event loop."""

    def __init__(self, host: EngineHost, most_waiting: int) -> None:
        self.host = host
        self.wakes = CallbackQueue()
        self.at_end: list[OnEnd] = []  # called at the end of each generation, even if it failed
        self.quotas: Quotas | None = None  # reserves tokens for each request, and counts the tokens used
        self._most_waiting = most_waiting
        self._open: dict[RunningRequest, bool] = {}
        self._request_closed = asyncio.Event()

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    @property
    def _waiting(self) -> Counter[str]:
        by_owner = Counter[str]()
        for request, counts in self._open.items():
            if counts and (waiting := request.waiting):
                by_owner[request.owner] += waiting
        return by_owner

    def admit(self, owner: str, *, choices: int = 1, on_end: OnEnd | None = None) -> RunningRequest | None:
        """Admit a request. Return None if the queue has no capacity for the owner (see `has_capacity`)."""
        if not has_capacity(self._waiting, owner, self._most_waiting):
            return None
        return self.open(owner, choices=choices, on_end=on_end)

    def open(
        self, owner: str, name: str = "", *, choices: int = 1, on_end: OnEnd | None = None, counts: bool = True
    ) -> RunningRequest:
        """Open a request even if the queue is full.

        `counts`: whether `admit` counts the request as waiting; False for background work.
        """
        request = RunningRequest(self, name, owner, choices, on_end)
        self._open[request] = counts
        return request

    async def allows_prompt(self, owner: str, prompt_tokens: int) -> bool:
        return self.quotas is None or not self.quotas.has_quota(owner) or await self.quotas.allows(owner, prompt_tokens)

    def discard(self, request: RunningRequest) -> None:
        self._open.pop(request, None)
        self._request_closed.set()

    def find(self, name: str, owner: str) -> RunningRequest | None:
        return next((each for each in self._open if each.name == name and each.owner == owner), None)

    def stop_owner(self, owner: str) -> bool:
        found = [each for each in self._open if each.owner == owner]
        for request in found:
            request.stop()
        return bool(found)

    def stop_all(self) -> None:
        for request in list(self._open):
            request.stop()

    async def wait_for_all(self) -> None:
        while self._open:
            self._request_closed.clear()
            await self._request_closed.wait()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    engine: ChatEngine
    request: Request
    begin: Callable[[], Generation]  # submits the request; call once


def prepare(engine: ChatEngine, request: Request) -> PreparedRequest:
    """Render the prompt. Raises ModelError. Blocks."""
    return PreparedRequest(engine, request, engine.prepare(request.messages, request.params, request.options))


def submissions_for(request: Request, prepared: PreparedRequest | None = None) -> Submissions:
    """Return the submission of a request; use `prepared` if it belongs to an equal request."""
    submission = Submission(request.messages, request.params, request.options)
    if prepared is not None and prepared.request == request:
        submission = replace(submission, engine=prepared.engine, begin=prepared.begin)
    return Submissions((submission,))
