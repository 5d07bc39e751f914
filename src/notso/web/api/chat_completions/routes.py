"""Routes for chat completions, resuming and stopping them."""

from __future__ import annotations

import re
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.chat_completions.stream import ChatSerializer
from notso.web.api.request_fields.fields import Fields, Name, invalid, printable, read_fields, unsupported
from notso.web.api.shared.completion import Completion, fingerprint
from notso.web.api.shared.resumable import AnswerElsewhere, ResumableStream, numbered
from notso.web.api.shared.serializer import PING
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import EventStream, Owner, read_body, respond, sse_events
from notso.web.edge.access import GUARDED
from notso.web.edge.api_error import ApiError
from notso.web.engine.model_names import model_id

router = APIRouter()

_NUMBER = re.compile(r"[0-9]{1,9}")


class ControlFields(Fields):
    """The body of POST /v1/chat/completions/control."""

    id: Name
    action: Literal["reasoning_end"]


@router.post("/chat/completions", dependencies=[GUARDED])
@router.post("/v1/chat/completions", dependencies=[GUARDED])
async def chat_completions(request: Request, services: Services, owner: Owner) -> Response:
    """Answer a conversation. Disconnecting stops the answer, unless X-Conversation-Id was sent."""
    asked = await read_body(request, parse_chat_request)
    return await respond(
        request,
        services,
        owner,
        asked,
        lambda info: ChatSerializer(asked, Completion(model_id(info), fingerprint(info))),
    )


@router.post("/v1/chat/completions/control", dependencies=[GUARDED])
async def control(request: Request, services: Services, owner: Owner) -> Response:
    """Control a running answer: `reasoning_end` ends its reasoning."""
    fields = await read_body(request, lambda body: read_fields(ControlFields, body, {}))
    running = services.shared.requests.find(fields.id, owner)
    if running is None:
        raise ApiError(404, "not_found", "no response with that id is being generated", param="id")
    running.answer_now()
    return JSONResponse({"id": fields.id, "action": fields.action, "success": True})


@router.get("/v1/stream", dependencies=[GUARDED])
async def resume(request: Request, services: Services, owner: Owner) -> Response:
    """Resume the stream of a conversation's latest answer from event number `from`."""
    stream = await _streams(request, services, owner)
    last = request.headers.get("last-event-id")
    named = request.query_params.get("from", "0")
    if not _NUMBER.fullmatch(named if last is None else last):
        raise invalid("from", "from must be an event number, 0 or more")
    start = int(named) if last is None else int(last) + 1
    services.reread_streams.opened(owner)
    if isinstance(stream, AnswerElsewhere):
        events = stream.events(start, PING)
    else:
        events = numbered(sse_events(stream.running, stream.serializer.again()), start, stream.serializer.ping)
    return EventStream(events, lambda: services.reread_streams.closed(owner))


@router.delete("/v1/stream", dependencies=[GUARDED])
async def stop(request: Request, services: Services, owner: Owner) -> Response:
    """Stop a conversation's answer, keeping its text. No effect after its end."""
    stream = await _streams(request, services, owner)
    stopped = not stream.finished
    if isinstance(stream, AnswerElsewhere):
        stream.stop()
    else:
        stream.running.stop(by_asker=True)
    name = stream.log.id if isinstance(stream, AnswerElsewhere) else stream.running.name
    return JSONResponse({"conv_id": request.query_params["conv_id"], "id": name, "stopped": stopped})


async def _streams(request: Request, services: ApiServices, owner: str) -> ResumableStream | AnswerElsewhere:
    for name in request.query_params:
        if name not in ("conv_id", "from"):
            raise unsupported(printable(name), "only conv_id and from are supported")
    conversation = request.query_params.get("conv_id", "")
    if not conversation:
        raise invalid("conv_id", "conv_id is required: the value of X-Conversation-Id")
    here = services.resumable_streams.find(owner, conversation)
    stream = here or await services.resumable_streams.elsewhere.find(owner, conversation)
    if stream is None:
        raise ApiError(404, "not_found", "no response is kept for that conversation", param="conv_id")
    return stream
