"""All turns that run or wait: starting, finding, stopping them, and remembering those that ended not long ago."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from notso.web.chat.engine_thread import EngineThread, Job
from notso.web.chat.follower import Follower
from notso.web.chat.turn import Turn
from notso.web.store.protocol import ChatStore
from notso.web.wording import ordinal, words

logger = logging.getLogger("notso.web.turns")

KEEP_FINISHED_SECONDS = 300.0
MAX_FINISHED = 64


class Turns:
    """Starts, finds, stops and follows turns. Everything here runs on the event loop."""

    def __init__(self, store: ChatStore, engine: EngineThread, renderer: Executor, max_answer_characters: int) -> None:
        self._store = store
        self._engine = engine
        self._renderer = renderer
        self._max_answer_characters = max_answer_characters
        self._followers: dict[str, Follower] = {}
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
        follower = Follower(turn, self._store, self._renderer, self._max_answer_characters)
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

    async def _follow(self, follower: Follower) -> None:
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

    def _began(self, follower: Follower) -> None:
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
