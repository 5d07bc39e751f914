"""Answers that continue when their client disconnects, and that any replica can resume or stop.

Replicas are servers that share a database. Each answer belongs to a conversation, whose name is in the request
header X-Conversation-Id. For a `background` response, the name is the response's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from notso.smollm3 import Event, FinishReason, NotsoError, Replay
from notso.web.api.shared.serializer import (
    Serializer,
    as_api_error,
    data_event,
    generation_events,
    serialize_closing,
    serialize_event,
    serialize_failure,
)
from notso.web.edge.errors import ApiError
from notso.web.engine.running import RunningRequest
from notso.web.replicas.exchange import Body, Exchange

FIND_TIMEOUT_SECONDS = 0.5
"""If no replica sends an answer's log within this time, the answer is assumed not to exist."""
SILENT_SECONDS = 2.0
"""After this time without events, a reader checks whether the generating replica is still running."""
PING_SECONDS = 15.0


class AnswerLog:
    # Log of an answer: its events and its body. Readers wait for changes; other replicas apply the changes to copies.

    def __init__(self, id: str = "", body: Any = None, stopped_event: bytes = b"") -> None:
        self.id = id  # of the answer
        self.stopped_event = stopped_event  # other replicas send it if this replica stops before the end
        self.body = body  # JSON, preliminary until the answer is finished
        self.sse_events: list[bytes] = []
        self.finished = False
        self.at_change: Callable[[], None] | None = None
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        """Number of changes so far: one per event, and one for the end."""
        return len(self.sse_events) + self.finished

    def add(self, sse_events: Iterable[bytes]) -> None:
        self.sse_events += sse_events
        self._wake()

    def finish(self, body: Any) -> None:
        self.body, self.finished = body, True
        self._wake()

    def changes(self, after: int) -> Body:
        """Return the changes after number `after`, or the whole log if `after` is -1."""
        sse_events = [event.decode() for event in self.sse_events[max(0, after) :]]
        changes = {"id": self.id, "sse_events": sse_events, "body": self.body if after < 0 or self.finished else None}
        return changes | ({"stopped_event": self.stopped_event.decode()} if after < 0 else {})

    def feed(self, changes: Body) -> bool:
        """Apply changes to this copy. Return False if earlier ones are missing."""
        after = max(0, changes["after"])
        # A whole log with another id belongs to a newer answer of the conversation and replaces this copy.
        if changes["after"] < 0 and changes["id"] != self.id:
            self.id, self.sse_events, self.finished, self.body = changes["id"], [], False, changes["body"]
            stopped_event = changes.get("stopped_event")
            # Older releases do not send this event.
            self.stopped_event = (
                data_event(replica_stopped_error().body) if stopped_event is None else stopped_event.encode()
            )
        if changes["id"] != self.id or after > len(self.sse_events):
            return False
        self.sse_events += [event.encode() for event in changes["sse_events"][len(self.sse_events) - after :]]
        if changes["finished"]:
            self.body, self.finished = changes["body"], True
        self._wake()
        return True

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait for a change after `number`. Return False on timeout."""
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


class RemoteAnswer:
    # An answer that another replica generates. `log` is a copy of that replica's log.

    def __init__(self, exchange: Exchange, owner: str, conversation: str) -> None:
        self.log = AnswerLog()
        self._exchange = exchange
        self._name = claim_name(owner, conversation)

    @property
    def id(self) -> str:
        return self.log.id

    @property
    def finished(self) -> bool:
        return self.log.finished

    def stop(self) -> None:
        self._exchange.send("stop answer", name=self._name)

    def mark_read(self) -> None:
        self._exchange.send("read answer", name=self._name)

    async def events(self, start: int, ping: bytes) -> AsyncIterator[bytes]:
        """Yield numbered events, starting at `start`, and pings while none arrive."""
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
                    yield self.log.stopped_event
                    return
                silent_s += SILENT_SECONDS
                if silent_s >= PING_SECONDS:
                    silent_s = 0.0
                    yield ping

    async def wait_for_end(self) -> None:
        """Wait for the end. Raises ApiError (503) if the generating replica has stopped."""
        while not self.log.finished:
            if not await self.log.wait(len(self.log.sse_events), SILENT_SECONDS) and await self.is_abandoned():
                raise replica_stopped_error()

    async def body(self) -> Any:
        return self.log.body

    async def is_abandoned(self) -> bool:
        return not self.log.finished and not await self._exchange.is_claimed(self._name)


class RemoteAnswers:
    """Finds answers that other replicas generate. Use on the event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, owner: str, conversation: str) -> RemoteAnswer | None:
        if not self._exchange.is_shared:
            return None
        answer = RemoteAnswer(self._exchange, owner, conversation)
        received, log = asyncio.Event(), answer.log

        def feed(changes: Body) -> bool:
            applied = log.feed(changes)
            received.set()
            return applied

        task = asyncio.create_task(self._copy_until_end(claim_name(owner, conversation), feed, log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Stop copying when `answer` is garbage-collected, because its last reader may disconnect long before the end.
        weakref.finalize(answer, _cancel, asyncio.get_running_loop(), task).atexit = False
        try:
            async with asyncio.timeout(FIND_TIMEOUT_SECONDS):
                await received.wait()
        except BaseException as error:  # including cancellation, which leaves the copy without a reader
            task.cancel()
            if isinstance(error, TimeoutError):
                return None
            raise
        return answer

    async def _copy_until_end(self, name: str, feed: Callable[[Body], bool], log: AnswerLog) -> None:
        with self._exchange.following(name, feed):
            while not log.finished:
                if not await log.wait(log.number, PING_SECONDS) and not await self._exchange.is_claimed(name):
                    return


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    # Called in the thread that drops the last reference, so the cancellation is passed to the event loop.
    with contextlib.suppress(RuntimeError):  # raised if the loop is closed
        loop.call_soon_threadsafe(task.cancel)


def claim_name(owner: str, conversation: str) -> str:
    # The name is hashed because it is sent to the Valkey server, which must not receive the names of owners or
    # conversations.
    return "answer:" + hashlib.sha256(f"{owner}\0{conversation}".encode()).hexdigest()[:32]


def replica_stopped_error(retry_after_seconds: int = 5) -> ApiError:
    message = "the server that was generating this response has stopped"
    return ApiError(503, "shutting_down", message, retry_after_seconds=retry_after_seconds)


RESUMABLE_SECONDS = 300.0
"""Maximum time for which an answer can still be read after its end."""
MAX_RESUMABLE = 256


class TokenRecord:
    """Collects an answer's token ids, beginning with those of `replay`."""

    def __init__(self, replay: Replay | None = None) -> None:
        self._ids = list(replay.ids) if replay is not None else []
        self._closed_at = list(replay.closed_at) if replay is not None else []
        self.replayed = len(self._ids)
        self.origin = ""
        self.limit = 0
        self.finish: FinishReason | None = None

    def feed(self, event: Event) -> None:
        if event.kind == "started":
            self.origin, self.limit = event.origin, event.limit
        if event.is_forced:
            self._closed_at.append(len(self._ids))
        self._ids += event.token_ids
        if event.kind == "end":
            self.finish = event.finish_reason

    def since(self, first: int) -> Replay:
        closed_at = tuple(each for each in self._closed_at if each >= first)
        return Replay(tuple(self._ids[first:]), closed_at, self.origin)

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def replay(self) -> Replay:
        return self.since(0)


class ResumableStream:
    """An answer that is generated even while no client reads it. `record` receives its tokens."""

    def __init__(
        self, running: RunningRequest, serializer: Serializer, log: AnswerLog | None, record: TokenRecord | None
    ) -> None:
        self.running = running
        self.record = record
        self.serializer = serializer  # template: each reader uses a copy made by `fresh_copy`
        self.live_serializer = serializer.fresh_copy()  # receives every event as it is generated
        self.log = log  # published to other replicas; None if no replicas are configured
        self.is_continued: Callable[[], bool] = lambda: False  # whether another process continues the unfinished answer
        self.is_read = False  # whether clients have read numbered events; if so, the numbers must not change
        self.follow_task = asyncio.create_task(self._follow())

    @property
    def id(self) -> str:
        return self.running.name

    @property
    def finished(self) -> bool:
        return self.running.finished

    async def _follow(self) -> None:
        serializer = self.live_serializer
        try:
            self._append_to_log(serializer.initial_events() if self.log is not None else ())
            async for item in generation_events(self.running):
                if item is not None:
                    if self.record is not None:
                        self.record.feed(item[1])
                    self._append_to_log(await serialize_event(serializer, *item))
            await serializer.finalize()
            self._append_to_log(await serialize_closing(serializer) if self.log is not None else ())
        except Exception as error:  # local readers get the error from `running`, remote ones from the log
            self._append_to_log((await serialize_failure(serializer, as_api_error(error)),))
            if not self.is_continued():
                with contextlib.suppress(NotsoError):  # if the storage is unavailable, the answer is not stored
                    await serializer.finalize()  # stores the failed answer
        finally:
            self.running.close()
            if self.log is not None:
                self.log.finish(await asyncio.to_thread(serializer.body))

    def stop(self) -> None:
        self.running.stop("client")

    def mark_read(self) -> None:
        self.is_read = True

    async def wait_for_end(self) -> None:
        await asyncio.shield(self.follow_task)

    async def body(self) -> Any:
        if self.finished:  # the response may not have been stored yet
            await self.wait_for_end()
        return await asyncio.to_thread(self.live_serializer.body)

    def _append_to_log(self, sse_events: Iterable[bytes]) -> None:
        sse_events = list(sse_events)
        if self.log is not None:
            self.log.add(sse_events)


class ResumableStreams:
    """Holds resumable answers by owner and conversation. Use on the event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._exchange.subscribe("stop answer", lambda body: self._call(body["name"], ResumableStream.stop))
        self._exchange.subscribe("read answer", lambda body: self._call(body["name"], ResumableStream.mark_read))
        self._exchange.subscribe("new answer", lambda body: self._forget_old(body["name"]))
        self.remote_answers = RemoteAnswers(self._exchange)
        self._streams: dict[str, ResumableStream] = {}  # by claim name, oldest first
        self._claimed: dict[str, str] = {}  # claim name -> id of the answer that is about to begin

    @contextlib.asynccontextmanager
    async def claim_conversation(self, owner: str, conversation: str, answer_id: str) -> AsyncIterator[None]:
        """Reserve a conversation for an answer. Raises ApiError: 409 if it is in use, 429 if there are too many."""
        claim = claim_name(owner, conversation)
        stream = self._streams.get(claim)
        open_id = stream.id if stream is not None and not stream.finished else ""
        if running_id := self._claimed.get(claim) or open_id:
            raise _in_progress_error(running_id)
        open_count = sum(not each.finished for each in self._streams.values()) + len(self._claimed)
        if stream is None and open_count >= MAX_RESUMABLE:
            raise ApiError(429, "rate_limited", "too many conversations are active", retry_after_seconds=5)
        self._claimed[claim] = answer_id
        try:
            if holder := await self._exchange.claim(claim, answer_id):
                raise _in_progress_error(holder)
            try:
                yield
            except BaseException:
                self._exchange.release(claim)
                raise
        finally:
            del self._claimed[claim]

    def follow(
        self,
        owner: str,
        conversation: str,
        running: RunningRequest,
        serializer: Serializer,
        record: TokenRecord | None,
    ) -> ResumableStream:
        """Follow an answer to its end, and drop it at most RESUMABLE_SECONDS later."""
        claim, name = claim_name(owner, conversation), running.name
        log = None
        if self._exchange.is_shared:
            log = AnswerLog(name, serializer.body(), serializer.error_frame(replica_stopped_error()))
        self._streams.pop(claim, None)  # the dict is ordered by age, so the new stream must be added at the end
        stream = self._streams[claim] = ResumableStream(running, serializer, log, record)
        if log is not None:
            self._exchange.publish(claim, log)
            self._exchange.send("new answer", name=claim)
        stream.follow_task.add_done_callback(lambda _: self._exchange.release(claim))
        loop = asyncio.get_running_loop()  # the timer below holds only ids, so that the answer can be freed earlier
        stream.follow_task.add_done_callback(lambda _: loop.call_later(RESUMABLE_SECONDS, self._drop, claim, name))
        self._drop_excess()
        return stream

    def _drop_excess(self) -> None:
        # Drop the oldest finished answers of the owner with the most answers, so that one user's answers do not
        # displace those of others.
        while len(self._streams) > MAX_RESUMABLE:
            counts = Counter(each.running.owner for each in self._streams.values())
            finished = (claim for claim, each in self._streams.items() if each.finished)
            claim = max(finished, key=lambda each: counts[self._streams[each].running.owner], default=None)
            if claim is None:
                return
            del self._streams[claim]

    def find(self, owner: str, conversation: str) -> ResumableStream | None:
        return self._streams.get(claim_name(owner, conversation))

    def forget(self, owner: str, conversation: str) -> None:
        self._streams.pop(claim_name(owner, conversation), None)

    def _call(self, claim: str, method: Callable[[ResumableStream], None]) -> None:
        if (stream := self._streams.get(claim)) is not None:
            method(stream)

    def _forget_old(self, claim: str) -> None:
        # Drops the finished answer, because another replica has started a newer answer in the conversation.
        if (stream := self._streams.get(claim)) is not None and stream.finished:
            del self._streams[claim]

    def _drop(self, claim: str, name: str) -> None:
        if (stream := self._streams.get(claim)) is not None and stream.id == name:
            del self._streams[claim]


def _in_progress_error(answer_id: str) -> ApiError:
    return ApiError(409, "generation_in_progress", f"a response is already being generated: {answer_id}")


async def number_events(sse_events: AsyncIterator[bytes], start: int, ping: bytes) -> AsyncIterator[bytes]:
    """Number the events from 0; yield those from number `start`."""
    # Pings are not numbered, because they depend on timing, and an event must have the same number for all readers.
    number = -1
    async for sse_event in sse_events:
        if sse_event == ping:
            yield sse_event
            continue
        number += 1
        if number >= start:
            yield b"id: " + str(number).encode() + b"\n" + sse_event
