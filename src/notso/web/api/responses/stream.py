"""OpenAI's Responses format: items with parts, and numbered events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from notso.documents.citations import MarkedQuoteParser, QuotedSpan
from notso.smollm3 import Event, Message, ModelInfo, TokenLogprob, ToolCall, Usage
from notso.web.api.responses.request import ResponseRequest, item_id, to_annotation
from notso.web.api.shared.completion import logprob_entries
from notso.web.api.shared.serializer import PRELIMINARY_KINDS, Serializer, named_event
from notso.web.edge.errors import ApiError
from notso.web.engine.model_names import model_id
from notso.web.values.durations import current_ms

SaveResponse = Callable[[dict[str, Any], tuple[Message, ...]], Awaitable[None]]
"""Function that stores a finished response and the conversation that a later response may continue."""


class ResponseSerializer(Serializer):
    """Writes the events from response.created to response.completed, .incomplete or .failed."""

    def __init__(
        self,
        api_request: ResponseRequest,
        info: ModelInfo,
        id: str,
        save: SaveResponse,
        created: int,
        times: dict[str, int] | None = None,
    ) -> None:
        self.id = id
        self.request = api_request
        self._info = info
        self._save = save
        self._created = created
        # Shared by all copies, so that a client that resumes a stream gets the same `completed_at` again.
        self._times = {} if times is None else times
        self._output: list[dict[str, Any]] = []
        self._is_open = self._is_cancelled = False
        self._status = "queued" if api_request.background else "in_progress"
        self._usage: Usage | None = None
        self._error: dict[str, Any] | None = None
        self._logprobs: list[TokenLogprob] = []
        self._calls: list[ToolCall] = []
        self._dropped = 0
        self._sequence = -1
        search = api_request.search
        self._searches = search is not None
        self._quote_parser = MarkedQuoteParser() if search is not None and search.documents.has_quotable else None

    def fresh_copy(self) -> ResponseSerializer:
        return ResponseSerializer(self.request, self._info, self.id, self._save, self._created, self._times)

    def initial_events(self) -> Iterator[bytes]:
        yield self._sse_event("response.created", response=self.body())
        yield self._sse_event(f"response.{self._status}", response=self.body())

    def feed(self, number: int, event: Event) -> Iterator[bytes]:
        if self._status == "queued" and event.kind not in PRELIMINARY_KINDS:
            self._status = "in_progress"
            yield self._sse_event("response.in_progress", response=self.body())
        if self._searches and event.kind not in PRELIMINARY_KINDS:
            yield from self._search()
        match event.kind:
            case "reasoning":
                yield from self._open_item("reasoning")
                self._part["text"] += event.text
                yield self._item_event("response.reasoning_text.delta", content_index=0, delta=event.text)
            case "text":
                self._logprobs += event.logprobs
                logprobs = logprob_entries(event.logprobs)
                if self._quote_parser is None:
                    yield from self._write_text(event.text, logprobs)
                else:
                    yield from self._write_cited(self._quote_parser.feed(event.text), logprobs)
            case "tool_call_part" if event.begun_call is not None:
                yield from self._write_call(event.begun_call, event.text)
            case "tool_call" if event.tool_call is not None:
                written = len(self._item["arguments"]) if self._is_call else 0
                yield from self._write_call(event.tool_call, event.tool_call.arguments[written:])
                self._calls.append(event.tool_call)
                yield from self._close_item()
            case "trimmed":
                self._dropped = event.dropped_messages
            case "usage":
                self._usage = event.usage
            case "end":
                self._logprobs += event.logprobs
                if self._quote_parser is not None and (rest := self._quote_parser.end()):
                    yield from self._write_cited([rest], [])
                whole = event.finish_reason not in ("length", "cancelled")
                self._status = "completed" if whole else "incomplete"
                self._times.setdefault("completed_at", current_ms() // 1000)
                self._is_cancelled = self.request.background and event.finish_reason == "cancelled"
                yield from self._close_item()

    def _write_text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        yield from self._open_item("message")
        self._part["text"] += text
        yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _write_cited(self, pieces: Iterable[str | QuotedSpan], logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        for piece in pieces:
            yield from self._open_item("message")
            text = self._part["text"]
            annotation = None
            if isinstance(piece, QuotedSpan) and self.request.search is not None:
                annotation = to_annotation(self.request.search.documents, piece, len(text))
            if annotation is not None:
                number = len(self._part["annotations"])
                self._part["annotations"].append(annotation)
                fields = {"content_index": 0, "annotation_index": number, "annotation": annotation}
                yield self._item_event("response.output_text.annotation.added", **fields)
                continue
            piece_text = piece.words if isinstance(piece, QuotedSpan) else piece
            piece_text = piece_text if text else piece_text.lstrip()
            if piece_text:
                yield from self._write_text(piece_text, logprobs)
                logprobs = []

    def _search(self) -> Iterator[bytes]:
        self._searches, search = False, self.request.search
        if search is None:
            return
        self._begin({"type": "file_search_call", "queries": list(search.queries), "results": None})
        yield self._sse_event("response.output_item.added", output_index=self._index, item=dict(self._item))
        for step in ("in_progress", "searching", "completed"):
            yield self._item_event(f"response.file_search_call.{step}")
        self._item["results"] = [dict(each) for each in search.results] if search.shows_results else None
        yield from self._finish_item()

    async def finalize(self, added: Mapping[str, Any] | None = None) -> None:
        # Runs before the last event is sent, so that a client can retrieve the response when it receives that event.
        # Messages dropped from the prompt are not stored; otherwise, a chain of responses would outgrow the context.
        if self.request.store:
            conversation = self.request.conversation
            starts_with_system = bool(conversation) and conversation[0].role == "system"
            head = 1 if starts_with_system and not self.request.instructions else 0
            body = await asyncio.to_thread(self.body)
            stored = [*conversation[:head], *conversation[head + self._dropped :]]
            answer = self._assistant_message()
            if self.request.options.continue_last:
                begun = stored.pop()
                reasoning = f"{begun.reasoning_content or ''}{answer.reasoning_content or ''}" or None
                answer = replace(answer, content=begun.content + answer.content, reasoning_content=reasoning)
            await self._save(body | dict(added or {}), (*stored, answer))

    def closing_events(self) -> Iterator[bytes]:
        yield self._sse_event(f"response.{self._status}", response=self.body())

    def failure(self, error: ApiError) -> bytes:
        if self._is_open:
            self._item["status"] = "incomplete"
        self._status, self._error = "failed", {"code": error.code, "message": error.message}
        return self._sse_event("response.failed", response=self.body())

    def body(self) -> dict[str, Any]:
        cut = self._status == "incomplete" and not self._is_cancelled
        params, echoed = self.request.params[0].with_defaults(self._info.sampling), dict(self.request.echoed)
        for name in ("temperature", "top_p"):
            if echoed[name] is None:
                echoed[name] = getattr(params, name)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._times["completed_at"] if self._status == "completed" else None,
            "status": "cancelled" if self._is_cancelled else self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": model_id(self._info),
            "output": [dict(item) for item in self._output],
            "usage": self._usage_body(),
            "background": self.request.background,
            "service_tier": "default",
            **echoed,
        }

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _assistant_message(self) -> Message:
        texts = {
            kind: "".join(item["content"][0]["text"] for item in self._output if item["type"] == kind)
            for kind in ("message", "reasoning")
        }
        return Message("assistant", texts["message"], texts["reasoning"] or None, tuple(self._calls))

    def _open_item(self, kind: str) -> Iterator[bytes]:
        if self._is_open and self._item["type"] == kind:
            return
        yield from self._close_item()
        self._is_open = True
        if kind == "reasoning":
            self._begin({"type": kind, "summary": [], "content": []})
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            self._begin({"type": kind, "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._sse_event("response.output_item.added", output_index=self._index, item=self._item)
        self._item["content"] = [part]
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _close_item(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        if self._item["type"] == "function_call":
            fields = {"arguments": self._item["arguments"], "name": self._item["name"]}
            yield self._item_event("response.function_call_arguments.done", **fields)
            yield from self._finish_item()
            return
        part, text = self._part, self._part["text"]
        if self._item["type"] == "reasoning":
            yield self._item_event("response.reasoning_text.done", content_index=0, text=text)
        else:
            part["logprobs"], self._logprobs = logprob_entries(self._logprobs), []
            yield self._item_event("response.output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
        yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield from self._finish_item()

    @property
    def _is_call(self) -> bool:
        return self._is_open and self._item["type"] == "function_call"

    def _write_call(self, call: ToolCall, text: str) -> Iterator[bytes]:
        if not self._is_call:
            yield from self._close_item()
            self._is_open = True
            self._begin({"type": "function_call", "call_id": call.id, **self._split_name(call.name), "arguments": ""})
            yield self._sse_event("response.output_item.added", output_index=self._index, item=dict(self._item))
        if text:
            self._item["arguments"] += text
            yield self._item_event("response.function_call_arguments.delta", delta=text)

    def _split_name(self, qualified_name: str) -> dict[str, str]:
        namespace = self.request.namespaces.get(qualified_name)
        if namespace is None:
            return {"name": qualified_name}
        return {"name": qualified_name.removeprefix(f"{namespace}."), "namespace": namespace}

    def _begin(self, item: dict[str, Any]) -> None:
        id = item_id(self.id, item["type"], len(self._output))
        self._output.append({"id": id, "status": "in_progress", **item})

    def _finish_item(self) -> Iterator[bytes]:
        self._item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        yield self._sse_event("response.output_item.done", output_index=self._index, item=self._item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _item_event(self, event: str, **fields: Any) -> bytes:
        return self._sse_event(event, item_id=self._item["id"], output_index=self._index, **fields)

    def _sse_event(self, event: str, **fields: Any) -> bytes:
        self._sequence += 1
        is_whole = event.endswith((".done", ".completed", ".incomplete", ".failed"))
        return named_event(event, {"type": event, "sequence_number": self._sequence, **fields}, is_whole=is_whole)

    def _usage_body(self) -> dict[str, Any] | None:
        usage = self._usage
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
