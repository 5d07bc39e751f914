"""Responses that the server keeps, so that the next one can go on from them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import Message
from notso.web.api.responses.request import parse_response_request
from notso.web.api.responses.stream import ResponseSerializer
from notso.web.api.shared.completion import model_id, new_id
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, known, read_body, respond
from notso.web.edge.access import guarded
from notso.web.edge.api_error import ApiError
from notso.web.store.protocol import StoredResponse

router = APIRouter(dependencies=[Depends(guarded)])


@router.post("/responses")
@router.post("/v1/responses")
async def create(request: Request, services: Services, owner: Owner) -> Response:
    """Answer, after what a stored response ends with if one is named, and keep the answer unless told not to."""
    asked = await read_body(request, parse_response_request)
    if asked.previous_id is not None:
        earlier = await _stored(services, owner, asked.previous_id, "previous_response_id")
        asked = asked.after(earlier.conversation)

    if asked.keep and services.shared.store.read_only:
        raise ApiError(503, "storage_failed", "the database is damaged and only read; send store: false")
    saved: asyncio.Task[None] | None = None

    async def keep(body: dict[str, Any], conversation: tuple[Message, ...]) -> None:
        nonlocal saved
        if saved is None:  # several may read one answer; a deleted one must not come back with the last of them
            stored = StoredResponse(body["id"], asked.previous_id, body, conversation, int(1000 * time.time()))
            saved = asyncio.ensure_future(services.shared.store.save_response(owner, stored))
        await asyncio.shield(saved)

    return await respond(
        request,
        services,
        owner,
        asked,
        lambda info: ResponseSerializer(asked, model_id(info), new_id("resp", "_"), keep),
    )


@router.get("/v1/responses/{response_id}")
async def show(request: Request, services: Services, owner: Owner, response_id: str) -> Response:
    """A stored response."""
    for name in request.query_params:
        raise ApiError(
            400, "unsupported_parameter", "a stored response is shown whole; leave this out", param=name[:80]
        )
    return JSONResponse((await _stored(services, owner, response_id, "response_id")).body)


@router.delete("/v1/responses/{response_id}")
async def delete(services: Services, owner: Owner, response_id: str) -> Response:
    """Delete a stored response, and what the engine has kept of it and of no other. Those that went on from it stay."""
    await _stored(services, owner, response_id, "response_id")
    await services.shared.store.delete_response(owner, response_id)
    if services.shared.engine.engine is not None:
        await asyncio.to_thread(services.shared.engine.engine.clear_cache, owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _stored(services: ApiServices, owner: str, id: str, param: str) -> StoredResponse:
    try:
        found = await services.shared.store.response(owner, id)
    except Exception as error:
        raise known(error) from error
    if found is None:
        raise ApiError(404, "not_found", "no response of that id is stored", param=param)
    return found
