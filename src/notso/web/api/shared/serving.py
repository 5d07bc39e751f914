"""Process API requests: parse and admit them, generate choices, and respond.

Each choice (one prompt with one set of sampling parameters) is generated separately.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from notso.smollm3 import Event, InvalidRequestError, ModelError, ModelInfo, NotsoError
from notso.web.api.request_fields.fields import (
    REPAIRED,
    Notes,
    RequestHint,
    find_hints,
    invalid_field,
    invalid_text,
    parse_repaired,
    read_fields,
    reject_hints,
)
from notso.web.api.request_fields.sampling_fields import MAX_CHOICES
from notso.web.api.shared.api_request import (
    ApiRequest,
    Prompt,
    check_work,
    find_dropped_parts,
    format_ignored_header,
    ignored_headers,
)
from notso.web.api.shared.background import resumed_response, with_replay
from notso.web.api.shared.receipts import ReceiptSerializer, requested_receipt, with_seed_and_token_ids
from notso.web.api.shared.resumable import RemoteAnswer, ResumableStream, TokenRecord, number_events
from notso.web.api.shared.serializer import (
    PING,
    PING_SECONDS,
    Serializer,
    as_api_error,
    generation_events,
    large_response,
    serialize_closing,
    serialize_event,
    serialize_failure,
)
from notso.web.api.shared.services import ApiServices, api_services
from notso.web.edge.access import caller_of, owner_of
from notso.web.edge.errors import ApiError
from notso.web.edge.limits import RELEASE_BODY
from notso.web.engine.host import ServedModel
from notso.web.engine.model_names import (
    ModelChoice,
    adapter_id,
    adapter_names,
    find_model,
    model_id,
    reported_model_info,
)
from notso.web.engine.port import ChatEngine
from notso.web.engine.running import RunningRequest, Submission, Submissions, count_prompt, max_token_use

T = TypeVar("T")
F = TypeVar("F", bound=BaseModel)

LONGEST_RETRY_SECONDS = 60
CONVERSATION = "x-conversation-id"
BACKGROUND = "notso.background"
"""ASGI scope key that marks requests of batches, which run at lower priority."""
INCOMPLETE = "notso.incomplete"
"""ASGI scope key that is set when a stream ends with an error."""
_CONVERSATION_NAME = re.compile(r"[\x21-\x7e]{1,128}")


async def _owner(request: Request) -> str:  # a coroutine: FastAPI would call a plain function in a thread
    return caller_of(request).owner


Owner = Annotated[str, Depends(_owner)]


def require_json(request: Request) -> None:
    """Raise ApiError (415) unless the content type is JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "unsupported_media_type", "the body must be application/json")


async def read_body(request: Request, parse: Callable[[Mapping[str, Any]], T], *, of_any_type: bool = False) -> T:
    """Parse the JSON body. Raises Problem (429) if the queue is full.

    Raises ApiError: 415 for another content type (unless `of_any_type`), 400 for an invalid body, or for a hint
    that `strict_fields` rejects.
    """
    if not of_any_type:
        require_json(request)
    body = await request.body()
    shared = api_services(request).shared

    def parse_body() -> tuple[T, bool]:
        content, is_repaired = parse_repaired(body)
        return parse(content), is_repaired

    parsed, is_repaired = await shared.large_work.run(parse_body, len(body), owner_of(request))
    strict = shared.settings.strict_fields
    if is_repaired and isinstance(parsed, ApiRequest) and not strict:
        parsed = replace(parsed, ignored=(*parsed.ignored, REPAIRED))
    elif is_repaired and not isinstance(parsed, list):  # if it is a list of files, the body is read again
        raise invalid_text()
    if isinstance(parsed, ApiRequest) and request.headers.get(CONVERSATION):
        parsed = parsed.in_named_conversation()
    if isinstance(parsed, ApiRequest):
        request.state.field_names = parsed.names  # to name fields in later errors
    if strict and isinstance(parsed, ApiRequest):
        reject_hints(parsed.hints)
    return parsed


async def read_fields_and_headers(
    request: Request, kind: type[F], notes: Notes, *, of_any_type: bool = False
) -> tuple[F, dict[str, str]]:
    """Return a body's fields, and the header that lists ignored ones. Raises the same errors as `read_body`."""

    def parse(body: Mapping[str, Any]) -> tuple[F, tuple[RequestHint, ...]]:
        fields = read_fields(kind, body, notes)
        return fields, find_hints(fields, body)

    fields, hints = await read_body(request, parse, of_any_type=of_any_type)
    return fields, hint_headers(request, hints)


def hint_headers(request: Request, hints: Sequence[RequestHint]) -> dict[str, str]:
    """Return the response header that lists the hints. Raises ApiError (400) if `strict_fields` rejects one."""
    if api_services(request).shared.settings.strict_fields:
        reject_hints(hints)
    return format_ignored_header(hint.name for hint in hints)


async def run_prompt_work(request: Request, work: Callable[[], T]) -> T:
    # Runs `work` in the queue that also parses bodies. The prompt is made from the body, so the size of the body serves
    # as an estimate of the work.
    return await api_services(request).shared.large_work.run(work, len(await request.body()), owner_of(request))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: ChatEngine
    info: ModelInfo  # with the model name reported to clients
    choice: ModelChoice


def require_model_available(services: ApiServices) -> None:
    """Raise ApiError (503) if the server is stopping or loading its first model."""
    host = services.shared.engine
    if services.shared.stopping:
        raise ApiError(503, "shutting_down", "the server is stopping", retry_after_seconds=5)
    if host.state == "loading" and not any(served.info is not None for served in host.models()):
        raise model_loading_error()


async def resolve_model_choice(services: ApiServices, name: str | None) -> ModelChoice:
    """Return the model that the field `model` names.

    Raises ApiError: 404 if unknown, 400 if its file is unusable, 503 if no model is available.
    """
    require_model_available(services)
    host, registry = services.shared.engine, services.shared.model_registry
    await host.wait_for_first_load()
    choice = await find_model(host, registry, name)
    if host.default.state == "failed" and (choice is None or host.model(choice.model) is host.default):
        raise model_failed_error(host.default, host.failure)
    if choice is None:
        info, adapters = host.default.info, adapter_names(host.default)
        names = [model_id(info), *(adapter_id(info, each) for each in adapters)] if info is not None else []
        message = f"there is no such model; GET /v1/models lists the available models, such as {', '.join(names)}"
        raise ApiError(404, "model_not_found", message, param="model")
    served = host.model(choice.model)
    if registry is not None and registry.check is not None and served.info is None and served.path is not None:
        path = served.path
        try:
            await asyncio.to_thread(registry.check, path)
        except Exception as error:
            raise _unusable_model_error(error) from error
    return choice


@asynccontextmanager
async def serving(services: ApiServices, name: str | None = None) -> AsyncIterator[LoadedModel]:
    """Load the named model and keep it loaded within the context. Raises ApiError."""
    choice = await resolve_model_choice(services, name)
    running = services.shared.requests.open("", counts=False)
    try:
        engine = await _load_engine(services, running, choice)
        yield LoadedModel(engine, reported_model_info(services.shared.engine, choice, engine.info), choice)
    finally:
        running.close()


async def _load_engine(services: ApiServices, running: RunningRequest, choice: ModelChoice) -> ChatEngine:
    try:
        engine = await running.load(choice.model)
    except ModelError as error:
        raise model_failed_error(services.shared.engine.model(choice.model), str(error)) from error
    if engine is None:
        raise ApiError(503, "shutting_down", "the request was canceled", retry_after_seconds=5)
    return engine


def model_loading_error() -> ApiError:
    return ApiError(503, "model_loading", "the model is being loaded", retry_after_seconds=5)


def model_failed_error(served: ServedModel, reason: str) -> ApiError:
    message = f"no model is available: {reason}"
    return ApiError(503, "model_failed", message, retry_after_seconds=served.retry_seconds)


def _unusable_model_error(error: Exception) -> ApiError:
    if isinstance(error, NotsoError):
        return ApiError(400, "model_not_supported", str(error), param="model")
    if isinstance(error, OSError):
        return ApiError(400, "model_not_supported", f"the file cannot be read: {error.strerror}", param="model")
    return as_api_error(error)


async def respond(
    request: Request, api_request: ApiRequest, serializer_of: Callable[[ModelInfo], Serializer]
) -> Response:
    """Generate a response, whole or streamed. Raises ApiError or NotsoError only before the first byte.

    A disconnect stops the request unless it is in the background or has X-Conversation-Id.
    """
    services, owner = api_services(request), owner_of(request)
    host, choice = services.shared.engine, await resolve_model_choice(services, api_request.model)
    conversation, receipt_form = conversation_name(request), requested_receipt(request)
    running = _admit(services, owner, len(list(api_request.choices)))
    try:
        engine = await _load_engine(services, running, choice)
        info = reported_model_info(host, choice, engine.info)
        dropped = find_dropped_parts(info, api_request, strict=services.shared.settings.strict_fields)
        await _check_prompts(request, api_request, engine)
        _check_choices(api_request, info, conversation)
        serializer = serializer_of(info)
        running.name = serializer.id
        if api_request.background:
            conversation = serializer.id
        submissions = _submissions(request, api_request, serializer.id, choice.adapter)
        is_stored_stream = api_request.keep_stream and conversation is not None
        survives_restart = is_stored_stream or (api_request.background and api_request.store)
        if survives_restart:  # after a restart, the response continues from its recorded tokens
            submissions = (with_replay(submissions[0], resumed_response(request)),)
        if receipt_form is not None:
            submissions = tuple(map(with_seed_and_token_ids, submissions))
            serializer = ReceiptSerializer(serializer, engine, submissions, receipt_form)

        async def begin() -> dict[str, str]:
            # Returns the response's headers. Rejects invalid requests now, because the status code cannot change after
            # the first byte.
            await running.begin(Submissions(submissions), lambda work: run_prompt_work(request, work))
            # `running.begin` comes first, because its errors name the field of an invalid schema. The headers are built
            # here and not after the `try`, so that `running` is closed if the queue of `run_prompt_work` is full.
            headers = await run_prompt_work(request, lambda: ignored_headers(api_request, dropped))
            if api_request.keep_alive_s is not None:  # last, because a rejected request must not change the timer
                host.keep(host.model(choice.model), api_request.keep_alive_s)
            return headers

        if conversation is None:
            headers = await begin()
        else:
            async with services.resumable_streams.claim_conversation(owner, conversation, serializer.id):
                headers = await begin()
                record = TokenRecord(submissions[0].options.replay) if survives_restart else None
                fresh_copy = serializer.fresh_copy()
                stream = services.resumable_streams.follow(owner, conversation, running, fresh_copy, record)
            if survives_restart:
                seed = submissions[0].params.seed or 0
                await services.background.persist(request, owner, serializer.id, seed, stream)
    except BaseException as error:
        running.close()
        if isinstance(error, Exception):
            raise _prompt_error(error, api_request) from error
        raise
    _release_body(request)
    response = await _response(request, api_request, running, serializer, is_resumable=conversation is not None)
    response.headers.update(headers)
    return response


def _check_choices(api_request: ApiRequest, info: ModelInfo, conversation: str | None) -> None:
    choices, n = len(list(api_request.choices)), len(api_request.params)
    # Only n (answers per prompt) is limited to max_num_seqs. Choices of further prompts wait in the engine's queue.
    if n > info.max_num_seqs:
        raise invalid_field("n", f"n must be at most {info.max_num_seqs} on this server")
    if choices > max(MAX_CHOICES, n):
        raise invalid_field("n", f"n times the number of prompts exceeds {MAX_CHOICES}")
    check_work(info, api_request)
    if conversation is None:
        return
    if n > 1:
        raise invalid_field("n", "n must be 1 with X-Conversation-Id")
    if choices > 1:
        raise invalid_field("prompt", "only one prompt is allowed with X-Conversation-Id")
    if api_request.background:
        raise invalid_field(CONVERSATION, "X-Conversation-Id cannot be combined with background")


def _submissions(
    request: Request, api_request: ApiRequest, answer_id: str, adapter: str | None
) -> tuple[Submission, ...]:
    options = replace(
        api_request.options,
        owner=secrets.token_hex(16) if api_request.fresh else owner_of(request),  # a random owner has no cached prompts
        priority="background" if request.scope.get(BACKGROUND) else "api",
        conversation=answer_id if api_request.store else None,
        adapter=adapter,
    )
    return tuple(Submission(prompt, params, options) for prompt, params in api_request.choices)


async def _response(
    request: Request, api_request: ApiRequest, running: RunningRequest, serializer: Serializer, *, is_resumable: bool
) -> Response:
    if api_request.stream:
        events = sse_events(running, serializer, request.scope)
        if is_resumable:
            return EventStream(number_events(events, 0, serializer.ping), lambda: None)
        return EventStream(events, running.close)
    if api_request.background:
        return JSONResponse(serializer.body())
    if is_resumable:
        return await respond_whole(running, serializer)
    try:
        return await _unless_disconnected(request, respond_whole(running, serializer))
    finally:
        running.close()


def _prompt_error(error: Exception, api_request: ApiRequest, before: int = 0) -> ApiError:
    # If there are several prompts, names the invalid one. `before` is the number of choices that were submitted
    # earlier.
    failure = as_api_error(error, api_request.names)
    is_prompt = failure.param == api_request.names.get("messages", "messages")
    if isinstance(error, InvalidRequestError) and error.index is not None and is_prompt:
        name = api_request.prompt_name((before + error.index) // len(api_request.params))
        if name != failure.param:
            failure.param, failure.message = name, f"{failure.message} ({name})"
    return failure


def _release_body(request: Request) -> None:
    # Otherwise, the body would count against the memory budget until the response starts, which is after generation if
    # the response is not streamed.
    request._body = b""
    if (release := request.scope.get(RELEASE_BODY)) is not None:
        release()


async def _check_prompts(request: Request, api_request: ApiRequest, engine: ChatEngine) -> None:
    def count(prompt: Prompt) -> int:
        return max_token_use(engine, Submission(prompt, api_request.params[0], api_request.options)).prompt_tokens

    for index in range(len(api_request.prompts)) if api_request.prompt_limit is not None else ():
        await run_prompt_work(request, partial(api_request.check_prompt, index, count))


def conversation_name(request: Request) -> str | None:
    """Return the header X-Conversation-Id, if given. Raises ApiError (400) if malformed."""
    name = request.headers.get(CONVERSATION)
    if name is not None and not _CONVERSATION_NAME.fullmatch(name):
        raise invalid_field(CONVERSATION, "X-Conversation-Id must be 1 to 128 visible ASCII characters")
    return name


async def sse_events(
    running: RunningRequest, serializer: Serializer, scope: Scope | None = None
) -> AsyncIterator[bytes]:
    """Yield all frames of a stream. On an error, yield an error frame and set INCOMPLETE in the scope."""
    loop = asyncio.get_running_loop()
    try:
        for sse_event in serializer.initial_events():
            yield sse_event
        sent_at = loop.time()
        async for item in generation_events(running):
            for sse_event in () if item is None else await serialize_event(serializer, *item):
                yield sse_event
                sent_at = loop.time()
            if item is None or loop.time() - sent_at >= PING_SECONDS:  # hidden reasoning causes events, but no frames
                yield serializer.ping
                sent_at = loop.time()
        await serializer.finalize()
        for sse_event in await serialize_closing(serializer):
            yield sse_event
    except Exception as error:
        if scope is not None:
            scope[INCOMPLETE] = True
        yield await serialize_failure(serializer, as_api_error(error))


def reread_stream(request: Request, stream: ResumableStream | RemoteAnswer, start: int) -> Response:
    """Stream an answer's events from number `start`. Raises Problem (429) if the owner has too many streams."""
    services, owner = api_services(request), owner_of(request)
    services.reread_streams.opened(owner)
    stream.mark_read()
    if isinstance(stream, RemoteAnswer):
        events = stream.events(start, PING)
    else:
        fresh_copy = stream.serializer.fresh_copy()
        events = number_events(sse_events(stream.running, fresh_copy), start, fresh_copy.ping)
    return EventStream(events, lambda: services.reread_streams.closed(owner))


async def respond_whole(running: RunningRequest, serializer: Serializer) -> Response:
    """Generate and return a whole response. Raises any error of the generation."""
    async for item in generation_events(running):
        if item is not None:
            for _ in await serialize_event(serializer, *item):
                pass
    await serializer.finalize()
    return await large_response(serializer.body)


def _admit(services: ApiServices, owner: str, choices: int) -> RunningRequest:
    requests, info = services.shared.requests, services.shared.engine.info
    # Choices beyond those that can run concurrently are not counted, so that one request does not fill the queue.
    counted = choices if info is None else min(choices, info.max_num_seqs)
    running = requests.admit(owner, choices=counted, on_end=services.metrics.observe)
    if running is not None:
        return running
    rounds = math.ceil(requests.waiting / (info.max_num_seqs if info is not None else 1))
    seconds = min(LONGEST_RETRY_SECONDS, math.ceil(rounds * services.metrics.mean_generation_seconds))
    raise ApiError(429, "queue_full", "too many requests are waiting", retry_after_seconds=max(1, seconds))


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    # Returns the result of `work`, or cancels it and raises ApiError (499) if the client disconnects.
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "client_left", "the client disconnected")
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def count_prompt_tokens(request: Request, api_request: ApiRequest) -> tuple[int, dict[str, str]]:
    """Return a conversation's token count, and the response's headers. Raises ApiError or NotsoError."""
    services = api_services(request)
    async with serving(services, api_request.model) as model:
        dropped = find_dropped_parts(model.info, api_request, strict=services.shared.settings.strict_fields)
        count = await run_prompt_work(
            request, lambda: count_prompt(model.engine, api_request.messages, api_request.options)
        )
    return count, await run_prompt_work(request, lambda: ignored_headers(api_request, dropped))


async def generate_choices(request: Request, api_request: ApiRequest) -> tuple[ModelInfo, list[list[Event]]]:
    """Generate all choices, up to `max_num_seqs` at a time. Raises ApiError (499 on a disconnect) or NotsoError."""
    return await _unless_disconnected(request, _generate_in_groups(request, api_request))


async def _generate_in_groups(request: Request, api_request: ApiRequest) -> tuple[ModelInfo, list[list[Event]]]:
    services, owner = api_services(request), owner_of(request)
    results: list[list[Event]] = []
    async with serving(services, api_request.model) as model:
        submissions = _submissions(request, api_request, "", model.choice.adapter)
        await _check_prompts(request, api_request, model.engine)
        while len(results) < len(submissions):
            group = submissions[len(results) : len(results) + model.info.max_num_seqs]
            running = _admit(services, owner, len(group))
            try:
                await _load_engine(services, running, model.choice)
                try:
                    await running.begin(Submissions(group), lambda work: run_prompt_work(request, work))
                except InvalidRequestError as error:
                    raise _prompt_error(error, api_request, len(results)) from error
                events: list[list[Event]] = [[] for _ in group]
                async for item in generation_events(running):
                    if item is not None:
                        events[item[0]].append(item[1])
                results += events
            finally:
                running.close()
        return model.info, results


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Calls `at_end` when the stream ends or the client disconnects, even before the first chunk."""

    # A `finally` in the generator `chunks` does not run if the client disconnects before the generator has started.
    def __init__(self, chunks: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()
