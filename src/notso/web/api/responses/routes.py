"""Responses that the server keeps, so that the next one can go on from them: asked for, and counted beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import Message
from notso.web.api.responses.items import Item, kept_input, referenced_items
from notso.web.api.responses.request import ResponseRequest, parse_input_token_request, parse_response_request
from notso.web.api.responses.stored import found_response, stored_response
from notso.web.api.responses.stream import ResponseSerializer
from notso.web.api.shared.api_request import dropped_by_template, ignored_headers
from notso.web.api.shared.completion import new_id
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, known, read_body, respond, serving, with_prompt
from notso.web.edge.access import guarded
from notso.web.edge.api_error import ApiError
from notso.web.engine.model_names import model_id
from notso.web.store.protocol import StoredResponse

router = APIRouter(dependencies=[Depends(guarded)])

Parse = Callable[[Mapping[str, Any], Mapping[str, Item] | None], ResponseRequest]


@router.post("/responses")
@router.post("/v1/responses")
async def create(request: Request, services: Services, owner: Owner) -> Response:
    """Answer, after what a stored response ends with if one is named, and keep the answer unless told not to. In the
    background: at once, with what is to be asked for later."""
    asked = await _read(request, services, owner, parse_response_request)
    if asked.keep and services.shared.store.read_only:
        raise ApiError(503, "storage_failed", "the database is damaged and only read; send store: false")
    saved: asyncio.Task[None] | None = None

    async def keep(body: dict[str, Any], conversation: tuple[Message, ...]) -> None:
        nonlocal saved
        if saved is None:  # several may read one answer; a deleted one must not come back with the last of them
            created_ms, items = int(1000 * time.time()), kept_input(asked.items, body["id"])
            stored = StoredResponse(body["id"], asked.previous_id, body, conversation, created_ms, items)
            saved = asyncio.ensure_future(services.shared.store.save_response(owner, stored))
        await asyncio.shield(saved)

    return await respond(
        request,
        services,
        owner,
        asked,
        lambda info: ResponseSerializer(asked, model_id(info), new_id("resp", "_"), keep),
    )


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, services: Services, owner: Owner) -> Response:
    """How many tokens the model would read."""
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
    """The question, with the stored items that it names, after the response that it goes on from."""
    asked = await read_body(request, lambda body: parse(body, None))
    if asked.references:
        found = await referenced_items(asked.references, partial(stored_response, services, owner))
        asked = await read_body(request, lambda body: parse(body, found))
    if asked.previous_id is None:
        return asked
    earlier = await found_response(services, owner, asked.previous_id, "previous_response_id")
    return asked.after(earlier.conversation)
