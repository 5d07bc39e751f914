"""The Anthropic API: messages, whole or as a stream, and their length beforehand."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from notso.web.api.messages.request import parse_count_request, parse_message_request
from notso.web.api.messages.stream import MessageSerializer
from notso.web.api.shared.completion import model_id, new_id
from notso.web.api.shared.ignored import ignored_headers
from notso.web.api.shared.model_names import require_model
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import Owner, known, read_body, ready_engine, respond, with_prompt
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])


@router.post("/v1/messages")
async def messages(request: Request, services: Services, owner: Owner) -> Response:
    """Answer a conversation. A client that leaves stops its answer, unless it sent X-Conversation-Id."""
    asked = await read_body(
        request, partial(parse_message_request, keep_volatile=services.shared.settings.keep_volatile)
    )
    return await respond(
        request, services, owner, asked, lambda info: MessageSerializer(asked, model_id(info), new_id("msg", "_"))
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, services: Services) -> Response:
    """How many tokens the model would read."""
    asked = await read_body(request, partial(parse_count_request, keep_volatile=services.shared.settings.keep_volatile))
    engine, info = ready_engine(services)
    require_model(asked.model, info)
    try:
        count = await with_prompt(request, lambda: engine.count_tokens(asked.messages, asked.options))
    except Exception as error:
        raise known(error, asked.names) from error
    return JSONResponse({"input_tokens": count}, headers=await with_prompt(request, lambda: ignored_headers(asked)))
