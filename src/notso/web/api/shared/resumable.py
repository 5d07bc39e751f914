"""Answers that outlive their reader: those of requests that named a conversation, to be read again or stopped by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from notso.smollm3 import NotsoError
from notso.web.api.shared.answers_elsewhere import AnswerLog, AnswersElsewhere, claim_name
from notso.web.api.shared.generation_events import generation_events
from notso.web.api.shared.serializer import Serializer, closing_events_of, sse_events_of
from notso.web.edge.api_error import ApiError, api_error_of
from notso.web.engine.running import RunningRequest
from notso.web.replicas.exchange import Alone, Exchange

RESUMABLE_SECONDS = 300.0
MAX_RESUMABLE = 256


class ResumableStream:
    """An answer that goes on by itself. `serializer` is how it is written down, `followed` how far it is, `log` what
    of it readers at other replicas get, where there are any.
    """

    def __init__(self, running: RunningRequest, serializer: Serializer, log: AnswerLog | None = None) -> None:
        self.running = running
        self.serializer = serializer
        self.followed = serializer.again()
        self.log = log
        self.following = asyncio.create_task(self._follow())

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return self.running.finished

    async def _follow(self) -> None:
        serializer = self.followed
        try:
            self._tell(serializer.initial_events() if self.log is not None else ())
            async for item in generation_events(self.running):
                if item is not None:
                    self._tell(await sse_events_of(serializer, *item))
            await serializer.finalise()
            self._tell(await closing_events_of(serializer) if self.log is not None else ())
        except (ApiError, NotsoError) as error:  # which every reader gets to see
            self._tell((serializer.failure(api_error_of(error)),))
        finally:
            self.running.close()
            if self.log is not None:
                self.log.finish(serializer.body())

    def _tell(self, sse_events: Iterable[bytes]) -> None:
        sse_events = list(sse_events)
        if self.log is not None:
            self.log.add(sse_events)


class ResumableStreams:
    """By whose they are and the conversation's name. On the loop. What other replicas write is found as well."""

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._exchange = exchange or Alone()
        self._exchange.hear("stop answer", lambda body: self._stop(body["name"]))
        self._exchange.hear("new answer", lambda body: self._forget_old(body["name"]))
        self.elsewhere = AnswersElsewhere(self._exchange)
        self._streams: dict[tuple[str, str], ResumableStream] = {}
        self._claimed: dict[tuple[str, str], str] = {}

    @contextlib.asynccontextmanager
    async def claimed(self, owner: str, conversation: str, name: str) -> AsyncIterator[None]:
        """Nobody else answers in this conversation while the answer `name` is asked for.

        Raises ApiError: 409 while another is asked for or written in it, 429 if too many are.
        """
        there, key = self.find(owner, conversation), (owner, conversation)
        busy = self._claimed.get(key) or (there.running.name if there is not None and not there.finished else "")
        if busy:
            raise ApiError(409, "generation_in_progress", f"an answer is being written: {busy}")
        open_ones = sum(not each.finished for each in self._streams.values()) + len(self._claimed)
        if there is None and open_ones >= MAX_RESUMABLE:
            raise ApiError(429, "rate_limited", "too many conversations are being answered", retry_after_seconds=5)
        self._claimed[key] = name
        try:
            if elsewhere := await self._exchange.claim(claim_name(*key), name):
                raise ApiError(409, "generation_in_progress", f"an answer is being written: {elsewhere}")
            try:
                yield
            except BaseException:
                self._exchange.release(claim_name(*key))
                raise
        finally:
            del self._claimed[key]

    def keep(self, owner: str, conversation: str, running: RunningRequest, serializer: Serializer) -> ResumableStream:
        """From here on the answer goes on whether or not anybody reads it. It is forgotten some time after its end."""
        log, name = AnswerLog(running.name, serializer.body()) if self._exchange.is_shared else None, running.name
        stream = self._streams[owner, conversation] = ResumableStream(running, serializer, log)
        if log is not None:
            self._exchange.publish(claim_name(owner, conversation), log)
            self._exchange.tell("new answer", name=claim_name(owner, conversation))
        stream.following.add_done_callback(lambda _: self._exchange.release(claim_name(owner, conversation)))
        loop = asyncio.get_running_loop()  # the clock holds the name instead of all that was said
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
        """The newest of that conversation."""
        return self._streams.get((owner, conversation))

    def forget(self, owner: str, conversation: str) -> None:
        """It is not there any more."""
        self._streams.pop((owner, conversation), None)

    def _stop(self, name: str) -> None:
        """Asked for at another replica."""
        for key, stream in self._streams.items():
            if claim_name(*key) == name:
                stream.running.stop(by_asker=True)

    def _forget_old(self, name: str) -> None:
        """The newest of that conversation is another replica's."""
        for key, stream in list(self._streams.items()):
            if stream.finished and claim_name(*key) == name:
                del self._streams[key]

    def _drop(self, key: tuple[str, str], name: str) -> None:
        stream = self._streams.get(key)
        if stream is not None and stream.running.name == name:
            del self._streams[key]


async def numbered(sse_events: AsyncIterator[bytes], start: int, ping: bytes) -> AsyncIterator[bytes]:
    """The frames from number `start` on, each with its number as the event's id; a ping, which comes by the clock, has
    none."""
    number = -1
    async for sse_event in sse_events:
        if sse_event == ping:
            yield sse_event
            continue
        number += 1
        if number >= start:
            yield b"id: " + str(number).encode() + b"\n" + sse_event
