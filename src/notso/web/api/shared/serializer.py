"""How each API serializes an answer (stream frames or one body), and the request's events as their input."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from starlette.responses import JSONResponse

from notso.smollm3 import Event, Progress
from notso.web.edge.api_error import ApiError
from notso.web.engine.running import RunningRequest
from notso.web.values.json_steps import json_bytes, json_steps

_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # no line ends of an event stream, but of some clients that read one


class Serializer(Protocol):
    """Fed with the events of a request's answers in order; the same events always make the same frames.

    `id` names the answer. `ping` is said where nothing else is for a while.
    """

    id: str
    ping: bytes

    def again(self) -> Serializer:
        """The same answer, for somebody who reads it from the beginning."""

    def initial_events(self) -> Iterable[bytes]:
        """Frames before the first event."""

    def take(self, number: int, event: Event) -> Iterable[bytes]:
        """Frames for an event of choice `number`. Raises the error of an `error` event."""

    async def finalise(self) -> None:
        """What must be done before the end is told."""

    def closing(self) -> Iterable[bytes]:
        """Frames after the last event."""

    def failure(self, error: ApiError) -> bytes:
        """The frame that ends a stream in place of the others."""

    def body(self) -> Any:
        """The whole response, after the last event: what is JSON. Takes time where it has log probabilities."""


class LargeJSONResponse(JSONResponse):
    """JSON of any size, encoded in small steps. Make it off the event loop."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


WHOLE_KINDS = ("prompt", "tool_call", "end")
"""Events of which a frame may hold as much as a whole answer or prompt."""


async def sse_events_of(serializer: Serializer, number: int, event: Event) -> Iterable[bytes]:
    """`take`, off the event loop where it may take long. Raises the error of an `error` event."""
    if event.kind in WHOLE_KINDS:
        return await asyncio.to_thread(lambda: list(serializer.take(number, event)))
    return serializer.take(number, event)


async def closing_events_of(serializer: Serializer) -> Iterable[bytes]:
    """`closing`, off the event loop."""
    return await asyncio.to_thread(lambda: list(serializer.closing()))


async def whole_response(serializer: Serializer) -> JSONResponse:
    """Return the response of a serializer that has taken its last event."""
    return await asyncio.to_thread(lambda: LargeJSONResponse(serializer.body()))


def as_json(value: Any, *, is_whole: bool = False) -> str:
    """On one line, also for clients that take more characters for line ends than they should. is_whole: it may be of a
    whole answer, and so large."""
    text = "".join(json_steps(value)) if is_whole else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def data_event(value: Any, *, is_whole: bool = False) -> bytes:
    """An event without a name. JSON has no bare line ends, so it is one line whatever the model wrote."""
    return b"data: " + as_json(value, is_whole=is_whole).encode() + b"\n\n"


def named_event(name: str, value: Any, *, is_whole: bool = False) -> bytes:
    """An event with a name, of a fixed set."""
    return b"event: " + name.encode() + b"\n" + data_event(value, is_whole=is_whole)


PING = b": ping\n\n"


DONE = b"data: [DONE]\n\n"


def progress_body(progress: Progress) -> dict[str, Any]:
    """How far the prompt is read, under llama-server's names."""
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
    """(number of the choice, event) from the first to the last; None where nothing came for a while.

    Raises ApiError (503) if the engine goes away.
    """
    async for number, events in running.events(silence_s=PING_SECONDS):
        if not events:
            yield None
        for event in events:
            if event.finish_reason == "cancelled" and not running.stopped_by_asker:
                raise ApiError(503, "shutting_down", "the engine stopped on the way", retry_after_seconds=5)
            yield number, event
