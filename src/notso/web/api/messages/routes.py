"""Routes of Anthropic's API: messages and token counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.web.api.messages.request import MessageRequest, parse_count_request, parse_message_request
from notso.web.api.messages.stream import MessageSerializer
from notso.web.api.shared.api_request import dropped_by_template, ignored_headers
from notso.web.api.shared.completion import new_id
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, known, read_body, respond, serving, with_prompt
from notso.web.edge.access import GUARDED
from notso.web.engine.model_names import model_id

router = APIRouter()


@router.post("/v1/messages", dependencies=[GUARDED])
async def messages(request: Request, services: Services, owner: Owner) -> Response:
    """Answer a conversation. Disconnecting stops the answer, unless X-Conversation-Id was sent."""
    keep_volatile = services.shared.settings.keep_volatile
    asked = await _read(request, services, partial(parse_message_request, keep_volatile=keep_volatile))
    return await respond(
        request, services, owner, asked, lambda info: MessageSerializer(asked, model_id(info), new_id("msg", "_"))
    )


@router.post("/v1/messages/count_tokens", dependencies=[GUARDED])
async def count_tokens(request: Request, services: Services) -> Response:
    """Count the prompt's tokens."""
    keep_volatile = services.shared.settings.keep_volatile
    asked = await _read(request, services, partial(parse_count_request, keep_volatile=keep_volatile))
    async with serving(services, asked.model) as model:
        dropped = dropped_by_template(model.info, asked, strict=services.shared.settings.strict_fields)
        try:
            count = await with_prompt(request, lambda: model.engine.count_tokens(asked.messages, asked.options))
        except Exception as error:
            raise known(error, asked.names) from error
    told: dict[str, Any] = {"input_tokens": count}
    if asked.management is not None:
        cleared = sum(each["cleared_input_tokens"] for each in asked.applied)
        told["context_management"] = {"original_input_tokens": count + cleared}
    return JSONResponse(told, headers=await with_prompt(request, lambda: ignored_headers(asked, dropped)))


async def _read(
    request: Request, services: ApiServices, parse: Callable[[Mapping[str, Any]], MessageRequest]
) -> MessageRequest:
    asked = await read_body(request, parse)
    if asked.management is None:
        return asked
    async with serving(services, asked.model) as model:
        try:
            return await with_prompt(request, lambda: asked.edited(model.engine))
        except Exception as error:
            raise known(error, asked.names) from error
