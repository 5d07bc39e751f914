"""Answers that outlive their reader: those of requests that named a conversation, to be read again or stopped by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from notso.smollm3 import NotsoError
from notso.web.api.shared.generation_events import generation_events
from notso.web.api.shared.serializer import Serializer
from notso.web.edge.api_error import ApiError, api_error_of
from notso.web.engine.running import RunningRequest

RESUMABLE_SECONDS = 300.0
MAX_RESUMABLE = 256


class ResumableStream:
    """An answer that goes on by itself. `serializer` is how it is written down, `followed` how far it is."""

    def __init__(self, running: RunningRequest, serializer: Serializer) -> None:
        self.running = running
        self.serializer = serializer
        self.followed = serializer.again()
        self.following = asyncio.create_task(self._follow())

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return self.running.finished

    async def _follow(self) -> None:
        serializer = self.followed
        try:
            async for item in generation_events(self.running):
                if item is not None:
                    for _ in serializer.take(*item):
                        pass
            await serializer.finalise()
        except (ApiError, NotsoError) as error:  # which every reader gets to see
            serializer.failure(api_error_of(error))
        finally:
            self.running.close()


class ResumableStreams:
    """By whose they are and the conversation's name. On the loop."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], ResumableStream] = {}
        self._claimed: dict[tuple[str, str], str] = {}

    @contextlib.contextmanager
    def claimed(self, owner: str, conversation: str, name: str) -> Iterator[None]:
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
            yield
        finally:
            del self._claimed[key]

    def keep(self, owner: str, conversation: str, running: RunningRequest, serializer: Serializer) -> ResumableStream:
        """From here on the answer goes on whether or not anybody reads it. It is forgotten some time after its end."""
        stream = self._streams[owner, conversation] = ResumableStream(running, serializer)
        loop = asyncio.get_running_loop()
        name = running.name  # which the clock holds instead of all that was said
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
