"""Keep a registry of running, waiting and recently finished turns."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from notso.smollm3 import FinishReason, Usage
from notso.web.engine.running import PreparedRequest, RunningRequest, RunningRequests
from notso.web.store.protocol import ChatStore, ToolUse
from notso.web.tools.elicitation import DECLINED, Elicitation, Reply, parse_form
from notso.web.turns.status_line import TurnStats
from notso.web.turns.tool_calls import Permission
from notso.web.turns.turn import Turn
from notso.web.turns.turn_consumer import TurnConsumer
from notso.web.turns.turn_log import Card
from notso.web.values.errors import Problem
from notso.web.values.fair_queue import FairQueue
from notso.web.values.wording import words

logger = logging.getLogger("notso.web.turns")
access_log = logging.getLogger("notso.access")

KEEP_FINISHED_SECONDS = 300.0
MAX_FINISHED = 64

Mark = Literal["waiting", "working", "asking"]
"""State of a chat in the chat list. `waiting`: queued, or its model is being loaded. `asking`: waiting for the user."""


@dataclass(eq=False, slots=True)
class ExpectedTurn:
    # A turn that is about to start.
    owner: str
    chat_id: str
    is_stored: bool
    started: asyncio.Event = field(default_factory=asyncio.Event)


def mark_for_phase(phase: str) -> Mark:
    return "asking" if phase in ("asking", "question") else "waiting" if phase in ("queued", "loading") else "working"


class Turns:
    """Starts, finds and stops turns. Use on the event loop only."""

    def __init__(
        self,
        store: ChatStore,
        requests: RunningRequests,
        renderer: FairQueue,
        max_answer_characters: int,
        card: Callable[[ToolUse], Card],
    ) -> None:
        self.at_start: list[Callable[[Turn], None]] = []
        # The finish reason is None if the turn failed.
        self.at_end: list[Callable[[Turn, Usage | None, FinishReason | None], None]] = []
        self.at_mark: list[Callable[[Turn], None]] = []
        # Forwards a method call (name, arguments) to all other replicas, because one of them may be running the turn.
        # Returns False if there are none.
        self.forward: Callable[..., bool] = lambda method, *arguments: False
        self.marks: dict[str, Mark] = {}
        self._host = requests.host
        self._new_consumer = partial(TurnConsumer, store, renderer, max_answer_characters, requests, card)
        self._consumers: dict[str, TurnConsumer] = {}
        self._finished: dict[str, tuple[Turn, asyncio.TimerHandle]] = {}
        self._expected: dict[str, ExpectedTurn] = {}
        self._stopped_early: set[str] = set()  # expected turns that the user has stopped
        self.closing = asyncio.Event()  # set at shutdown: all turns are interrupted, including later ones
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unfinished(self) -> int:
        return len(self._consumers)

    @property
    def generations(self) -> frozenset[str]:
        """Generation ids of unfinished turns."""
        return frozenset(self._consumers)

    @property
    def known(self) -> frozenset[str]:
        """Generation ids of unfinished turns, and of those that are about to start."""
        return self.generations | self._expected.keys()

    def start(self, turn: Turn, running: RunningRequest, prepared: PreparedRequest | None = None) -> None:
        """Start a stored turn; `running` is its admitted request."""
        # A turn has its own context, because its work does not belong to the HTTP request that started it.
        contextvars.copy_context().run(self._start, turn, running, prepared)

    def _start(self, turn: Turn, running: RunningRequest, prepared: PreparedRequest | None) -> None:
        for callback in self.at_start:
            callback(turn)
        running.use_current_context()
        running.name = turn.id
        consumer = self._consumers[turn.id] = self._new_consumer(turn, running, prepared)
        turn.log.at_phase = lambda: self._update_mark(turn)
        self.marks[turn.message.chat_id] = mark_for_phase(turn.log.status.phase)
        if not consumer.calls.open:
            phase = "queued" if self._host.model(turn.request.model).accepts_requests else "loading"
            # Set the phase now, because a long step of the engine may delay the turn's first event.
            turn.log.set_status(replace(turn.log.status, phase=phase, label=words[f"phase_{phase}"]))
        if turn.id in self._stopped_early:
            self.stop(turn.id)
        if self.closing.is_set():
            self._hand_over(consumer)
        task = asyncio.create_task(self._run_consumer(consumer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _update_mark(self, turn: Turn) -> None:
        chat_id, mark = turn.message.chat_id, mark_for_phase(turn.log.status.phase)
        if self._newest_of(chat_id) is turn and self.marks.get(chat_id, mark) != mark:
            self.marks[chat_id] = mark
            for callback in self.at_mark:
                callback(turn)

    def _newest_of(self, chat_id: str) -> Turn | None:
        # After a chat is cleared, its stopped turn may still be running when the next turn starts.
        turns = (each.turn for each in reversed(self._consumers.values()))
        return next((turn for turn in turns if turn.message.chat_id == chat_id), None)

    @contextlib.contextmanager
    def expecting(
        self, generation_id: str, owner: str, chat_id: str, *, is_stored: bool = False
    ) -> Iterator[ExpectedTurn]:
        """Register a turn that is about to start, so that it counts as known."""
        expected = self._expected[generation_id] = ExpectedTurn(owner, chat_id, is_stored)
        try:
            yield expected
        finally:
            self._expected.pop(generation_id, None)
            self._stopped_early.discard(generation_id)
            expected.started.set()

    async def begun(self, generation_id: str) -> None:
        """Wait for an expected turn to start."""
        if (expected := self._expected.get(generation_id)) is not None:
            await expected.started.wait()

    def is_unknown(self, generation_id: str) -> bool:
        return generation_id not in self._expected and self.find(generation_id) is None

    def find(self, generation_id: str) -> Turn | None:
        consumer = self._consumers.get(generation_id)
        if consumer is not None:
            return consumer.turn
        finished = self._finished.get(generation_id)
        return finished[0] if finished is not None else None

    def stats(self, generation_id: str) -> TurnStats | None:
        consumer = self._consumers.get(generation_id)
        return consumer.stats if consumer is not None else None

    def stop(self, generation_id: str, *, interrupted: bool = False) -> bool:
        """Stop a turn. Return False if it is neither running nor about to start in this process."""
        if not interrupted:
            access_log.info("stop requested; id %s", generation_id)
        consumer = self._consumers.get(generation_id)
        if consumer is None and generation_id in self._expected:
            self._stopped_early.add(generation_id)
            return True
        if consumer is None:
            self.forward("stop", generation_id)
            return False
        turn = consumer.turn
        turn.interrupted = turn.interrupted or interrupted
        turn.cancelled = True
        turn.log.set_status(replace(turn.log.status, phase="stopping", label=words["phase_stopping"]))
        consumer.stop("" if interrupted else "user")
        return True

    def asking(self, generation_id: str) -> ToolUse | None:
        consumer = self._consumers.get(generation_id)
        return consumer.calls.asking if consumer is not None and not consumer.turn.cancelled else None

    def question(self, generation_id: str) -> Elicitation | None:
        consumer = self._consumers.get(generation_id)
        return consumer.calls.question if consumer is not None and not consumer.turn.cancelled else None

    def reply(self, generation_id: str, question_id: str, form: Mapping[str, str]) -> bool:
        """Answer a tool's question or forward the reply. Return False if nothing awaits it. Raises Problem (400)."""
        consumer = self._consumers.get(generation_id)
        if consumer is None:  # only the replica that runs the turn has the question and can check the form
            return self.forward("reply", generation_id, question_id, dict(form))
        question = self.question(generation_id)
        if question is None or question.id != question_id:
            return False
        if form.get("answer") not in ("accept", "decline"):
            raise Problem(400, words["error_form"])
        accepted = form["answer"] == "accept"
        return consumer.calls.reply(question_id, Reply("accept", parse_form(question, form)) if accepted else DECLINED)

    def permit(self, generation_id: str, call_id: str, permission: Permission) -> bool:
        consumer = self._consumers.get(generation_id)
        if consumer is None:
            self.forward("permit", generation_id, call_id, permission)
        return consumer is not None and consumer.calls.permit(call_id, permission)

    def answer_now(self, generation_id: str) -> bool:
        """End a turn's reasoning. Return False if the turn is not running here."""
        consumer = self._consumers.get(generation_id)
        if consumer is None:
            self.forward("answer_now", generation_id)
        else:
            consumer.running.answer_now()
        return consumer is not None

    def stop_chat(self, owner: str, chat_id: str) -> None:
        self.forward("stop_chat", chat_id, owner)
        self.stop_local_chat(owner, chat_id)

    @contextlib.contextmanager
    def stopping(self, owner: str, *chat_ids: str) -> Iterator[None]:
        # Stop the turns of the chats after the deletion, not before: until then, another tab may send a question. Also
        # stop them if the deletion fails, because a failure may be reported after the commit.
        try:
            yield
        finally:
            for chat_id in chat_ids:
                self.stop_chat(owner, chat_id)

    def stop_local_chat(self, owner: str, chat_id: str) -> None:
        for generation_id, consumer in list(self._consumers.items()):
            turn = consumer.turn
            if turn.message.chat_id == chat_id and turn.request.options.owner == owner:
                self.stop(generation_id)
        for generation_id, expected in self._expected.items():
            # Turns that are not yet stored need not be stopped: storing them fails if the chat no longer exists.
            if expected.is_stored and (expected.owner, expected.chat_id) == (owner, chat_id):
                self.stop(generation_id)

    def interrupt_all(self, *, asking_only: bool = False) -> None:
        """Interrupt all turns, or only those waiting for the user. Another process can continue them."""
        if not asking_only:
            self.closing.set()
        for consumer in list(self._consumers.values()):
            if not asking_only or consumer.calls.asking is not None:
                self._hand_over(consumer)

    def _hand_over(self, consumer: TurnConsumer) -> None:
        consumer.turn.is_handed_over = not consumer.turn.cancelled
        self.stop(consumer.turn.id, interrupted=True)

    async def wait_for_all(self) -> None:
        """Wait until every turn has ended, including those about to start."""
        while self._tasks or self._expected:
            for expected in list(self._expected.values()):
                await expected.started.wait()
            if self._tasks:
                await asyncio.wait(set(self._tasks))

    async def _run_consumer(self, consumer: TurnConsumer) -> None:
        turn = consumer.turn
        try:
            await consumer.run()
        except Exception:
            logger.exception("a turn could not be processed")
            try:
                await consumer.fail()
            except Exception:
                logger.exception("the text of a failed turn was not saved")
            turn.log.finish("failed", words["phase_failed"], words["failed_inside"])
        finally:
            del self._consumers[turn.id]
            turn.log.at_phase = None
            if self._newest_of(turn.message.chat_id) is None:
                self.marks.pop(turn.message.chat_id, None)
            self._keep_finished(turn)
            for callback in self.at_end:
                callback(turn, consumer.usage, consumer.finish_reason)

    def _keep_finished(self, turn: Turn) -> None:
        timer = asyncio.get_running_loop().call_later(KEEP_FINISHED_SECONDS, self._discard_finished, turn.id)
        self._finished[turn.id] = turn, timer
        while len(self._finished) > MAX_FINISHED:
            self._discard_finished(next(iter(self._finished)))

    def _discard_finished(self, generation_id: str) -> None:
        finished = self._finished.pop(generation_id, None)
        # Cancel the timer: a busy server would otherwise accumulate thousands of timers within KEEP_FINISHED_SECONDS.
        if finished is not None:
            finished[1].cancel()
