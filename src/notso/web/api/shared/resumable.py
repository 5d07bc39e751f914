"""Answers that outlive their connection and can be resumed or stopped on any replica.

Each belongs to a conversation, identified by the request's X-Conversation-Id, or by the id of a `background` response.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from notso.smollm3 import Event, FinishReason, NotsoError, Replay
from notso.web.api.shared.serializer import (
    Serializer,
    closing_events_of,
    data_event,
    failure_event_of,
    generation_events,
    sse_events_of,
)
from notso.web.edge.errors import ApiError, api_error_of
from notso.web.engine.running import RunningRequest
from notso.web.replicas.exchange import Alone, Body, Exchange

FIRST_SECONDS = 0.5
"""An answer that no replica reports within this time is assumed not to exist."""
SILENT_SECONDS = 2.0
"""After this time without events, a reader checks that the generating replica is still running."""
UNREAD_SECONDS = 5.0
PING_SECONDS = 15.0


class AnswerLog:
    # The events and the body of an answer. Readers follow it; other replicas copy it by applying its `changes`.

    def __init__(self, id: str = "", body: Any = None) -> None:
        self.id = id  # names the answer
        self.body = body  # JSON, which is preliminary until the answer is finished
        self.sse_events: list[bytes] = []
        self.finished = False
        self.at_change: Callable[[], None] | None = None
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        """Number of changes: events plus one for the end."""
        return len(self.sse_events) + self.finished

    def add(self, sse_events: Iterable[bytes]) -> None:
        self.sse_events += sse_events
        self._wake()

    def finish(self, body: Any) -> None:
        self.body, self.finished = body, True
        self._wake()

    def changes(self, after: int) -> Body:
        """Return the changes after number `after`, or all if it is -1."""
        sse_events = [event.decode() for event in self.sse_events[max(0, after) :]]
        return {"id": self.id, "sse_events": sse_events, "body": self.body if after < 0 or self.finished else None}

    def take(self, changes: Body) -> bool:
        """Apply changes to this copy. Return False if earlier ones are missing."""
        after = max(0, changes["after"])
        # If the conversation has a newer answer, with another id, the copy starts again.
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
        """Wait for a change. Return False on timeout."""
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
    # An answer that another replica generates. `log` is a copy of that replica's log.

    def __init__(self, exchange: Exchange, owner: str, conversation: str) -> None:
        self.log = AnswerLog()
        self._exchange = exchange
        self._name = claim_name(owner, conversation)

    @property
    def finished(self) -> bool:
        return self.log.finished

    def stop(self) -> None:
        self._exchange.tell("stop answer", name=self._name)

    async def events(self, start: int, ping: bytes) -> AsyncIterator[bytes]:
        """Yield numbered events from `start`, and pings during silence."""
        number, silent_s = start, 0.0
        while True:
            for event in self.log.sse_events[number:]:
                yield b"id: " + str(number).encode() + b"\n" + event
                number += 1
                silent_s = 0.0
            if self.log.finished and number >= len(self.log.sse_events):
                return
            if not await self.log.wait(len(self.log.sse_events), SILENT_SECONDS):
                if await self.is_abandoned():
                    yield data_event(_gone().body_for("/v1/"))
                    return
                silent_s += SILENT_SECONDS
                if silent_s >= PING_SECONDS:
                    silent_s = 0.0
                    yield ping

    async def whole(self) -> Any:
        """Wait for the body. Raises ApiError (503) if the generating replica has stopped."""
        while not self.log.finished:
            if not await self.log.wait(len(self.log.sse_events), SILENT_SECONDS) and await self.is_abandoned():
                raise _gone()
        return self.log.body

    async def is_abandoned(self) -> bool:
        return not self.log.finished and not await self._exchange.is_held(self._name)


class AnswersElsewhere:
    """Finds answers of other replicas. Use on the event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, owner: str, conversation: str) -> AnswerElsewhere | None:
        if not self._exchange.is_shared:
            return None
        found = AnswerElsewhere(self._exchange, owner, conversation)
        begun, log = asyncio.Event(), found.log

        def take(changes: Body) -> bool:
            taken = log.take(changes)
            begun.set()
            return taken

        task = asyncio.create_task(self._keep(claim_name(owner, conversation), take, log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Stop copying once the copy is unused: its last reader may leave long before the answer ends.
        weakref.finalize(found, _cancel, asyncio.get_running_loop(), task).atexit = False
        try:
            await asyncio.wait_for(begun.wait(), FIRST_SECONDS)
        except BaseException as error:  # also if the caller is cancelled: nobody will read the copy
            task.cancel()
            if isinstance(error, TimeoutError):
                return None
            raise
        return found

    async def _keep(self, name: str, take: Callable[[Body], bool], log: AnswerLog) -> None:
        with self._exchange.following(name, take):
            while not log.finished:
                if not await log.wait(log.number, PING_SECONDS) and not await self._exchange.is_held(name):
                    return


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    # The last reference may be dropped in any thread.
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(task.cancel)


def claim_name(owner: str, conversation: str) -> str:
    # Hashed, so that the Valkey server learns neither owners nor conversations.
    return "answer:" + hashlib.sha256(f"{owner}\0{conversation}".encode()).hexdigest()[:32]


def _gone() -> ApiError:
    return ApiError(
        503, "shutting_down", "the server that was generating this response has stopped", retry_after_seconds=5
    )


RESUMABLE_SECONDS = 300.0
MAX_RESUMABLE = 256


class TokenRecord:
    """Collects one answer's token ids: first those of `replay`, then those of events."""

    def __init__(self, replay: Replay | None = None) -> None:
        self._ids = list(replay.ids) if replay is not None else []
        self._closed_at = list(replay.closed_at) if replay is not None else []
        self.begun = len(self._ids)
        self.origin = ""
        self.limit = 0
        self.finish: FinishReason | None = None

    def take(self, event: Event) -> None:
        if event.kind == "started":
            self.origin, self.limit = event.origin, event.limit
        if event.is_forced:
            self._closed_at.append(len(self._ids))
        self._ids += event.token_ids
        if event.kind == "end":
            self.finish = event.finish_reason

    def since(self, first: int) -> Replay:
        """Return the tokens from number `first`."""
        closed_at = tuple(each for each in self._closed_at if each >= first)
        return Replay(tuple(self._ids[first:]), closed_at, self.origin)

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def replay(self) -> Replay:
        return self.since(0)


class ResumableStream:
    """An answer that runs independently of its readers. `record` receives its tokens."""

    def __init__(
        self,
        running: RunningRequest,
        serializer: Serializer,
        log: AnswerLog | None = None,
        record: TokenRecord | None = None,
    ) -> None:
        self.running = running
        self.record = record
        self.serializer = serializer  # each reader uses a copy of it, made by `again`
        self.followed = serializer.again()  # receives the events as they are generated
        self.log = log  # copy for readers at other replicas, if any
        self.following = asyncio.create_task(self._follow())

    @property
    def finished(self) -> bool:
        return self.running.finished

    async def _follow(self) -> None:
        serializer = self.followed
        try:
            self._tell(serializer.initial_events() if self.log is not None else ())
            async for item in generation_events(self.running):
                if item is not None:
                    if self.record is not None:
                        self.record.take(item[1])
                    self._tell(await sse_events_of(serializer, *item))
            await serializer.finalize()
            self._tell(await closing_events_of(serializer) if self.log is not None else ())
        except (ApiError, NotsoError) as error:  # every reader receives the error, too
            self._tell((await failure_event_of(serializer, api_error_of(error)),))
        finally:
            self.running.close()
            if self.log is not None:
                self.log.finish(await asyncio.to_thread(serializer.body))

    def _tell(self, sse_events: Iterable[bytes]) -> None:
        sse_events = list(sse_events)
        if self.log is not None:
            self.log.add(sse_events)


class ResumableStreams:
    """Resumable answers by owner and conversation. Use on the event loop."""

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._exchange = exchange or Alone()
        self._exchange.hear("stop answer", lambda body: self._stop(body["name"]))
        self._exchange.hear("new answer", lambda body: self._forget_old(body["name"]))
        self.elsewhere = AnswersElsewhere(self._exchange)
        self._streams: dict[tuple[str, str], ResumableStream] = {}
        self._claimed: dict[tuple[str, str], str] = {}

    @contextlib.asynccontextmanager
    async def claimed(self, owner: str, conversation: str, name: str) -> AsyncIterator[None]:
        """Reserve a conversation for the answer `name`.

        Raises ApiError: 409 while another answer runs in it, 429 if too many are open.
        """
        there, key = self.find(owner, conversation), (owner, conversation)
        busy = self._claimed.get(key) or (there.running.name if there is not None and not there.finished else "")
        if busy:
            raise ApiError(409, "generation_in_progress", f"a response is already being generated: {busy}")
        open_ones = sum(not each.finished for each in self._streams.values()) + len(self._claimed)
        if there is None and open_ones >= MAX_RESUMABLE:
            raise ApiError(429, "rate_limited", "too many conversations are active", retry_after_seconds=5)
        self._claimed[key] = name
        try:
            if elsewhere := await self._exchange.claim(claim_name(*key), name):
                raise ApiError(409, "generation_in_progress", f"a response is already being generated: {elsewhere}")
            try:
                yield
            except BaseException:
                self._exchange.release(claim_name(*key))
                raise
        finally:
            del self._claimed[key]

    def keep(
        self,
        owner: str,
        conversation: str,
        running: RunningRequest,
        serializer: Serializer,
        record: TokenRecord | None = None,
    ) -> ResumableStream:
        """Keep the answer running without readers; drop it RESUMABLE_SECONDS after its end."""
        log, name = AnswerLog(running.name, serializer.body()) if self._exchange.is_shared else None, running.name
        stream = self._streams[owner, conversation] = ResumableStream(running, serializer, log, record)
        if log is not None:
            self._exchange.publish(claim_name(owner, conversation), log)
            self._exchange.tell("new answer", name=claim_name(owner, conversation))
        stream.following.add_done_callback(lambda _: self._exchange.release(claim_name(owner, conversation)))
        loop = asyncio.get_running_loop()  # the timer refers only to the name, so that the text can be freed
        stream.following.add_done_callback(
            lambda _: loop.call_later(RESUMABLE_SECONDS, self._drop, (owner, conversation), name)
        )
        for key, each in list(self._streams.items()):
            if len(self._streams) <= MAX_RESUMABLE:
                break
            if each.finished:
                del self._streams[key]
        return stream

    def find(self, owner: str, conversation: str) -> ResumableStream | None:
        return self._streams.get((owner, conversation))

    def forget(self, owner: str, conversation: str) -> None:
        self._streams.pop((owner, conversation), None)

    def _stop(self, name: str) -> None:
        for key, stream in self._streams.items():
            if claim_name(*key) == name:
                stream.running.stop(by_asker=True)

    def _forget_old(self, name: str) -> None:
        # Another replica has a newer answer of the conversation.
        for key, stream in list(self._streams.items()):
            if stream.finished and claim_name(*key) == name:
                del self._streams[key]

    def _drop(self, key: tuple[str, str], name: str) -> None:
        stream = self._streams.get(key)
        if stream is not None and stream.running.name == name:
            del self._streams[key]


async def numbered(sse_events: AsyncIterator[bytes], start: int, ping: bytes) -> AsyncIterator[bytes]:
    """Number the events and yield those from `start`. Pings depend on timing and have no number."""
    number = -1
    async for sse_event in sse_events:
        if sse_event == ping:
            yield sse_event
            continue
        number += 1
        if number >= start:
            yield b"id: " + str(number).encode() + b"\n" + sse_event
