"""Answers that outlive their reader: those of requests that named a conversation, to be read again or stopped by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from notso.smollm3 import NotsoError
from notso.web.api.shared.answer_events import answer_events
from notso.web.api.shared.serializer import AnswerForm
from notso.web.edge.api_error import ApiError
from notso.web.engine.running import RunningRequest

KEPT_SECONDS = 300.0
MAX_KEPT = 256


class KeptAnswer:
    """An answer that goes on by itself. `form` is how it is written down."""

    def __init__(self, running: RunningRequest, form: AnswerForm) -> None:
        self.running = running
        self.form = form
        self.following = asyncio.create_task(self._follow())

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return self.running.finished

    async def _follow(self) -> None:
        form = self.form.again()
        try:
            with contextlib.suppress(ApiError, NotsoError):  # which every reader gets to see
                async for item in answer_events(self.running):
                    if item is not None:
                        for _ in form.take(*item):
                            pass
                await form.settle()
        finally:
            self.running.close()


class KeptAnswers:
    """By whose they are and the conversation's name. On the loop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], KeptAnswer] = {}
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
        open_ones = sum(not each.finished for each in self._kept.values()) + len(self._claimed)
        if there is None and open_ones >= MAX_KEPT:
            raise ApiError(429, "rate_limited", "too many conversations are being answered", retry_after_seconds=5)
        self._claimed[key] = name
        try:
            yield
        finally:
            del self._claimed[key]

    def keep(self, owner: str, conversation: str, running: RunningRequest, form: AnswerForm) -> KeptAnswer:
        """From here on the answer goes on whether or not anybody reads it. It is forgotten some time after its end."""
        kept = self._kept[owner, conversation] = KeptAnswer(running, form)
        loop = asyncio.get_running_loop()
        name = running.name  # which the clock holds instead of all that was said
        kept.following.add_done_callback(
            lambda _: loop.call_later(KEPT_SECONDS, self._forget, (owner, conversation), name)
        )
        for key, each in list(self._kept.items()):
            if len(self._kept) <= MAX_KEPT:
                break
            if each.finished:
                del self._kept[key]
        return kept

    def find(self, owner: str, conversation: str) -> KeptAnswer | None:
        """The newest of that conversation."""
        return self._kept.get((owner, conversation))

    def _forget(self, key: tuple[str, str], name: str) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept.running.name == name:
            del self._kept[key]


async def numbered(frames: AsyncIterator[bytes], start: int, ping: bytes) -> AsyncIterator[bytes]:
    """The frames from number `start` on, each with its number as the event's id; a ping, which comes by the clock, has
    none."""
    number = -1
    async for frame in frames:
        if frame == ping:
            yield frame
            continue
        number += 1
        if number >= start:
            yield b"id: " + str(number).encode() + b"\n" + frame
