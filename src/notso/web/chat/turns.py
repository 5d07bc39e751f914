"""All turns that run or wait, and the task that follows each: events in, HTML and saved text out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

from notso.web.chat.engine_port import Event, Usage
from notso.web.chat.engine_thread import EngineThread, Job
from notso.web.chat.turn import Turn
from notso.web.chat.turn_log import CHANNELS, ChannelName
from notso.web.errors import NotsoError, StorageError
from notso.web.rendering.markdown import RENDERER_VERSION
from notso.web.rendering.streaming import Rendered, StreamingMarkdown
from notso.web.store.protocol import ChatStore, MessageState, Numbers, StoredMessage
from notso.web.wording import ordinal, words

logger = logging.getLogger("notso.web.turns")

T = TypeVar("T")

TICK_SECONDS = 0.1
SAVE_SECONDS = 1.0
KEEP_FINISHED_SECONDS = 300.0
MAX_FINISHED = 64
SAVE_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)


class Turns:
    """Starts, finds, stops and follows turns. Everything here runs on the event loop."""

    def __init__(self, store: ChatStore, engine: EngineThread, renderer: Executor, max_answer_characters: int) -> None:
        self._store = store
        self._engine = engine
        self._renderer = renderer
        self._max_answer_characters = max_answer_characters
        self._followers: dict[str, _Follower] = {}
        self._waiting: list[Turn] = []
        self._finished: dict[str, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unfinished(self) -> int:
        """Turns that run or wait."""
        return len(self._followers)

    @property
    def waiting(self) -> int:
        """Turns the engine has not begun."""
        return len(self._waiting)

    def start(self, turn: Turn) -> None:
        """Hand a stored turn to the engine."""
        follower = _Follower(turn, self._store, self._renderer, self._max_answer_characters)
        self._followers[turn.id] = follower
        self._waiting.append(turn)
        self._number_the_queue()
        task = asyncio.create_task(self._follow(follower))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._engine.submit(Job(turn, began=lambda: self._began(follower), events=follower.take, ended=follower.end))

    def find(self, generation_id: str) -> Turn | None:
        """A turn that runs, waits, or ended not long ago."""
        follower = self._followers.get(generation_id)
        return follower.turn if follower else self._finished.get(generation_id)

    def stop(self, generation_id: str, *, interrupted: bool = False) -> bool:
        """Ask a turn to end; a waiting one ends at once. False when no such turn runs or waits."""
        follower = self._followers.get(generation_id)
        if follower is None:
            return False
        turn = follower.turn
        turn.interrupted = turn.interrupted or interrupted
        turn.cancel.set()
        turn.log.set_phase("stopping", words["phase_stopping"])
        if self._engine.withdraw(turn) is not None:
            self._leave_queue(turn)
            follower.end(None)
        return True

    def stop_chat(self, chat_id: str) -> None:
        """Stop whatever runs or waits in a chat."""
        for generation_id, follower in list(self._followers.items()):
            if follower.turn.answer.chat_id == chat_id:
                self.stop(generation_id)

    def interrupt_all(self) -> None:
        """The server is going away: end every turn with what it has."""
        for generation_id in list(self._followers):
            self.stop(generation_id, interrupted=True)

    async def settled(self) -> None:
        """Return when every turn has ended and is saved."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _follow(self, follower: _Follower) -> None:
        turn = follower.turn
        try:
            await follower.run()
        except Exception:
            logger.exception("a turn could not be followed")
            turn.cancel.set()
            turn.log.finish("failed", words["phase_failed"], words["failed_inside"])
        finally:
            self._leave_queue(turn)
            del self._followers[turn.id]
            self._keep(turn)

    def _began(self, follower: _Follower) -> None:
        self._leave_queue(follower.turn)
        follower.begin()

    def _leave_queue(self, turn: Turn) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        self._number_the_queue()

    def _number_the_queue(self) -> None:
        for place, turn in enumerate(self._waiting, start=1):
            if self._engine.state == "loading":
                turn.log.set_phase("loading", words["phase_loading"])
            elif place > 1 or len(self._followers) > len(self._waiting):
                turn.log.set_phase("queued", words["phase_queued_at"].format(place=ordinal(place)))

    def _keep(self, turn: Turn) -> None:
        self._finished[turn.id] = turn
        while len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        asyncio.get_running_loop().call_later(KEEP_FINISHED_SECONDS, self._finished.pop, turn.id, None)


class _Follower:
    """Follows one turn from its first event to its saved end."""

    def __init__(self, turn: Turn, store: ChatStore, renderer: Executor, max_characters: int) -> None:
        self.turn = turn
        self._store = store
        self._renderer = renderer
        self._room = dict.fromkeys(CHANNELS, max_characters)
        self._text: dict[ChannelName, str] = dict.fromkeys(CHANNELS, "")
        self._unrendered: dict[ChannelName, str] = dict.fromkeys(CHANNELS, "")
        self._markdown = {name: StreamingMarkdown() for name in CHANNELS}
        self._usage: Usage | None = None
        self._note = ""
        self._failure: BaseException | None = None
        self._began = self._ended = self._whole = False
        self._wake = asyncio.Event()
        self._thinking_since = self._thinking_until = 0.0
        self._last_save = 0.0

    def begin(self) -> None:
        """The engine reads the prompt now."""
        self._began = True
        self.turn.log.set_phase("reading", words["phase_reading"])
        self._wake.set()

    def take(self, events: list[Event]) -> None:
        """Events, in order."""
        for event in events:
            match event.kind:
                case "reasoning":
                    self._thinking_since = self._thinking_since or time.monotonic()
                    self._add("reasoning", event.text)
                case "text":
                    self._end_of_thinking()
                    self._add("answer", event.text)
                case "usage":
                    self._usage = event.usage
                case "end":
                    self._whole = event.finish_reason in ("stop", "length")
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
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
            if self._ended:
                break
            started = time.monotonic()
            self._name_the_phase()
            await self._render_more()
            if started - self._last_save >= SAVE_SECONDS:
                await self._save_partial()
            spent = time.monotonic() - started
            await self._pause(max(TICK_SECONDS, 4 * spent) - spent)
        await self._finish()

    def _add(self, channel: ChannelName, text: str) -> None:
        text = text[: self._room[channel]]
        self._room[channel] -= len(text)
        self._text[channel] += text
        self._unrendered[channel] += text
        if self._room[channel] == 0:
            self._note = words["note_length"]
            self.turn.cancel.set()

    def _end_of_thinking(self) -> None:
        if self._thinking_since and not self._thinking_until:
            self._thinking_until = time.monotonic()

    def _name_the_phase(self) -> None:
        log = self.turn.log
        if self.turn.cancel.is_set() or not self._began:
            return
        if self._thinking_since:
            seconds = int((self._thinking_until or time.monotonic()) - self._thinking_since)
            label = words["thought_for" if self._thinking_until else "phase_thinking_for"].format(seconds=seconds)
            log.set_thought(label)
        if self._text["answer"]:
            log.set_phase("generating", words["phase_generating"])
        elif self._text["reasoning"]:
            log.set_phase("thinking", log.thought)

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
        self._end_of_thinking()
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
        log.finish(state, words[f"phase_{state}"], error)

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
        if self.turn.cancel.is_set() and not self._whole and not self._note:
            return "interrupted" if self.turn.interrupted else "stopped", ""
        return "done", self._note

    def _message(self, state: MessageState) -> StoredMessage:
        usage = self._usage or Usage(0, 0)
        thinking_ms = 1000 * (self._thinking_until - self._thinking_since) if self._thinking_until else 0.0
        numbers = Numbers(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            prompt_ms=usage.prompt_ms,
            completion_ms=usage.completion_ms,
            thinking_ms=thinking_ms,
        )
        return replace(
            self.turn.answer,
            content=self._text["answer"],
            reasoning=self._text["reasoning"],
            state=state,
            note=self._note,
            numbers=numbers,
        )
