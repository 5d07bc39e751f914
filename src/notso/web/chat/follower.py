"""The task that follows one turn: the engine's events in, HTML for readers and saved text out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, replace
from typing import TypeVar

from notso.web.chat.engine_host import Job
from notso.web.chat.engine_port import Event, FinishReason, Usage
from notso.web.chat.narration import Narration
from notso.web.chat.turn import Turn
from notso.web.chat.turn_log import CHANNELS, ChannelName
from notso.web.errors import NotsoError, StorageError
from notso.web.rendering.markdown import RENDERER_VERSION
from notso.web.rendering.streaming import Rendered, StreamingMarkdown
from notso.web.store.protocol import ChatStore, MessageState, Numbers, StoredMessage
from notso.web.wording import words

logger = logging.getLogger("notso.web.turns")

T = TypeVar("T")

TICK_SECONDS = 0.1
SAVE_SECONDS = 1.0
SAVE_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)


class Follower:
    """Follows one turn from its first event to its saved end. `job` is what the engine is given."""

    def __init__(self, turn: Turn, store: ChatStore, renderer: Executor, max_characters: int) -> None:
        self.turn = turn
        self.job = Job(turn.request, events=self.take, ended=self.end, dropped=self._drop)
        self.job.answer_asked = turn.hurry
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self._store = store
        self._renderer = renderer
        self._text: dict[ChannelName, str] = {"reasoning": turn.answer.reasoning, "answer": turn.answer.content}
        self._unrendered = dict(self._text)
        self._room = {name: max_characters - len(text) for name, text in self._text.items()}
        self._markdown = {name: StreamingMarkdown() for name in CHANNELS}
        self._before = turn.answer.numbers if any(self._text.values()) else Numbers()
        self._narration = Narration(time.monotonic(), thought_before_s=self._before.thinking_ms / 1000)
        self._note = ""
        self._failure: BaseException | None = None
        self._ended = False
        self._wake = asyncio.Event()
        self._last_save = time.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether the engine has not begun yet."""
        return not self._narration.began and not self._ended

    def take(self, events: list[Event]) -> None:
        """Events, in order."""
        now = time.monotonic()
        for event in events:
            self._narration.take(event, now)
            match event.kind:
                case "reasoning":
                    if self.turn.hurry:
                        self.job.answer_now()
                    self._add("reasoning", event.text)
                case "text":
                    self._add("answer", event.text)
                case "usage":
                    self.usage = event.usage
                case "end":
                    self.finish_reason = event.finish_reason
                    if event.finish_reason == "length":
                        self._note = words["note_length"]
        self._wake.set()

    def end(self, failure: BaseException | None) -> None:
        """Nothing more will come."""
        self._failure = failure
        self._ended = True
        self._wake.set()

    async def run(self) -> None:
        """Render at most ten times a second, save about once a second, finish."""
        await self._render_more()
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
            if self._ended:
                break
            started = time.monotonic()
            self._tell()
            await self._render_more()
            if started - self._last_save >= SAVE_SECONDS:
                await self._save_partial()
            spent = time.monotonic() - started
            await self._pause(max(TICK_SECONDS, 4 * spent) - spent)
        await self._finish()

    def _drop(self) -> None:
        self.turn.interrupted = self.turn.cancelled = True

    def _add(self, channel: ChannelName, text: str) -> None:
        text = text[: max(0, self._room[channel])]
        self._room[channel] -= len(text)
        self._text[channel] += text
        self._unrendered[channel] += text
        if self._room[channel] <= 0:
            self._note = words["note_length"]
            self.turn.cancelled = True
            self.job.stop()

    def _tell(self) -> None:
        if not self.turn.cancelled:
            saying = self._narration.say(time.monotonic())
            self.turn.log.tell(saying.phase, saying.label, saying.thought, saying.detail, saying.progress)

    async def _render_more(self) -> None:
        for channel in CHANNELS:
            if text := self._unrendered[channel]:
                self._unrendered[channel] = ""
                await self._render(channel, lambda md, text=text: md.feed(text))  # type: ignore[misc]

    async def _render(self, channel: ChannelName, step: Callable[[StreamingMarkdown], Rendered]) -> None:
        rendered = await self._off_loop(lambda: step(self._markdown[channel]))
        self.turn.log.write(channel, rendered.closed, rendered.tail)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, work)

    async def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            # An end need not wait for the tick; further events only set the flag again.
            await asyncio.sleep(min(left, 0.02))

    async def _save_partial(self) -> None:
        self._last_save = time.monotonic()
        try:
            await self._store.save_answer(self._message("running"))
        except StorageError as error:
            logger.warning("a partial answer was not saved: %s", error)

    async def _finish(self) -> None:
        self._narration.end_of_thinking(time.monotonic())
        await self._render_more()
        for channel in CHANNELS:
            await self._render(channel, StreamingMarkdown.finish)
        state, note = self._outcome()
        log = self.turn.log
        self._note = note
        answer = replace(
            self._message(state),
            answer_html=log.html("answer"),
            reasoning_html=log.html("reasoning"),
            renderer=RENDERER_VERSION,
        )
        self.turn.answer = answer
        error = note if state == "failed" else None
        if not await self._save_for_good(answer):
            state, error = "failed", words["failed_saving"]
        log.finish(state, words[f"phase_{state}"], error, asdict(answer.numbers))

    async def _save_for_good(self, answer: StoredMessage) -> bool:
        for pause in (*SAVE_RETRY_SECONDS, None):
            try:
                await self._store.save_answer(answer)
                return True
            except StorageError as error:
                logger.error("an answer was not saved: %s", error)
                if pause is not None:
                    await asyncio.sleep(pause)
        return False

    def _outcome(self) -> tuple[MessageState, str]:
        if isinstance(self._failure, NotsoError):
            return "failed", str(self._failure)
        if self._failure is not None:
            return "failed", words["failed_inside"]
        whole = self.finish_reason in ("stop", "length", "tool_calls")
        if self.turn.cancelled and not whole and not self._note:
            return "interrupted" if self.turn.interrupted else "stopped", ""
        if not whole and not self._note:  # the engine ended it unasked: it was closed
            return "interrupted", ""
        return "done", self._note

    def _message(self, state: MessageState) -> StoredMessage:
        usage, before = self.usage or Usage(0, 0), self._before
        numbers = Numbers(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=before.completion_tokens + usage.completion_tokens,
            reasoning_tokens=before.reasoning_tokens + usage.reasoning_tokens,
            prompt_ms=usage.prompt_ms,
            completion_ms=before.completion_ms + usage.completion_ms,
            thinking_ms=1000 * self._narration.thinking_s,
            queue_ms=usage.queue_ms,
            first_token_ms=1000 * self._narration.first_token_s or before.first_token_ms,
        )
        return replace(
            self.turn.answer,
            content=self._text["answer"],
            reasoning=self._text["reasoning"],
            state=state,
            note=self._note,
            numbers=numbers,
            dropped_messages=self._narration.dropped_messages,
        )
