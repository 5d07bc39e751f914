"""The events of a program's request, one by one, as every form of API takes them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from notso.smollm3 import Event
from notso.web.edge.api_error import ApiError
from notso.web.engine.running import RunningRequest

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
