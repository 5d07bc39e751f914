"""All turns that run or wait: starting, finding, stopping them, and remembering those that ended not long ago."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from notso.web.engine.port import FinishReason, Usage
from notso.web.engine.running import Prepared, RunningRequest, RunningRequests
from notso.web.store.protocol import ChatStore, ToolUse
from notso.web.tools.elicitation import Elicitation, Reply
from notso.web.turns.tool_calls import Permission
from notso.web.turns.turn import Turn
from notso.web.turns.turn_consumer import TurnConsumer
from notso.web.turns.turn_log import Card
from notso.web.turns.turn_stats import TurnStats
from notso.web.values.fair_queue import FairQueue
from notso.web.values.wording import words

logger = logging.getLogger("notso.web.turns")

KEEP_FINISHED_SECONDS = 300.0
MAX_FINISHED = 64

Mark = Literal["waiting", "working", "asking"]
"""A chat waits in line, is being answered, or waits for a person."""


def mark_of(phase: str) -> Mark:
    """What a phase of an answer means for who sees only its chat's title."""
    return "asking" if phase in ("asking", "question") else "waiting" if phase in ("queued", "loading") else "working"


class Turns:
    """Starts, finds, stops and follows turns. Everything here runs on the event loop.

    `at_end` is called with each turn that has ended, its usage and its finish reason (None where it failed);
    `at_start` with each that begins; `at_mark` with each whose mark has changed. `not_here` is called with what was
    asked of a turn that does not run here, as the name of a method and its arguments.
    """

    def __init__(
        self,
        store: ChatStore,
        requests: RunningRequests,
        renderer: FairQueue,
        max_answer_characters: int,
        card: Callable[[ToolUse], Card],
    ) -> None:
        self.at_start: list[Callable[[Turn], None]] = []
        self.at_end: list[Callable[[Turn, Usage | None, FinishReason | None], None]] = []
        self.at_mark: list[Callable[[Turn], None]] = []
        self.not_here: Callable[..., None] = lambda method, *arguments: None
        self._marks: dict[str, Mark] = {}
        self._store = store
        self._requests = requests
        self._renderer = renderer
        self._max_answer_characters = max_answer_characters
        self._card = card
        self._consumers: dict[str, TurnConsumer] = {}
        self._finished: dict[str, tuple[Turn, asyncio.TimerHandle]] = {}
        self._expected: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unfinished(self) -> int:
        """Turns that run or wait."""
        return len(self._consumers)

    @property
    def generations(self) -> frozenset[str]:
        """Their generation ids."""
        return frozenset(self._consumers)

    def start(self, turn: Turn, running: RunningRequest, prepared: Prepared | None = None) -> None:
        """Hand a stored turn to the engine, as the request it was admitted as, and as it was `prepared`."""
        # In a context of its own: what is run for the turn belongs to it, not to the request that it came by.
        contextvars.copy_context().run(self._start, turn, running, prepared)

    def _start(self, turn: Turn, running: RunningRequest, prepared: Prepared | None) -> None:
        for tell in self.at_start:
            tell(turn)
        running.adopt()
        consumer = TurnConsumer(
            *(turn, self._store, self._renderer, self._max_answer_characters, self._requests, running, self._card),
            prepared,
        )
        self._consumers[turn.id] = consumer
        turn.log.at_phase = lambda: self._mark(turn)
        self._marks[turn.message.chat_id] = mark_of(turn.log.phase)
        if not consumer.calls.open:
            phase = "queued" if self._requests.host.model(turn.request.model).takes_requests else "loading"
            turn.log.set_phase(phase, words[f"phase_{phase}"])  # it may be in a long step before it says a word
        task = asyncio.create_task(self._follow(consumer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def marks(self) -> Mapping[str, Mark]:
        """The chats that are being answered, and what each waits for."""
        return self._marks

    def _mark(self, turn: Turn) -> None:
        chat_id, mark = turn.message.chat_id, mark_of(turn.log.phase)
        if self._marks.get(chat_id, mark) != mark:
            self._marks[chat_id] = mark
            for tell in self.at_mark:
                tell(turn)

    @contextlib.contextmanager
    def expecting(self, generation_id: str) -> Iterator[None]:
        """Between storing a turn and starting it: it is not lost, it is about to come."""
        self._expected.add(generation_id)
        try:
            yield
        finally:
            self._expected.discard(generation_id)

    def lost(self, generation_id: str) -> bool:
        """Whether nobody knows of a turn that is marked as running."""
        return generation_id not in self._expected and self.find(generation_id) is None

    def find(self, generation_id: str) -> Turn | None:
        """A turn that runs, waits, or ended not long ago."""
        consumer = self._consumers.get(generation_id)
        if consumer is not None:
            return consumer.turn
        finished = self._finished.get(generation_id)
        return finished[0] if finished is not None else None

    def stats(self, generation_id: str) -> TurnStats | None:
        """How a turn stands that runs or waits."""
        consumer = self._consumers.get(generation_id)
        return consumer.stats if consumer is not None else None

    def stop(self, generation_id: str, *, interrupted: bool = False) -> bool:
        """Ask a turn to end; a waiting one ends at once. False when no such turn runs or waits."""
        consumer = self._consumers.get(generation_id)
        if consumer is None:
            self.not_here("stop", generation_id)
            return False
        turn = consumer.turn
        turn.interrupted = turn.interrupted or interrupted
        turn.cancelled = True
        turn.log.set_phase("stopping", words["phase_stopping"])
        consumer.stop()
        return True

    def asking(self, generation_id: str) -> ToolUse | None:
        """The call of this turn that waits for a person: for permission, or for the reply to its question."""
        consumer = self._consumers.get(generation_id)
        return consumer.calls.asking if consumer is not None and not consumer.turn.cancelled else None

    def question(self, generation_id: str) -> Elicitation | None:
        """What the call that runs in this turn asks a person."""
        consumer = self._consumers.get(generation_id)
        return consumer.calls.question if consumer is not None and not consumer.turn.cancelled else None

    def reply(self, generation_id: str, question_id: str, reply: Reply) -> bool:
        """A person's word on that question. False when it does not wait for one."""
        consumer = self._consumers.get(generation_id)
        return consumer is not None and consumer.calls.reply(question_id, reply)

    def permit(self, generation_id: str, call_id: str, permission: Permission) -> bool:
        """A person's word on that call. False when it does not wait for one."""
        consumer = self._consumers.get(generation_id)
        if consumer is None:
            self.not_here("permit", generation_id, call_id, permission)
        return consumer is not None and consumer.calls.permit(call_id, permission)

    def answer_now(self, generation_id: str) -> bool:
        """End a turn's thinking. False when no such turn runs or waits."""
        consumer = self._consumers.get(generation_id)
        if consumer is None:
            self.not_here("answer_now", generation_id)
        else:
            consumer.running.answer_now()
        return consumer is not None

    def stop_chat(self, owner: str, chat_id: str) -> None:
        """Stop whatever runs or waits in a chat of that owner, here or elsewhere."""
        self.not_here("stop_chat", chat_id, owner)
        self.stop_chat_here(owner, chat_id)

    def stop_chat_here(self, owner: str, chat_id: str) -> None:
        """Stop whatever of that owner's chat runs or waits in this process."""
        for generation_id, consumer in list(self._consumers.items()):
            turn = consumer.turn
            if turn.message.chat_id == chat_id and turn.request.options.owner == owner:
                self.stop(generation_id)

    def interrupt_all(self, *, asking_only: bool = False) -> None:
        """The server is going away: end every turn with what it has, or those that wait for a person."""
        for generation_id, consumer in list(self._consumers.items()):
            if not asking_only or consumer.calls.asking is not None:
                self.stop(generation_id, interrupted=True)

    async def wait_for_all(self) -> None:
        """Return when every turn has ended and is saved."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _follow(self, consumer: TurnConsumer) -> None:
        turn = consumer.turn
        try:
            await consumer.run()
        except Exception:
            logger.exception("a turn could not be followed")
            consumer.running.stop()
            turn.log.finish("failed", words["phase_failed"], words["failed_inside"])
        finally:
            del self._consumers[turn.id]
            turn.log.at_phase = None
            self._marks.pop(turn.message.chat_id, None)
            self._keep(turn)
            for tell in self.at_end:
                tell(turn, consumer.usage, consumer.finish_reason)

    def _keep(self, turn: Turn) -> None:
        later = asyncio.get_running_loop().call_later(KEEP_FINISHED_SECONDS, self._let_go, turn.id)
        self._finished[turn.id] = turn, later
        while len(self._finished) > MAX_FINISHED:
            self._let_go(next(iter(self._finished)))

    def _let_go(self, generation_id: str) -> None:
        """Of its clock too: a busy server ends thousands of turns while one of them would be kept."""
        finished = self._finished.pop(generation_id, None)
        if finished is not None:
            finished[1].cancel()
