"""Routes of OpenAI's Responses API, including those for stored and background responses."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import Message, NotsoError
from notso.web.api.request_fields.fields import (
    RequestHint,
    invalid_field,
    reject_hints,
    to_printable,
    unsupported_field,
)
from notso.web.api.responses.request import (
    Item,
    ResponseRequest,
    insert_passages,
    load_referenced_items,
    normalize_input,
    parse_input_token_request,
    parse_response_request,
)
from notso.web.api.responses.stream import ResponseSerializer
from notso.web.api.shared.api_request import IGNORED
from notso.web.api.shared.background import queued_body, response_identity
from notso.web.api.shared.given_documents import read_openai_request
from notso.web.api.shared.listing import paginate
from notso.web.api.shared.receipts import ReceiptSerializer
from notso.web.api.shared.resumable import RemoteAnswer, ResumableStream
from notso.web.api.shared.serializer import large_response
from notso.web.api.shared.services import ApiServices, Services, api_services
from notso.web.api.shared.serving import Owner, count_prompt_tokens, reread_stream, respond
from notso.web.edge.access import GUARDED, owner_of
from notso.web.edge.errors import ApiError
from notso.web.store.protocol import StoredResponse

stored_router = APIRouter()

IGNORED_PARAMETERS = ("include", "include[]", "include_obfuscation")
"""Ignored query parameters. The `include` field of the original request applies instead."""

_NUMBER = re.compile(r"[0-9]{1,9}")


@stored_router.get("/v1/responses/{response_id}", dependencies=[GUARDED])
async def show(request: Request, services: Services, owner: Owner, response_id: str) -> Response:
    """Return a stored response, or the current state of a background response. If `stream` is true,
    stream its events after event number `starting_after`."""
    query, headers = _parse_query(request, services, ("stream", "starting_after"))
    streams, start = query.get("stream", "false"), query.get("starting_after")
    if streams not in ("true", "false"):
        raise invalid_field("stream", "stream must be true or false")
    if start is not None and (streams == "false" or not _NUMBER.fullmatch(start)):
        raise invalid_field("starting_after", "starting_after must be an event number, and requires stream=true")
    running = _find_running(services, owner, response_id)
    if streams == "true":
        stream = running or await services.resumable_streams.remote_answers.find(owner, response_id)
        if stream is None:
            await get_response(services, owner, response_id, "response_id")
            raise unsupported_field("stream", "the events of this response are no longer available; use stream=false")
        return reread_stream(request, stream, 0 if start is None else int(start) + 1)
    answer = running or await _find_unfinished_remote(services, owner, response_id)
    if answer is not None:
        body = await answer.body()
        return await large_response(lambda: body, headers)
    if await services.shared.store.response(owner, response_id) is None:
        unfinished = await services.shared.store.records.unfinished_response(owner, response_id)
        if unfinished is not None:
            return await large_response(lambda: queued_body(unfinished), headers)
    stored = await get_response(services, owner, response_id, "response_id")
    return await large_response(lambda: stored.body, headers)


@stored_router.get("/v1/responses/{response_id}/input_items", dependencies=[GUARDED])
async def input_items(request: Request, services: Services, owner: Owner, response_id: str) -> Response:
    """List the input items of a response, latest first, without the items of the response that it continues."""
    query, headers = _parse_query(request, services, ("limit", "order", "after", "before"))
    running = _find_running(services, owner, response_id)
    serializer = running.serializer if running is not None else None
    if isinstance(serializer, ReceiptSerializer):
        serializer = serializer.inner
    if isinstance(serializer, ResponseSerializer):
        items = normalize_input(serializer.request.items, response_id)
    else:
        items = (await get_response(services, owner, response_id, "response_id")).input
    listed = paginate(items, query)
    return await large_response(lambda: listed, headers)


@stored_router.post("/v1/responses/{response_id}/cancel", dependencies=[GUARDED])
async def cancel(services: Services, owner: Owner, response_id: str) -> Response:
    """Stop a background response and keep its text. A response that has ended stays unchanged."""
    if (answer := await _stop(services, owner, response_id)) is not None:
        body = await answer.body()
        return await large_response(lambda: body)
    stored = await get_response(services, owner, response_id, "response_id")
    if not stored.body.get("background"):
        raise invalid_field("response_id", "only a background response can be canceled")
    return await large_response(lambda: stored.body)


@stored_router.delete("/v1/responses/{response_id}", dependencies=[GUARDED])
async def delete(services: Services, owner: Owner, response_id: str) -> Response:
    """Stop a response if it is running, then delete it with its cached prompt. Responses that continue it are kept."""
    if isinstance(await _stop(services, owner, response_id), ResumableStream):
        services.resumable_streams.forget(owner, response_id)
    else:
        await get_response(services, owner, response_id, "response_id")
    await services.shared.store.records.delete_unfinished_response(owner, response_id)
    await services.shared.store.delete(owner, "response", response_id)
    with contextlib.suppress(NotsoError, RuntimeError):  # if no engine or thread is available, a periodic task retries
        await services.shared.engine.clear_cache(owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def get_response(services: ApiServices, owner: str, id: str, param: str) -> StoredResponse:
    """Return a stored response. Raises ApiError: 404 if there is none, 503 if it is unfinished."""
    found = await services.shared.store.response(owner, id)
    if found is None and await services.shared.store.records.unfinished_response(owner, id) is not None:
        message = "this response is not finished: it is being generated, or a server will continue it"
        raise ApiError(503, "model_loading", message, param=param, retry_after_seconds=2)
    if found is None:
        raise ApiError(404, "not_found", "no response with that id is stored", param=param)
    return found


async def _stop(services: ApiServices, owner: str, response_id: str) -> ResumableStream | RemoteAnswer | None:
    # Stops a response and waits until it ends. Returns None if it is not being generated.
    running = _find_running(services, owner, response_id)
    answer = running or await _find_unfinished_remote(services, owner, response_id)
    if answer is not None:
        answer.stop()
        await answer.wait_for_end()
    return answer


async def _find_unfinished_remote(services: ApiServices, owner: str, response_id: str) -> RemoteAnswer | None:
    found = None
    if await services.shared.store.response(owner, response_id) is None:
        found = await services.resumable_streams.remote_answers.find(owner, response_id)
    return found if found is not None and not found.finished else None


def _find_running(services: ApiServices, owner: str, response_id: str) -> ResumableStream | None:
    stream = services.resumable_streams.find(owner, response_id)
    return stream if stream is not None and stream.serializer.id == response_id else None


def _parse_query(
    request: Request, services: ApiServices, names: tuple[str, ...]
) -> tuple[Mapping[str, str], dict[str, str]]:
    for name in request.query_params:
        if name not in names and name not in IGNORED_PARAMETERS:
            raise unsupported_field(to_printable(name), "unknown parameter; remove it")
    hints = [name for name in IGNORED_PARAMETERS if request.query_params.get(name, "false") != "false"]
    if services.shared.settings.strict_fields:
        reject_hints(RequestHint(name, name, False) for name in hints)
    return request.query_params, {IGNORED: ", ".join(hints)} if hints else {}


router = APIRouter()


@router.post("/responses", dependencies=[GUARDED])
@router.post("/v1/responses", dependencies=[GUARDED])
async def create(request: Request, services: Services, owner: Owner) -> Response:
    """Create a response, which may continue a stored one, and store it unless `store` is false. If `background` is
    true, return at once; clients poll the response by id."""
    api_request = await _read(request, parse_response_request)
    if api_request.store and services.shared.store.read_only:
        raise ApiError(503, "storage_failed", "the database is damaged and read-only; use store: false")
    saved: asyncio.Task[None] | None = None
    name, created = response_identity(request, "resp_")

    async def save(body: dict[str, Any], conversation: tuple[Message, ...]) -> None:
        nonlocal saved
        # Every reader of the stream calls `save`; saving twice would restore a deleted response.
        if saved is None or (saved.done() and not saved.cancelled() and saved.exception() is not None):
            stored_ms, items = int(1000 * time.time()), normalize_input(api_request.items, body["id"])
            stored = StoredResponse(body["id"], api_request.previous_id, body, conversation, stored_ms, items)
            saved = asyncio.ensure_future(services.shared.store.save_response(owner, stored))
        await asyncio.shield(saved)

    return await respond(request, api_request, lambda info: ResponseSerializer(api_request, info, name, save, created))


@router.post("/v1/responses/input_tokens", dependencies=[GUARDED])
async def input_tokens(request: Request) -> Response:
    """Count the prompt's tokens."""
    api_request = await _read(request, parse_input_token_request)
    count, headers = await count_prompt_tokens(request, api_request)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count}, headers=headers)


async def _read(request: Request, parse: Callable[..., ResponseRequest]) -> ResponseRequest:
    services, owner = api_services(request), owner_of(request)
    stored: dict[str, Item] = {}

    async def read() -> ResponseRequest:
        return await read_openai_request(request, lambda body: parse(body, stored))

    api_request = await read()
    if api_request.references:
        stored |= await load_referenced_items(api_request.references, partial(services.shared.store.response, owner))
        api_request = await read()
    if api_request.previous_id is not None:
        previous = await get_response(services, owner, api_request.previous_id, "previous_response_id")
        if previous.body.get("status") == "failed":
            raise invalid_field("previous_response_id", "the previous response failed and cannot be continued")
        api_request = api_request.continue_from(previous.conversation)
    return api_request if api_request.search is None else await insert_passages(services, owner, api_request)
