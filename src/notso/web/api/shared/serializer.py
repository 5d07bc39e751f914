"""Serialize events to streamed or whole responses, and iterate over a request's events."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse

from notso.smollm3 import Event, Progress
from notso.web.api.shared.api_request import ApiRequest
from notso.web.api.shared.completion import Completion, new_choice, usage_body
from notso.web.edge.errors import ApiError, api_error_of
from notso.web.engine.running import RunningRequest
from notso.web.values.json_steps import json_bytes, json_steps

_log = logging.getLogger("notso.web.api")
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # some SSE clients split lines at these, contrary to the standard


PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
PRELIMINARY_KINDS = ("queued", "trimmed")
"""Kinds of events that may occur before the prompt is processed."""


class Serializer(Protocol):
    """Converts events to one API's format: the frames of a stream or a whole body. Deterministic."""

    # A frame is an SSE event or a line of JSON. Clients resume a stream by frame number, so every copy must produce the
    # same frames from the same events.

    id: str  # of the response
    ping: bytes = PING  # frame sent after PING_SECONDS without another frame

    def fresh_copy(self) -> Serializer: ...  # returns a copy in its initial state, without events

    def initial_events(self) -> Iterable[bytes]:
        return ()

    def feed(self, number: int, event: Event) -> Iterable[bytes]:
        """Return the frames of an event whose `error` is not set."""

    async def finalize(self, added: Mapping[str, Any] | None = None) -> None:
        """Do what must precede the closing frames. May store the response, with the fields `added`."""
        return  # type checkers treat an empty method of a protocol as abstract

    def closing_events(self) -> Iterable[bytes]:
        return ()

    def failure(self, error: ApiError) -> bytes:
        """Return the last frame of a stream that failed."""
        return self.error_frame(error)

    def error_frame(self, error: ApiError) -> bytes:
        """Return an error in this API's format, regardless of earlier events."""
        return data_event(error.body)

    def body(self) -> Any:
        """Return the JSON body. Slow with log probabilities."""


class ChunkSerializer(Serializer):
    """Writes chunks, then [DONE]. Each choice's last chunk contains the finish reason."""

    def __init__(self, api_request: ApiRequest, completion: Completion, kind: str, **choice_options: bool) -> None:
        self.id = completion.id
        self._completion = completion
        self._head = completion.head(kind)
        self._include_usage = api_request.include_usage
        self._has_logprobs = api_request.options.top_logprobs is not None
        choice_options |= {"logprobs": self._has_logprobs, "live_timings": api_request.timings_per_token}
        self._choices = [new_choice(**choice_options) for _ in api_request.choices]
        self._prompt_count = len(api_request.prompts)

    def closing_events(self) -> Iterator[bytes]:
        if self._include_usage:
            yield data_event(self._head | {"choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> dict[str, Any]:
        return usage_body(self._choices, self._prompt_count)

    def _chunk(
        self, number: int, content: dict[str, Any], reason: str | None = None, logprobs: Any = None, **more: Any
    ) -> bytes:
        entry = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
        # As in OpenAI's streams, `usage` (if requested) is null until the last chunk.
        unknown = {"usage": None} if self._include_usage else {}
        return data_event(self._head | {"choices": [entry]} | unknown | more)


class LargeJSONResponse(JSONResponse):
    """JSON response of any size. Construct it in a thread, because encoding is slow."""

    render = staticmethod(json_bytes)


WHOLE_KINDS = ("prompt", "tool_call", "end")
"""Kinds of events whose frames may contain a whole answer or prompt."""


async def serialize_event(serializer: Serializer, number: int, event: Event) -> Iterable[bytes]:
    """Return an event's frames, converting large ones in a thread."""
    if event.kind in WHOLE_KINDS:
        return await asyncio.to_thread(lambda: list(serializer.feed(number, event)))
    return serializer.feed(number, event)


def as_api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Convert an error to an ApiError with the API's field names; log unexpected errors."""
    mapped = api_error_of(error).called(names or {})
    if mapped.code == "internal_error":
        _log.error("unexpected %s on an API request", type(error).__name__, exc_info=error)
    return mapped


async def serialize_closing(serializer: Serializer) -> Iterable[bytes]:
    return await asyncio.to_thread(lambda: list(serializer.closing_events()))


async def serialize_failure(serializer: Serializer, error: ApiError) -> bytes:
    return await asyncio.to_thread(serializer.failure, error)


async def large_response(body: Callable[[], Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return await asyncio.to_thread(lambda: LargeJSONResponse(body(), headers=headers))


def as_json(value: Any, *, is_whole: bool = False) -> str:
    """Encode a value as one line of JSON, in small steps if `is_whole` (for large values)."""
    text = "".join(json_steps(value)) if is_whole else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def data_event(value: Any, *, is_whole: bool = False) -> bytes:
    # `as_json` escapes line ends, so one `data:` line is enough.
    return b"data: " + as_json(value, is_whole=is_whole).encode() + b"\n\n"


def named_event(name: str, value: Any, *, is_whole: bool = False) -> bytes:
    return b"event: " + name.encode() + b"\n" + data_event(value, is_whole=is_whole)


def progress_body(progress: Progress) -> dict[str, Any]:
    computed = progress.done_tokens - progress.cached_tokens
    spent_ms = 1000 * computed / progress.tokens_per_s if progress.tokens_per_s else 0
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.done_tokens,
        "time_ms": round(spent_ms),
    }


PING_SECONDS = 15.0


async def generation_events(running: RunningRequest) -> AsyncIterator[tuple[int, Event] | None]:
    """Yield (choice number, event), or None when a ping is due.

    Raises an event's error, or ApiError (503) if the engine stops.
    """
    async for number, events in running.events(silence_s=PING_SECONDS):
        if not events:
            yield None
        for event in events:
            if event.finish_reason == "cancelled" and not running.stopped_by:
                raise _engine_stopped_error()
            if event.error is not None:
                raise event.error
            yield number, event
    if running.is_incomplete and not running.stopped_by:
        raise _engine_stopped_error()


def _engine_stopped_error() -> ApiError:
    return ApiError(503, "shutting_down", "the engine stopped during the response", retry_after_seconds=5)
