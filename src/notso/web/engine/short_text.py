"""Short texts generated for the page's own use, at low priority; dropped on failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from notso.web.engine.port import Request
from notso.web.engine.running import RunningRequest, RunningRequests, asks
from notso.web.values.errors import NotsoError


async def whole_text(
    requests: RunningRequests, request: Request, seconds: float, started: Callable[[RunningRequest], None]
) -> str | None:
    """Return the answer, or None if stopped, failed or slower than `seconds`.

    `started` receives the request, for stopping it.
    """
    running = requests.open(request.options.owner, counts=False)
    started(running)
    text, finished = "", False
    try:
        async with asyncio.timeout(seconds):
            await running.begin(asks(request), model=request.model)
            async for _, events in running.events():
                text += "".join(event.text for event in events if event.kind == "text")
                finished = finished or any(event.finish_reason in ("stop", "length") for event in events)
    except (TimeoutError, NotsoError):
        return None
    finally:
        running.close()
    return text if finished else None
