"""A short text from the engine for the page's own use: waited for, never urgent, and dropped on failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from notso.web.engine.host import EngineHost, Job
from notso.web.engine.port import Event, Request


async def whole_text(engine: EngineHost, request: Request, seconds: float, begun: Callable[[Job], None]) -> str | None:
    """All that is answered, or None where it was stopped, failed or took longer than `seconds`.

    `begun` is given the job, to stop it by.
    """
    events: list[Event] = []
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def end(failure: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(failure)

    job = Job(request, events=events.extend, ended=end)
    begun(job)
    engine.submit(job)
    try:
        failure = await asyncio.wait_for(ended, seconds)
    except TimeoutError:
        return None
    finally:
        job.stop()
    finished = any(event.finish_reason in ("stop", "length") for event in events if event.kind == "end")
    return "".join(event.text for event in events if event.kind == "text") if finished and not failure else None
