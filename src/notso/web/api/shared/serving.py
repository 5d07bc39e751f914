"""Request lifecycle of the APIs: parsing, admission, generation and response."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from notso.smollm3 import Event, ModelError, ModelInfo, NotsoError, Priority
from notso.web.api.request_fields.fields import parse_object, refuse_hints
from notso.web.api.shared.api_request import ApiRequest, dropped_by_template, ignored_headers
from notso.web.api.shared.background import left_response, replayed
from notso.web.api.shared.receipts import ReceiptSerializer, recorded, wanted_receipt
from notso.web.api.shared.resumable import TokenRecord, numbered
from notso.web.api.shared.serializer import (
    Serializer,
    closing_events_of,
    failure_event_of,
    generation_events,
    sse_events_of,
    whole_response,
)
from notso.web.api.shared.services import ApiServices, api_services
from notso.web.edge.access import owner_of
from notso.web.edge.errors import ApiError, api_error_of
from notso.web.engine.model_names import (
    ModelChoice,
    adapter_id,
    adapters_of,
    answering,
    choose,
    model_id,
)
from notso.web.engine.port import ChatEngine
from notso.web.engine.running import RunningRequest, Submission, Submissions

logger = logging.getLogger("notso.web.api")

Owner = Annotated[str, Depends(owner_of)]
T = TypeVar("T")

LONGEST_RETRY_SECONDS = 60
CONVERSATION = "x-conversation-id"
BACKGROUND = "notso.background"
"""Scope key of batch requests, which have lower priority."""
INCOMPLETE = "notso.incomplete"
"""Scope key of streams that ended with an error."""
_CONVERSATION_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def require_json(request: Request) -> None:
    """Raise ApiError (415) for a body of another type, before it is read."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "unsupported_media_type", "the body must be application/json")


async def read_body(request: Request, parse: Callable[[Mapping[str, Any]], T], *, of_any_type: bool = False) -> T:
    """Parse the body. Raises ApiError: 415 for another type, 400 if invalid.

    With `of_any_type`, the content type is not checked. With the setting `strict_fields`, hints are rejected.
    """
    if not of_any_type:
        require_json(request)
    body = await request.body()
    shared = api_services(request).shared
    asked = await shared.large_work.run(lambda: parse(parse_object(body)), len(body), owner_of(request))
    if isinstance(asked, ApiRequest) and request.headers.get(CONVERSATION):
        asked = asked.in_named_conversation()
    if shared.settings.strict_fields and isinstance(asked, ApiRequest):
        refuse_hints(asked.hints)
    return asked


async def with_prompt(request: Request, work: Callable[[], T]) -> T:
    # Runs `work` like parsing the body, because the size of the body bounds the size of the prompt.
    return await api_services(request).shared.large_work.run(work, len(await request.body()), owner_of(request))


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that is kept loaded; `info` has the name reported to clients."""

    engine: ChatEngine
    info: ModelInfo
    choice: ModelChoice


def require_serving(services: ApiServices) -> None:
    """Raise ApiError (503) while stopping or before the first load."""
    host = services.shared.engine
    if services.shared.stopping:
        raise ApiError(503, "shutting_down", "the server is stopping", retry_after_seconds=5)
    if host.state == "loading" and not any(served.info is not None for served in host.models()):
        raise ApiError(503, "model_loading", "the model is being loaded", retry_after_seconds=5)


async def chosen_model(services: ApiServices, wanted: str | None) -> ModelChoice:
    """Resolve the `model` field.

    Raises ApiError: 404 if unknown, 400 if the file cannot be used, 503 as in `require_serving`.
    """
    require_serving(services)
    host, registry = services.shared.engine, services.shared.model_registry
    await host.settled()
    choice = await choose(host, registry, wanted)
    if host.default.state == "failed" and (choice is None or host.model(choice.model) is host.default):
        raise _failed(host.failure)
    if choice is None:
        info, adapters = host.default.info, adapters_of(host.default)
        names = [model_id(info), *(adapter_id(info, each) for each in adapters)] if info is not None else []
        said = f"there is no such model; GET /v1/models lists the available models, such as {', '.join(names)}"
        raise ApiError(404, "model_not_found", said, param="model")
    served = host.model(choice.model)
    if registry is not None and registry.check is not None and served.info is None and served.path is not None:
        path = served.path
        try:
            await asyncio.to_thread(registry.check, path)
        except Exception as error:
            raise _unusable(error) from error
    return choice


@asynccontextmanager
async def serving(services: ApiServices, wanted: str | None = None) -> AsyncIterator[Serving]:
    """Wait for the named model to load, and keep it loaded. Raises ApiError."""
    choice = await chosen_model(services, wanted)
    running = services.shared.requests.open("", counts=False)
    try:
        engine = await _loaded(running, choice)
        yield Serving(engine, answering(services.shared.engine, choice, engine.info), choice)
    finally:
        running.close()


async def _loaded(running: RunningRequest, choice: ModelChoice) -> ChatEngine:
    try:
        engine = await running.load(choice.model)
    except ModelError as error:
        raise _failed(str(error)) from error
    if engine is None:
        raise ApiError(503, "shutting_down", "the request was canceled", retry_after_seconds=5)
    return engine


def _failed(why: str) -> ApiError:
    return ApiError(503, "model_failed", f"no model is available: {why}", retry_after_seconds=60)


def _unusable(error: Exception) -> ApiError:
    if isinstance(error, NotsoError):
        return ApiError(400, "model_not_supported", str(error), param="model")
    if isinstance(error, OSError):
        return ApiError(400, "model_not_supported", f"the file cannot be read: {error.strerror}", param="model")
    return known(error)


async def respond(
    request: Request,
    services: ApiServices,
    owner: str,
    asked: ApiRequest,
    serializer_of: Callable[[ModelInfo], Serializer],
) -> Response:
    """Answer a request, whole or streamed. Raises ApiError only before the first byte.

    Disconnecting stops the answer, unless X-Conversation-Id was sent or it runs in the background.
    """
    dropped: list[str] = []  # reported in a header with the ignored fields
    response = await _response(request, services, owner, asked, serializer_of, dropped)
    response.headers.update(await with_prompt(request, lambda: ignored_headers(asked, dropped)))
    return response


async def _response(
    request: Request,
    services: ApiServices,
    owner: str,
    asked: ApiRequest,
    serializer_of: Callable[[ModelInfo], Serializer],
    dropped: list[str],
) -> Response:
    host, choice = services.shared.engine, await chosen_model(services, asked.model)
    choices, conversation, form = len(list(asked.choices)), conversation_of(request), wanted_receipt(request)
    running = _admitted(services, owner, choices)
    try:
        engine = await _loaded(running, choice)
        info = answering(host, choice, engine.info)
        dropped += dropped_by_template(info, asked, strict=services.shared.settings.strict_fields)
        if asked.keep_alive_s is not None:
            host.keep(host.model(choice.model), asked.keep_alive_s)
        if choices > info.max_num_seqs:
            raise ApiError(400, "invalid_value", f"n must be at most {info.max_num_seqs} on this server", param="n")
        if conversation is not None and choices > 1:
            raise ApiError(400, "invalid_value", "n must be 1 with X-Conversation-Id", param="n")
        serializer = serializer_of(info)
        running.name = serializer.id
        if asked.background:
            if conversation is not None:
                raise ApiError(
                    400, "invalid_value", "X-Conversation-Id cannot be combined with background", param=CONVERSATION
                )
            conversation = serializer.id
        cached_of = secrets.token_hex(16) if asked.fresh else owner
        priority: Priority = "background" if request.scope.get(BACKGROUND) else "api"
        kept_as = serializer.id if asked.keep else None
        options = replace(
            asked.options, owner=cached_of, priority=priority, conversation=kept_as, adapter=choice.adapter
        )

        each = tuple(Submission(prompt, params, options) for prompt, params in asked.choices)
        left = left_response(request)
        survives = (asked.background and asked.keep) or (asked.keep_stream and conversation is not None)
        if survives:
            each = (replayed(each[0], left),)
        if form is not None:
            each = tuple(map(recorded, each))
            serializer = ReceiptSerializer(serializer, engine, each, form)
        ask = Submissions(each)

        async def begin() -> None:
            # Everything that can be rejected is rejected here, before the first byte.
            await running.begin(ask, lambda work: with_prompt(request, work))

        if conversation is None:
            await begin()
        else:
            async with services.resumable_streams.claimed(owner, conversation, serializer.id):
                await begin()
                record = TokenRecord(each[0].options.replay) if survives else None
                stream = services.resumable_streams.keep(owner, conversation, running, serializer.again(), record)
            if survives and services.background is not None:
                seed = each[0].params.seed or 0
                await services.background.follow(request, owner, serializer.id, seed, stream)
    except BaseException as error:
        running.close()
        if isinstance(error, Exception):
            raise known(error, asked.names) from error
        raise
    events = sse_events(running, serializer, request.scope)
    try:
        if conversation is not None:
            if asked.stream:
                return EventStream(numbered(events, 0, serializer.ping), lambda: None)
            if asked.background:
                return JSONResponse(serializer.body())
            return await whole(running, serializer)
        if asked.stream:
            return EventStream(events, running.close)
        return await _unless_gone(request, running, serializer)
    except Exception as error:
        raise known(error, asked.names) from error


def conversation_of(request: Request) -> str | None:
    """Return the conversation header. Raises ApiError (400) if malformed."""
    name = request.headers.get(CONVERSATION)
    if name is not None and not _CONVERSATION_NAME.fullmatch(name):
        raise ApiError(
            400, "invalid_value", "X-Conversation-Id must be 1 to 128 visible characters", param=CONVERSATION
        )
    return name


async def sse_events(
    running: RunningRequest, serializer: Serializer, scope: Scope | None = None
) -> AsyncIterator[bytes]:
    """Yield the whole stream. An error becomes its last frame and sets INCOMPLETE in the scope."""
    try:
        for sse_event in serializer.initial_events():
            yield sse_event
        async for item in generation_events(running):
            if item is None:
                yield serializer.ping
                continue
            for sse_event in await sse_events_of(serializer, *item):
                yield sse_event
        await serializer.finalize()
        for sse_event in await closing_events_of(serializer):
            yield sse_event
    except Exception as error:
        if scope is not None:
            scope[INCOMPLETE] = True
        yield await failure_event_of(serializer, known(error))


async def whole(running: RunningRequest, serializer: Serializer) -> Response:
    """Return the whole response. Raises the answer's error."""
    async for item in generation_events(running):
        if item is not None:
            for _ in await sse_events_of(serializer, *item):
                pass
    await serializer.finalize()
    return await whole_response(serializer)


def known(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Convert an error to an ApiError with this API's field names; log unexpected ones."""
    mapped = api_error_of(error).called(names or {})
    if mapped.code == "internal_error":
        logger.error("unexpected %s on an API request", type(error).__name__, exc_info=error)
    return mapped


def _admitted(services: ApiServices, owner: str, choices: int) -> RunningRequest:
    requests = services.shared.requests
    running = requests.admit(owner, choices=choices, on_end=services.metrics.observe)
    if running is not None:
        return running
    info = services.shared.engine.info
    rounds = math.ceil(requests.waiting / (info.max_num_seqs if info is not None else 1))
    seconds = min(LONGEST_RETRY_SECONDS, math.ceil(rounds * services.metrics.mean_generation_seconds))
    raise ApiError(429, "queue_full", "too many requests are waiting", retry_after_seconds=max(1, seconds))


async def _unless_gone(request: Request, running: RunningRequest, serializer: Serializer) -> Response:
    writing = asyncio.create_task(whole(running, serializer))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise ApiError(499, "client_left", "the client disconnected")
        return writing.result()
    finally:
        for task in (writing, leaving):
            task.cancel()
        running.close()


async def events_of_choices(
    request: Request, services: ApiServices, owner: str, asked: ApiRequest
) -> tuple[ModelInfo, list[list[Event]]]:
    """Run any number of choices, up to `max_num_seqs` at a time, and return the events of each.

    Disconnecting stops the choices. Raises ApiError.
    """
    working = asyncio.create_task(_in_groups(request, services, owner, asked))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "client_left", "the client disconnected")
        return working.result()
    except Exception as error:
        raise known(error, asked.names) from error
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _in_groups(
    request: Request, services: ApiServices, owner: str, asked: ApiRequest
) -> tuple[ModelInfo, list[list[Event]]]:
    choice = await chosen_model(services, asked.model)
    priority: Priority = "background" if request.scope.get(BACKGROUND) else "api"
    options = replace(asked.options, owner=owner, priority=priority, adapter=choice.adapter)
    submissions = [Submission(prompt, params, options) for prompt, params in asked.choices]
    found: list[list[Event]] = []
    async with serving(services, asked.model) as model:
        while len(found) < len(submissions):
            group = submissions[len(found) : len(found) + model.info.max_num_seqs]
            running = _admitted(services, owner, len(group))
            try:
                await _loaded(running, choice)
                await running.begin(Submissions(tuple(group)), lambda work: with_prompt(request, work))
                events: list[list[Event]] = [[] for _ in group]
                async for item in generation_events(running):
                    if item is not None:
                        number, event = item
                        if event.error is not None:
                            raise event.error
                        events[number].append(event)
                found += events
            finally:
                running.close()
        return model.info, found


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """An event stream that calls `at_end` at its end or on disconnect, even before its first chunk."""

    # The generator's own `finally` would not run if the generator was never started.
    def __init__(self, chunks: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()
