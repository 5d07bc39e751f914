"""Routes of Anthropic's API: messages, with their events, and token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.documents.citations import MarkedQuoteParser, QuotedSpan
from notso.smollm3 import Event, FinishReason, ToolCall, Usage
from notso.web.api.messages.request import (
    MessageRequest,
    find_files,
    parse_count_request,
    parse_message_request,
    to_citation,
)
from notso.web.api.shared.completion import new_id, parse_arguments
from notso.web.api.shared.given_documents import read_body_with_files
from notso.web.api.shared.serializer import PRELIMINARY_KINDS, Serializer, named_event
from notso.web.api.shared.services import api_services
from notso.web.api.shared.serving import count_prompt_tokens, respond, run_prompt_work, serving
from notso.web.edge.access import GUARDED
from notso.web.edge.errors import ApiError
from notso.web.engine.model_names import model_id

router = APIRouter()


@router.post("/v1/messages", dependencies=[GUARDED])
async def messages(request: Request) -> Response:
    """Create a message. Disconnecting stops it, unless X-Conversation-Id or Idempotency-Key was sent."""
    api_request = await _read(request, parse_message_request)
    return await respond(
        request, api_request, lambda info: MessageSerializer(api_request, model_id(info), new_id("msg_"))
    )


@router.post("/v1/messages/count_tokens", dependencies=[GUARDED])
async def count_tokens(request: Request) -> Response:
    """Count the prompt's tokens."""
    api_request = await _read(request, parse_count_request)
    count, headers = await count_prompt_tokens(request, api_request)
    body: dict[str, Any] = {"input_tokens": count}
    if api_request.management is not None:
        cleared = sum(each["cleared_input_tokens"] for each in api_request.applied)
        body["context_management"] = {"original_input_tokens": count + cleared}
    return JSONResponse(body, headers=headers)


async def _read(request: Request, parse: Callable[..., MessageRequest]) -> MessageRequest:
    services = api_services(request)
    keep_volatile = services.shared.settings.keep_volatile
    api_request = await read_body_with_files(request, find_files, partial(parse, keep_volatile=keep_volatile))
    if api_request.management is None:
        return api_request
    async with serving(services, api_request.model) as model:
        return await run_prompt_work(request, lambda: api_request.apply_edits(model.engine))


STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "cancelled": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
CONTEXT_END = "model_context_window_exceeded"
"""Stop reason of an answer that fills the context before it reaches `max_tokens`."""


class MessageSerializer(Serializer):
    """Writes message_start, blocks, message_delta and message_stop."""

    ping = named_event("ping", {"type": "ping"})

    def __init__(self, api_request: MessageRequest, model: str, id: str) -> None:
        self.id = id
        self._request = api_request
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._is_started = self._is_open = False
        self._call_characters = 0  # number of argument characters written for the open call
        self._usage: Usage | None = None
        self._reason: str | None = None
        self._stop: str | None = None
        self._quote_parser = MarkedQuoteParser() if api_request.documents.has_quotable else None

    def fresh_copy(self) -> MessageSerializer:
        return MessageSerializer(self._request, self._model, self.id)

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        # message_start contains the number of cached tokens, so it is sent only when processing begins.
        if event.kind not in PRELIMINARY_KINDS and not self._is_started:
            self._is_started = True
            if event.progress is not None:
                self._usage = Usage(event.progress.total_tokens, 0, cached_tokens=event.progress.cached_tokens)
            yield self._sse_event("message_start", message=self.body())
        match event.kind:
            case "reasoning":
                yield from self._open_block("thinking", {"thinking": "", "signature": ""})
                if not self._request.hides_reasoning:
                    self._blocks[-1]["thinking"] += event.text
                    yield self._delta(type="thinking_delta", thinking=event.text)
            case "text" if self._quote_parser is not None:
                yield from self._write_cited(self._quote_parser.feed(event.text))
            case "text":
                yield from self._write_text(event.text)
            case "tool_call_part" if event.begun_call is not None:
                yield from self._write_call(event.begun_call, event.text)
            case "tool_call" if event.tool_call is not None:
                yield from self._write_call(event.tool_call, event.tool_call.arguments[self._call_characters :])
                self._blocks[-1]["input"] = parse_arguments(event.tool_call)
                yield from self._close_block()
            case "usage":
                self._usage = event.usage
            case "end":
                if self._quote_parser is not None:
                    yield from self._write_cited([self._quote_parser.end()])
                yield from self._close_block()
                reason: FinishReason = event.finish_reason or "stop"
                self._stop = event.stop if reason == "stop" else None
                self._reason = "stop_sequence" if self._stop is not None else STOP_REASONS[reason]
                written, limit = self._usage_body()["output_tokens"], self._request.params[0].max_tokens
                if reason == "length" and written < (limit or 0):
                    self._reason = CONTEXT_END

    def _write_text(self, text: str) -> Iterator[bytes]:
        yield from self._open_block("text", {"text": ""})
        self._blocks[-1]["text"] += text
        yield self._delta(type="text_delta", text=text)

    def _write_cited(self, pieces: Iterable[str | QuotedSpan]) -> Iterator[bytes]:
        for piece in pieces:
            citation = to_citation(self._request.documents, piece) if isinstance(piece, QuotedSpan) else None
            if citation is not None:
                if self._is_open and self._blocks[-1].get("text"):
                    yield from self._close_block()
                yield from self._open_block("text", {"text": "", "citations": []})
                self._blocks[-1]["citations"].append(citation)
                yield self._delta(type="citations_delta", citation=citation)
                continue
            text = piece.words if isinstance(piece, QuotedSpan) else piece
            if not (self._is_open and self._blocks[-1].get("text")):
                text = text.lstrip()
            if text:
                yield from self._write_text(text)

    def closing_events(self) -> Iterator[bytes]:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield self._sse_event("message_delta", delta=delta, usage=self._usage_body(), **self._edits_body())
        yield self._sse_event("message_stop")

    def error_frame(self, error: ApiError) -> bytes:
        return named_event("error", error.anthropic_body)

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage_body(),
            **self._edits_body(),
        }

    def _edits_body(self) -> dict[str, Any]:
        applied = self._request.applied
        return {} if self._request.management is None else {"context_management": {"applied_edits": list(applied)}}

    def _write_call(self, call: ToolCall, text: str) -> Iterator[bytes]:
        # `feed` sets the input of a complete call. The input of a call that is cut off stays empty, because its
        # arguments are not valid JSON.
        if not self._call_characters:
            yield from self._close_block()
            yield from self._open_block("tool_use", {"id": call.id, "name": call.name, "input": {}})
        self._call_characters += len(text)
        if text:
            yield self._delta(type="input_json_delta", partial_json=text)

    def _open_block(self, kind: str, empty: dict[str, Any]) -> Iterator[bytes]:
        if self._is_open and self._blocks[-1]["type"] == kind:
            return
        yield from self._close_block()
        block = {"type": kind, **empty}
        yield self._sse_event("content_block_start", index=len(self._blocks), content_block=block)
        self._blocks.append(block)
        self._is_open = True

    def _close_block(self) -> Iterator[bytes]:
        self._call_characters = 0
        if self._is_open:
            self._is_open = False
            yield self._sse_event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, **delta: Any) -> bytes:
        return self._sse_event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _sse_event(self, name: str, **fields: Any) -> bytes:
        return named_event(name, {"type": name, **fields})

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage or Usage(0, 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }
