"""How an API writes an answer down: the frames of a stream, and the whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

from notso.smollm3 import Event, Progress
from notso.web.edge.api_error import ApiError

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
        """The whole response, after the last event: what is JSON."""


def as_json(value: Any) -> str:
    """On one line, also for clients that take more characters for line ends than they should."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def data_event(value: Any) -> bytes:
    """An event without a name. JSON has no bare line ends, so it is one line whatever the model wrote."""
    return b"data: " + as_json(value).encode() + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """An event with a name, of a fixed set."""
    return b"event: " + name.encode() + b"\n" + data_event(value)


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
