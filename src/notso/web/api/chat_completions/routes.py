"""Routes that create, resume and stop chat completions, and their serializer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import Event
from notso.web.api.chat_completions.fields import ChatRequest, parse_chat_request
from notso.web.api.request_fields.fields import Fields, Name, invalid_field, to_printable, unsupported_field
from notso.web.api.shared.background import response_identity
from notso.web.api.shared.completion import Completion, fingerprint, logprobs_body, timings
from notso.web.api.shared.given_documents import read_openai_request
from notso.web.api.shared.resumable import RemoteAnswer, ResumableStream
from notso.web.api.shared.serializer import ChunkSerializer, progress_body
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import Owner, read_fields_and_headers, reread_stream, respond
from notso.web.edge.access import GUARDED
from notso.web.edge.errors import ApiError
from notso.web.engine.model_names import model_id

router = APIRouter()

_NUMBER = re.compile(r"[0-9]{1,9}")


class ControlFields(Fields):
    id: Name
    action: Literal["reasoning_end"]


@router.post("/chat/completions", dependencies=[GUARDED])
@router.post("/v1/chat/completions", dependencies=[GUARDED])
async def chat_completions(request: Request) -> Response:
    """Create a chat completion. Disconnecting stops it, unless X-Conversation-Id or Idempotency-Key was sent."""
    api_request = await read_openai_request(request, parse_chat_request)
    name, created = response_identity(request, "chatcmpl-")
    return await respond(
        request,
        api_request,
        lambda info: ChatSerializer(api_request, Completion(model_id(info), fingerprint(info), name, created)),
    )


@router.post("/v1/chat/completions/control", dependencies=[GUARDED])
async def control(request: Request, services: Services, owner: Owner) -> Response:
    """Control a running answer. The action `reasoning_end` ends its reasoning."""
    fields, headers = await read_fields_and_headers(request, ControlFields, {})
    running = services.shared.requests.find(fields.id, owner)
    if running is None:
        raise ApiError(404, "not_found", "no response with that id is being generated", param="id")
    running.answer_now()
    return JSONResponse({"id": fields.id, "action": fields.action, "success": True}, headers=headers)


@router.get("/v1/stream", dependencies=[GUARDED])
async def resume(request: Request, services: Services, owner: Owner) -> Response:
    """Resume the stream of a conversation's latest answer, beginning with event number `from`."""
    stream = await _find_stream(request, services, owner)
    last = request.headers.get("last-event-id")
    requested = request.query_params.get("from", "0")
    if not _NUMBER.fullmatch(requested if last is None else last):
        raise invalid_field("from", "from must be an event number, 0 or more")
    start = int(requested) if last is None else int(last) + 1
    return reread_stream(request, stream, start)


@router.delete("/v1/stream", dependencies=[GUARDED])
async def stop(request: Request, services: Services, owner: Owner) -> Response:
    """Stop a conversation's answer, keeping its text. No effect if the answer has ended."""
    stream = await _find_stream(request, services, owner)
    stopped = not stream.finished
    stream.stop()
    return JSONResponse({"conv_id": request.query_params["conv_id"], "id": stream.id, "stopped": stopped})


async def _find_stream(request: Request, services: ApiServices, owner: str) -> ResumableStream | RemoteAnswer:
    for name in request.query_params:
        if name not in ("conv_id", "from"):
            raise unsupported_field(to_printable(name), "only conv_id and from are supported")
    conversation = request.query_params.get("conv_id", "")
    if not conversation:
        raise invalid_field("conv_id", "conv_id is required: the value of X-Conversation-Id")
    local = services.resumable_streams.find(owner, conversation)
    stream = local or await services.resumable_streams.remote_answers.find(owner, conversation)
    if stream is None and await services.shared.store.records.unfinished_stream(owner, conversation) is not None:
        message = "the server that was generating this response has stopped; another one will continue it"
        raise ApiError(503, "model_loading", message, retry_after_seconds=2)
    if stream is None:
        raise ApiError(404, "not_found", "no response of that conversation is available", param="conv_id")
    return stream


class ChatSerializer(ChunkSerializer):
    def __init__(self, api_request: ChatRequest, completion: Completion) -> None:
        super().__init__(
            api_request,
            completion,
            "chat.completion.chunk",
            raw_thinking=api_request.raw_thinking,
            hides_reasoning=api_request.hides_reasoning,
        )
        self._request = api_request

    def fresh_copy(self) -> ChatSerializer:
        return ChatSerializer(self._request, self._completion)

    def initial_events(self) -> Iterator[bytes]:
        for number in range(len(self._choices)):
            yield self._chunk(number, {"delta": {"role": "assistant", "content": "", "refusal": None}})

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        choice = self._choices[number]
        more = choice.timings_so_far(event)
        delta = choice.add(event)
        if delta is not None:
            yield self._chunk(number, {"delta": delta}, None, self._logprobs(event), **more)
        elif event.progress is not None and self._request.return_progress:
            yield self._chunk(number, {"delta": {}}, prompt_progress=progress_body(event.progress))
        if event.kind == "end":
            report = timings([choice]) | {"reasoning_mode": self._request.reasoning_mode}
            remaining_logprobs = logprobs_body(event.logprobs, ()) if event.logprobs else None
            yield self._chunk(number, {"delta": {}}, choice.reason, remaining_logprobs, timings=report)

    def body(self) -> dict[str, Any]:
        return self._completion.body(self._choices, self._request.reasoning_mode)

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if not self._has_logprobs or event.kind not in ("reasoning", "text"):
            return None
        is_reasoning = event.kind == "reasoning" and not self._request.raw_thinking
        return logprobs_body(() if is_reasoning else event.logprobs, event.logprobs if is_reasoning else ())
