"""Answers that another replica writes, read and stopped here: copies of what its stream says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from notso.web.api.shared.serializer import data_event
from notso.web.edge.api_error import ApiError
from notso.web.replicas.exchange import Body, Exchange

FIRST_SECONDS = 0.5
"""An answer of which nothing has come by then is not there."""
SILENT_SECONDS = 2.0
"""When nothing has come for so long, it is asked whether the writer is still there."""
UNREAD_SECONDS = 5.0
PING_SECONDS = 15.0


class AnswerLog:
    """One answer: the events of its stream in order, and what the whole is called until it is there.

    `id` names the answer; `body` is JSON.
    """

    def __init__(self, id: str = "", body: Any = None) -> None:
        self.id = id
        self.body = body
        self.sse_events: list[bytes] = []
        self.finished = False
        self.at_change: Callable[[], None] | None = None
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        """Events, and one more for the end."""
        return len(self.sse_events) + self.finished

    def add(self, sse_events: Iterable[bytes]) -> None:
        """Events that follow."""
        self.sse_events += sse_events
        self._wake()

    def finish(self, body: Any) -> None:
        """The whole is there."""
        self.body, self.finished = body, True
        self._wake()

    def changes(self, after: int) -> Body:
        """What came after that number; -1 for everything."""
        sse_events = [event.decode() for event in self.sse_events[max(0, after) :]]
        return {"id": self.id, "sse_events": sse_events, "body": self.body if after < 0 or self.finished else None}

    def take(self, changes: Body) -> bool:
        """Make this a copy. The first changes of another answer of the same name begin it anew."""
        after = max(0, changes["after"])
        if changes["after"] < 0 and changes["id"] != self.id:
            self.id, self.sse_events, self.finished, self.body = changes["id"], [], False, changes["body"]
        if changes["id"] != self.id or after > len(self.sse_events):
            return False
        self.sse_events += [event.encode() for event in changes["sse_events"][len(self.sse_events) - after :]]
        if changes["finished"]:
            self.body, self.finished = changes["body"], True
        self._wake()
        return True

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait for something after `number`. False when `seconds` passed without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.number <= number:
                    await self._changed.wait()
        return self.number > number

    def _wake(self) -> None:
        if self.at_change is not None:
            self.at_change()
        self._changed.set()
        self._changed = asyncio.Event()


class AnswerElsewhere:
    """One of them. `log` is a copy that grows."""

    def __init__(self, exchange: Exchange, owner: str, conversation: str) -> None:
        self.log = AnswerLog()
        self._exchange = exchange
        self._name = claim_name(owner, conversation)

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return self.log.finished

    def stop(self) -> None:
        """Ask its replica to end it; what there is of it, stays."""
        self._exchange.tell("stop answer", name=self._name)

    async def events(self, start: int, ping: bytes) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come, each with its number as the event's id; a ping now and
        then, where nothing comes."""
        number, silent_s = start, 0.0
        while True:
            for event in self.log.sse_events[number:]:
                yield b"id: " + str(number).encode() + b"\n" + event
                number += 1
                silent_s = 0.0
            if self.log.finished and number >= len(self.log.sse_events):
                return
            if not await self.log.wait(len(self.log.sse_events), SILENT_SECONDS):
                if await self._is_abandoned():
                    yield data_event(_gone().body_for("/v1/"))
                    return
                silent_s += SILENT_SECONDS
                if silent_s >= PING_SECONDS:
                    silent_s = 0.0
                    yield ping

    async def whole(self) -> Any:
        """The whole, when it is there. Raises ApiError (503) if its replica is gone."""
        while not self.log.finished:
            if not await self.log.wait(len(self.log.sse_events), SILENT_SECONDS) and await self._is_abandoned():
                raise _gone()
        return self.log.body

    async def _is_abandoned(self) -> bool:
        return not self.log.finished and not await self._exchange.is_held(self._name)


class AnswersElsewhere:
    """Finds them. On the event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, owner: str, conversation: str) -> AnswerElsewhere | None:
        """The newest answer of that conversation, if another replica writes it or has written it not long ago."""
        if not self._exchange.is_shared:
            return None
        found = AnswerElsewhere(self._exchange, owner, conversation)
        begun = asyncio.Event()

        def take(changes: Body) -> bool:
            taken = found.log.take(changes)
            begun.set()
            return taken

        task = asyncio.create_task(self._keep(claim_name(owner, conversation), take, found.log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(begun.wait(), FIRST_SECONDS)
            return found
        task.cancel()
        return None

    async def _keep(self, name: str, take: Callable[[Body], bool], log: AnswerLog) -> None:
        with self._exchange.following(name, take):
            while not log.finished:
                if not await log.wait(log.number, PING_SECONDS) and not await self._exchange.is_held(name):
                    return


def claim_name(owner: str, conversation: str) -> str:
    """What an answer is called among replicas: owners and conversations are not told the server that keeps it."""
    return "answer:" + hashlib.sha256(f"{owner}\0{conversation}".encode()).hexdigest()[:32]


def _gone() -> ApiError:
    return ApiError(503, "shutting_down", "the server that wrote this answer is gone", retry_after_seconds=5)
