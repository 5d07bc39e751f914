"""Run requests while the engine is idle, and suggest follow-up questions."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from notso.web.engine.port import Request
from notso.web.engine.running import RunningRequest, RunningRequests, submissions_for
from notso.web.store.protocol import StoredMessage
from notso.web.turns.turns import Turns
from notso.web.values.errors import NotsoError

REQUEST = "Suggest three short questions I could ask next. Write one question per line and nothing else."
MAX_SUGGESTIONS = 3
MIN_SUGGESTIONS = 2
MAX_TOKENS = 60
MAX_CHARACTERS = 100
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.25
MAX_REMEMBERED = 64

_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s*")


class IdleRequests:
    """Requests that run while the engine is idle. A new chat turn stops them. Use on the event loop."""

    def __init__(self, requests: RunningRequests, turns: Turns) -> None:
        self._requests = requests
        self._turns = turns
        self._running: set[RunningRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        turns.at_start.append(lambda turn: self.stop())

    @property
    def is_idle(self) -> bool:
        loaded = [served.engine.stats() for served in self._requests.host.loaded() if served.engine is not None]
        return bool(loaded) and sum(stats.running + stats.waiting for stats in loaded) + self._turns.unfinished == 0

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_until_idle(self, after_seconds: float, patience_seconds: float) -> bool:
        """Wait `after_seconds`, and then until the engine is idle; return False after `patience_seconds`."""
        await asyncio.sleep(after_seconds)
        for _ in range(int(patience_seconds / POLL_SECONDS)):
            if self.is_idle:
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    def stop(self) -> None:
        for running in list(self._running):
            running.stop()

    async def generate(self, request: Request, seconds: float) -> str | None:
        """Return the whole answer, or None if it is stopped, fails or takes longer than `seconds`."""
        running = self._requests.open(request.options.owner, counts=False)
        self._running.add(running)
        text, finished = "", False
        try:
            async with asyncio.timeout(seconds):
                await running.begin(submissions_for(request), model=request.model)
                async for _, events in running.events():
                    text += "".join(event.text for event in events if event.kind == "text")
                    finished = finished or any(event.finish_reason in ("stop", "length") for event in events)
        except (TimeoutError, NotsoError):
            return None
        finally:
            running.close()
            self._running.discard(running)
        return text if finished else None


class Suggestions:
    """Generates suggestions for one chat at a time. Runs on the event loop."""

    def __init__(self, requests: RunningRequests, turns: Turns) -> None:
        self._requests = IdleRequests(requests, turns)
        self._cached: OrderedDict[tuple[str, int], list[str]] = OrderedDict()

    async def suggest(self, answer: StoredMessage, build_request: Callable[[], Awaitable[Request]]) -> list[str]:
        """Return questions that could follow an answer, or an empty list, for example if the engine is busy."""
        # The key includes the text, because an edited or continued answer keeps its id.
        key = answer.id, hash(answer.content)
        if key in self._cached:
            return self._cached[key]
        if not self._requests.is_idle:
            return []
        request = await build_request()
        if not self._requests.is_idle:  # a turn has started in the meantime
            return []
        self._requests.stop()
        text = await self._requests.generate(request, WAIT_SECONDS)
        if text is None:
            return []
        self._cached[key] = parse_questions(text)
        if len(self._cached) > MAX_REMEMBERED:
            self._cached.popitem(last=False)
        return self._cached[key]


def parse_questions(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        question = _BULLET.sub("", line).strip().strip("\"'*_“”")
        if question.endswith("?") and 4 <= len(question) <= MAX_CHARACTERS and question not in found:
            found.append(question)
    return found[:MAX_SUGGESTIONS] if len(found) >= MIN_SUGGESTIONS else []
