"""Routes for creating stored responses and counting their input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import Message
from notso.web.api.responses.file_search import with_passages
from notso.web.api.responses.items import Item, kept_input, referenced_items
from notso.web.api.responses.request import ResponseRequest, parse_input_token_request, parse_response_request
from notso.web.api.responses.stored import found_response, stored_response
from notso.web.api.responses.stream import ResponseSerializer
from notso.web.api.shared.api_request import dropped_by_template, ignored_headers
from notso.web.api.shared.background import left_response
from notso.web.api.shared.completion import new_id
from notso.web.api.shared.given_documents import openai_files, parsed_with_files, read_body_with_files
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, known, respond, serving, with_prompt
from notso.web.edge.access import GUARDED
from notso.web.edge.api_error import ApiError
from notso.web.engine.model_names import model_id
from notso.web.store.protocol import StoredResponse

router = APIRouter()

Parse = Callable[[Mapping[str, Any], Mapping[str, Item] | None], ResponseRequest]


@router.post("/responses", dependencies=[GUARDED])
@router.post("/v1/responses", dependencies=[GUARDED])
async def create(request: Request, services: Services, owner: Owner) -> Response:
    """Answer, optionally continuing a stored response. The answer is stored unless `store` is false. With `background`,
    return at once; the response is polled by id."""
    asked = await _read(request, services, owner, parse_response_request)
    if asked.keep and services.shared.store.read_only:
        raise ApiError(503, "storage_failed", "the database is damaged and read-only; use store: false")
    saved: asyncio.Task[None] | None = None
    left = left_response(request)
    name = new_id("resp", "_") if left is None else left.id
    created = 0 if left is None else left.created_ms // 1000

    async def keep(body: dict[str, Any], conversation: tuple[Message, ...]) -> None:
        nonlocal saved
        if saved is None:  # several readers may finish it; saving again would restore a deleted response
            created_ms, items = int(1000 * time.time()), kept_input(asked.items, body["id"])
            stored = StoredResponse(body["id"], asked.previous_id, body, conversation, created_ms, items)
            saved = asyncio.ensure_future(services.shared.store.save_response(owner, stored))
        await asyncio.shield(saved)

    return await respond(
        request,
        services,
        owner,
        asked,
        lambda info: ResponseSerializer(asked, model_id(info), name, keep, created),
    )


@router.post("/v1/responses/input_tokens", dependencies=[GUARDED])
async def input_tokens(request: Request, services: Services, owner: Owner) -> Response:
    """Count the prompt's tokens."""
    asked = await _read(request, services, owner, parse_input_token_request)
    async with serving(services, asked.model) as model:
        dropped = dropped_by_template(model.info, asked, strict=services.shared.settings.strict_fields)
        try:
            count = await with_prompt(request, lambda: model.engine.count_tokens(asked.messages, asked.options))
        except Exception as error:
            raise known(error, asked.names) from error
    headers = await with_prompt(request, lambda: ignored_headers(asked, dropped))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count}, headers=headers)


async def _read(request: Request, services: ApiServices, owner: str, parse: Parse) -> ResponseRequest:
    stored: dict[str, Item] = {}

    async def read() -> ResponseRequest:
        return await read_body_with_files(
            request,
            openai_files,
            lambda body, files: parsed_with_files(body, files, lambda given: parse(given, stored)),
        )

    asked = await read()
    if asked.references:
        stored |= await referenced_items(asked.references, partial(stored_response, services, owner))
        asked = await read()
    if asked.previous_id is not None:
        earlier = await found_response(services, owner, asked.previous_id, "previous_response_id")
        asked = asked.after(earlier.conversation)
    return asked if asked.search is None else await with_passages(services, owner, asked)
