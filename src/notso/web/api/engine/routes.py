"""Engine API, through which front ends (servers without a model) use this server's engine.

A front end submits requests, and receives the events of all its answers in one stream of JSON lines. The wire format
may change with every release; the path contains its version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Annotated, Any, ParamSpec, TypeVar, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from notso.smollm3 import (
    AdapterInfo,
    EngineError,
    EngineLostError,
    Event,
    NotsoError,
    PromptInput,
    RequestOptions,
    SamplingParams,
    Sentence,
)
from notso.web.api.shared.services import ApiServices
from notso.web.edge.access import FRONT_ENDS_ONLY, KeyRing, include_marked
from notso.web.engine.port import ChatEngine, Generation
from notso.web.engine.remote.engine_link import WIRE_PATH, About
from notso.web.engine.remote.wire_values import METHODS, error_to_wire, from_wire, method_types, to_wire
from notso.web.engine.running import OffLoop, RunningRequest
from notso.web.values.errors import EngineUnavailableError, Problem
from notso.web.values.json_steps import json_bytes

STOPPING = Sentence("the engine is stopping", "engine_stopping")
HEARTBEAT_SECONDS = 1.0
SESSION_SECONDS = 30.0
"""A session and its answers end after this time without a connection. Front ends report a lost connection sooner."""
PREPARED_SECONDS = 10.0
"""A prepared prompt is dropped if it is not submitted within this time."""
MAX_OPEN = 512
MAX_PREPARED = 64
MAX_SESSIONS = 256
MAX_EVENTS_PER_LINE = 256
"""Maximum number of events of one answer per line; a resumed answer may need several lines."""
LINE_BYTES = 1 << 20
"""No further events are added to a line that has reached this size. Front ends reject lines of more than 16 MiB."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    prompt: PromptInput
    params: SamplingParams
    options: RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSubmission(EngineRequest):
    session: str
    number: int  # number of the answer
    prepared: str | None = None  # key of a prepared prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class _SteerMessage:
    session: str
    stop: list[int] = field(default_factory=list)  # numbers of the answers to stop
    answer_now: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResumeMessage(_SteerMessage):
    read: Mapping[int, int]
    pending: list[int]
    up_to: int


@dataclass(slots=True, eq=False)
class _Answer:
    running: RunningRequest
    begun: asyncio.Task[None] | None = None  # done once the engine has accepted or rejected the request
    generation: Generation | None = None
    stopped: bool = False

    @property
    def is_open(self) -> bool:
        if self.generation is not None:
            return not self.generation.finished
        return self.begun is None or not self.begun.done()

    def read(self, after: int) -> list[Event]:
        # If the answer was stopped before the engine received the request, its only event is `end`.
        if self.generation is not None:
            return self.generation.read(after)
        return [] if self.is_open or after else [Event("end", finish_reason="cancelled")]


@dataclass(slots=True, eq=False)
class _PreparedPrompt:
    engine: ChatEngine
    begin: Callable[[], Generation]


@dataclass(slots=True, eq=False)
class _Stream:
    # State of one connection, replaced when the front end reconnects.

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sent: dict[int, int] = field(default_factory=dict)  # answer number -> number of events already sent
    about: Any = None  # latest value sent
    stats: Any = None  # latest value sent


class FrontEndSession:
    """One front end's answers, which survive a broken connection. Use only on the event loop."""

    def __init__(self, front_ends: FrontEndSessions) -> None:
        self.id = secrets.token_hex(8)  # lets the front end detect that the engine restarted during a submission
        self._front_ends = front_ends
        self._answers: dict[int, _Answer] = {}
        self._stream = _Stream()
        self._stopped: set[int] = set()  # numbers of stopped answers whose submission may still arrive
        self._up_to, self._pending = 0, frozenset[int]()  # arguments of the latest call to `lines`
        self._expire_later()  # canceled by the first connection

    @property
    def _open_count(self) -> int:
        return sum(each.is_open for each in self._answers.values())

    def wake(self) -> None:
        self._stream.changed.set()

    def postpone_expiry(self) -> None:
        if not self._expires.cancelled():  # true only if no stream is open
            self._expires.cancel()
            self._expire_later()

    def _expire_later(self) -> None:
        self._expires = asyncio.get_running_loop().call_later(SESSION_SECONDS, self._front_ends.remove, self)

    async def begin(self, submission: EngineSubmission, off_loop: OffLoop) -> None:
        """Start an answer, once per `number`. Raises NotsoError or Problem."""
        number = submission.number
        answer = self._answers.get(number)
        if answer is None:
            shared = self._front_ends.services.shared
            if number in self._stopped or (number <= self._up_to and number not in self._pending):
                raise EngineUnavailableError("the front end has dropped this request")
            if shared.stopping:
                raise EngineUnavailableError(STOPPING)
            if self._open_count >= MAX_OPEN:
                raise EngineUnavailableError(f"this front end already has {MAX_OPEN} running responses")
            observe = self._front_ends.services.metrics.observe
            answer = self._answers[number] = _Answer(shared.requests.open(submission.options.owner, on_end=observe))
            answer.begun = asyncio.create_task(self._begin(answer, submission, off_loop))
        if answer.begun is not None:
            await asyncio.shield(answer.begun)

    async def _begin(self, answer: _Answer, submission: EngineSubmission, off_loop: OffLoop) -> None:
        prompt = self._front_ends.pop_prepared(submission.prepared)
        begun: list[Generation] = []

        def submit(engine: ChatEngine) -> list[Generation]:
            if prompt is not None and prompt.engine is engine:
                begun.append(prompt.begin())
            else:
                begun.append(engine.submit(submission.prompt, submission.params, submission.options))
            return begun

        try:
            await answer.running.begin(submit, off_loop)
        except BaseException:
            self._answers.pop(submission.number, None)
            raise
        wakes, loop = self._front_ends.services.shared.requests.wakes, asyncio.get_running_loop()
        for generation in begun:
            answer.generation = generation
            generation.subscribe(partial(wakes.wake, loop, self.wake))
        loop.call_soon(self.wake)

    def steer(self, stop: list[int], answer_now: list[int]) -> None:
        for number in stop:
            if (answer := self._answers.get(number)) is not None:
                answer.stopped = True
                answer.running.stop()
            else:
                self._stopped.add(number)
                asyncio.get_running_loop().call_later(SESSION_SECONDS, self._stopped.discard, number)
        for number in answer_now:
            if (answer := self._answers.get(number)) is not None:
                answer.running.answer_now()

    async def lines(self, read: Mapping[int, int], pending: list[int], up_to: int) -> AsyncIterator[bytes]:
        """Yield new events until a newer connection replaces this one, or the server is stopping and no answer is open.

        `read`: answer number -> number of events received. `pending`: answers being submitted. Other answers up to
        number `up_to` are stopped.
        """
        self._expires.cancel()
        self._up_to, self._pending = up_to, frozenset(pending)
        old, self._stream = self._stream, _Stream(sent=dict(read))
        old.changed.set()
        stream = self._stream
        for number in [each for each in self._answers if each <= up_to and each not in read and each not in pending]:
            self._drop(number)
        try:
            yield self._line(stream, id=self.id, known=[number for number in read if number in self._answers])
            while stream is self._stream:
                stream.changed.clear()
                # Check before the line is built: an answer that ends after the check may need another line for its
                # events.
                is_over = self._front_ends.services.shared.stopping and not self._open_count
                yield self._line(stream)
                if is_over and not stream.changed.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await stream.changed.wait()
        finally:
            if stream is self._stream:
                self._expire_later()

    def end(self) -> None:
        for number in list(self._answers):
            self._drop(number)

    def _line(self, stream: _Stream, **more: Any) -> bytes:
        # The line contains only changes. If nothing has changed, it is an empty object, which serves as a heartbeat.
        message: dict[str, Any] = dict(more)
        answers: dict[str, Any] = {}
        size = 0
        for number, answer in self._answers.items():
            after, events = stream.sent.get(number, 0), list[Any]()
            unsent = answer.read(after)
            for event in unsent[:MAX_EVENTS_PER_LINE]:
                if size >= LINE_BYTES:
                    break
                events.append(to_wire(self._close_if_ended(number, answer, event)))
                size += len(json.dumps(events[-1]))
            if events:
                stream.sent[number] = after + len(events)
                answers[str(number)] = [after, events]
            if len(events) < len(unsent):
                stream.changed.set()
        stats, about = to_wire(self._front_ends.services.shared.engine.stats()), to_wire(self._front_ends.about())
        if stats is not None and stats != stream.stats:
            message["stats"] = stream.stats = stats
        if about != stream.about:
            message["about"] = stream.about = about
        if answers:
            message["answers"] = answers
        return json.dumps(message).encode() + b"\n"

    def _close_if_ended(self, number: int, answer: _Answer, event: Event) -> Event:
        # Closes the request after its last event, but keeps the answer's events for a while: if the connection breaks
        # before the front end receives this line, the next connection sends them again.
        if event.kind not in ("end", "error"):
            return event
        answer.running.close()
        asyncio.get_running_loop().call_later(SESSION_SECONDS, self._answers.pop, number, None)
        if self._front_ends.services.shared.stopping and event.finish_reason == "cancelled" and not answer.stopped:
            error = EngineLostError(Sentence("the engine stopped during this response", "engine_stopped"))
            return Event("error", error=error)
        return event

    def _drop(self, number: int) -> None:
        answer = self._answers.pop(number)
        answer.stopped = True
        answer.running.close()


class FrontEndSessions:
    """Sessions of all front ends. Use only on the event loop."""

    def __init__(self, services: ApiServices) -> None:
        self.services = services
        self._sessions: dict[str, FrontEndSession] = {}
        self._prepared: dict[str, _PreparedPrompt] = {}
        self._adapters: Mapping[str, AdapterInfo] = {}
        self._watching = False

    def about(self) -> About:
        shared = self.services.shared
        host = shared.engine
        if host.engine is not None:
            self._adapters = dict(host.engine.adapters.infos)
        state = "stopping" if shared.stopping or shared.leaving else host.state
        return About(state, host.failure, host.info, self._adapters)

    def session(self, name: str) -> FrontEndSession:
        """Return or create a session. Raises EngineError if there are too many."""
        if name not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                raise EngineError("too many front ends")
            self._sessions[name] = FrontEndSession(self)
            self._watch()
        self._sessions[name].postpone_expiry()
        return self._sessions[name]

    def existing_session(self, name: str) -> FrontEndSession:
        """Return a session. Raises EngineUnavailableError if it does not exist."""
        session = self._sessions.get(name)
        if session is None:
            raise EngineUnavailableError("the connection to the engine was lost; send the request again")
        return session

    def remove(self, session: FrontEndSession) -> None:
        session.end()
        self._sessions = {name: each for name, each in self._sessions.items() if each is not session}

    @asynccontextmanager
    async def loaded_engine(self) -> AsyncIterator[ChatEngine]:
        """Keep the default engine loaded inside the context. Raises ModelError."""
        running = self.services.shared.requests.open("", counts=False)
        try:
            engine = await running.load()
            if engine is None:
                raise EngineUnavailableError(STOPPING)
            yield engine
        finally:
            running.close()

    async def prepare(self, request: EngineRequest, off_loop: OffLoop) -> str:
        """Render a prompt, and return a key for submitting it once within PREPARED_SECONDS."""
        begun: list[Callable[[], Generation]] = []
        async with self.loaded_engine() as engine:
            await off_loop(lambda: begun.append(engine.prepare(request.prompt, request.params, request.options)))
        name = secrets.token_hex(16)
        while len(self._prepared) >= MAX_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[name] = _PreparedPrompt(engine, begun[0])
        asyncio.get_running_loop().call_later(PREPARED_SECONDS, self._prepared.pop, name, None)
        return name

    def pop_prepared(self, name: str | None) -> _PreparedPrompt | None:
        return self._prepared.pop(name, None) if name is not None else None

    def _on_host_changed(self) -> None:
        self._watching = False
        for session in self._sessions.values():
            session.wake()
        if self._sessions:
            self._watch()

    def _watch(self) -> None:
        if not self._watching:  # otherwise, an earlier session has registered the callback
            self._watching = True
            self.services.shared.engine.when_changed.append(self._on_host_changed)


logger = logging.getLogger("notso.web.api")

router = APIRouter(prefix=WIRE_PATH)

T = TypeVar("T")
P = ParamSpec("P")


def mount(app: FastAPI, services: ApiServices) -> None:
    app.state.front_ends = FrontEndSessions(services)
    app.state.engine_ring = KeyRing(services.shared.settings.engine_key)
    include_marked(app, router)


async def front_ends(request: Request) -> FrontEndSessions:
    return cast(FrontEndSessions, request.app.state.front_ends)


FrontEnds = Annotated[FrontEndSessions, Depends(front_ends)]


def _with_error_bodies(route: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    # Engine errors are sent in the body with status 200. Another status means that the request was not understood, for
    # example because the servers' protocols differ.
    @wraps(route)
    async def respond(*args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await route(*args, **kwargs)
        except NotsoError as error:
            return _error_response(error)
        except Problem as problem:
            kind = EngineError if problem.retry_after_seconds is None else EngineUnavailableError
            return _error_response(kind(problem.sentence))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _error_response(EngineError("the front end sent an invalid request"), 400)
        except ClientDisconnect:
            raise
        except Exception:
            logger.exception("a front end's request failed")
            return _error_response(EngineError(Sentence("the engine failed; see its log", "engine_failed")))

    return respond


@router.post("/events", dependencies=[FRONT_ENDS_ONLY])
@_with_error_bodies
async def events(request: Request, sessions: FrontEnds) -> Response:
    """Stream all events of the front end's answers, and the engine's status, as JSON lines."""
    message = await _read(request, partial(from_wire, _ResumeMessage))
    session = sessions.session(message.session)
    session.steer(message.stop, message.answer_now)
    lines = session.lines(message.read, message.pending, message.up_to)
    return StreamingResponse(lines, media_type="application/x-ndjson")


@router.post("/submit", dependencies=[FRONT_ENDS_ONLY])
@_with_error_bodies
async def submit(request: Request, sessions: FrontEnds) -> Response:
    """Start an answer. /events streams its events."""
    message = await _read(request, partial(from_wire, EngineSubmission))
    session = sessions.existing_session(message.session)
    await session.begin(message, partial(_off_loop, request))
    return _json({"result": session.id})


@router.post("/prepare", dependencies=[FRONT_ENDS_ONLY])
@_with_error_bodies
async def prepare(request: Request, sessions: FrontEnds) -> Response:
    """Render a prompt for a later submission."""
    engine_request = await _read(request, partial(from_wire, EngineRequest))
    return _json({"result": await sessions.prepare(engine_request, partial(_off_loop, request))})


@router.post("/steer", dependencies=[FRONT_ENDS_ONLY])
@_with_error_bodies
async def steer(request: Request, sessions: FrontEnds) -> Response:
    """Stop answers, or end their reasoning."""
    message = await _read(request, partial(from_wire, _SteerMessage))
    sessions.existing_session(message.session).steer(message.stop, message.answer_now)
    return _json({"result": True})


@router.post("/call", dependencies=[FRONT_ENDS_ONLY])
@_with_error_bodies
async def call(request: Request, sessions: FrontEnds) -> Response:
    """Call a method of the engine."""
    name, arguments = await _read(request, _parse_call)
    async with sessions.loaded_engine() as engine:
        if name == "clear_cache" and "owner" in arguments:  # other models may also have cached the conversation
            await sessions.services.shared.engine.clear_cache(**arguments)
            return _json({"result": None})
        if name == "forget_reading":
            await sessions.services.shared.engine.forget_reading(arguments["scope"], arguments["name"])
            return _json({"result": None})
        return await _off_loop(request, partial(_call_method, engine, name, arguments))


def _call_method(engine: ChatEngine, name: str, arguments: dict[str, Any]) -> Response:
    result = to_wire(getattr(engine, name)(**arguments))
    return Response(json_bytes({"result": result}, allow_nan=True), media_type="application/json")


def _parse_call(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = from_wire(str, fields["method"])
    if name not in METHODS:
        raise ValueError("no method")
    return name, method_types(name).unpack(fields["arguments"])


async def _read(request: Request, parse: Callable[[Any], T]) -> T:
    body = await request.body()
    return await _off_loop(request, lambda: parse(json.loads(body)))


async def _off_loop(request: Request, work: Callable[[], T]) -> T:
    sessions = await front_ends(request)
    return await sessions.services.shared.large_work.run(work, len(await request.body()), "")


def _error_response(error: NotsoError, status: int = 200) -> Response:
    return _json({"error": error_to_wire(error)}, status)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    # Because of the line break, a front end that expects a stream of lines can also read errors.
    return Response(json.dumps(body) + "\n", status, media_type="application/json")
