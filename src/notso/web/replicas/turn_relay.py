"""Connect the turns (answers that are being generated in chats) of several replicas.

Each replica publishes the logs of its own turns, copies the logs of other replicas' turns when a browser reads them,
and forwards user actions, such as stopping an answer, to all other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass, field
from typing import cast

from notso.web.replicas.exchange import Body, Exchange
from notso.web.store.protocol import ChatStore, Orphan, StoredMessage
from notso.web.turns.sse import Feed
from notso.web.turns.tool_calls import PERMISSIONS, Permission
from notso.web.turns.turn_log import TurnLog
from notso.web.turns.turns import Turns
from notso.web.values.errors import Problem, StorageError
from notso.web.values.wording import words

FIRST_SECONDS = 0.5
"""Maximum wait for a copy's first content. Without the wait, the page would briefly show an empty answer."""
SILENT_SECONDS = 1.0
"""Time without changes after which the database is queried, in case the turn has ended unnoticed."""
UNREAD_SECONDS = 5.0
"""Time after which a copy without readers is dropped. A reader that reconnects earlier finds the copy."""


@dataclass(eq=False)
class _Copy:
    # Copy of the log of a turn that runs on another replica.

    owner: str
    generation_id: str
    log: TurnLog = field(default_factory=TurnLog)
    first: asyncio.Event = field(default_factory=asyncio.Event)  # set when the first content arrives
    check_now: asyncio.Event = field(default_factory=asyncio.Event)  # set to query the database at once
    received: int = 0
    unread_s: float = 0.0  # seconds without readers

    def apply_changes(self, body: Body) -> bool:
        self.received += 1
        is_applied = self.log.apply_changes(body["after"], body["number"], body)
        self.first.set()
        if self.log.finished:
            self.check_now.set()
        return is_applied


class TurnRelay:
    """Connects this replica's turns to other replicas. Use only on the event loop."""

    def __init__(self, exchange: Exchange, turns: Turns, feed: Feed, store: ChatStore) -> None:
        self._exchange = exchange
        self._turns = turns
        self._feed = feed
        self._store = store
        self._copies: dict[str, _Copy] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        if exchange.is_shared:
            turns.at_start.append(lambda turn: exchange.publish(turn.id, turn.log))
            turns.forward = self._forward
            feed.at_announce = lambda *announced: exchange.send("feed", announced=announced)
            exchange.subscribe("turn", self._perform)
            exchange.subscribe("feed", lambda body: feed.apply_changes(*body["announced"]))
            exchange.subscribe("ended", lambda body: self._check_soon(body["generation"]))
            exchange.at_gap.append(self._on_gap)

    async def log_of(self, owner: str, message: StoredMessage) -> TurnLog | None:
        """Return a copy of the log of another replica's running turn, or None if there are no replicas."""
        if not self._exchange.is_shared:
            return None
        copy = self._copies.get(message.generation_id or "")
        if copy is None:
            copy = self._copies[message.generation_id or ""] = _Copy(owner, message.generation_id or "")
            task = asyncio.create_task(self._follow(copy))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        copy.unread_s = 0.0  # keep the copy until its new reader has attached
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await copy.first.wait()
        return copy.log

    def ended(self, orphan: Orphan) -> None:
        self._check_soon(orphan.generation_id)
        self._exchange.send("ended", generation=orphan.generation_id)
        self._feed.announce(orphan.owner, orphan.chat_id, "")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forward(self, method: str, *arguments: object) -> bool:
        self._exchange.send("turn", method=method, arguments=arguments)
        return True

    def _perform(self, body: Body) -> None:
        # A user action is forwarded to all replicas, because the browser's request may reach one that is not running
        # the turn.
        method, (name, *more) = body["method"], body["arguments"]
        if method == "stop_chat" and more:
            self._turns.stop_local_chat(more[0], name)
        elif method == "stop" and name in self._turns.known:  # includes turns that are about to start
            self._turns.stop(name)
        elif name in self._turns.generations:
            if method == "answer_now":
                self._turns.answer_now(name)
            elif method == "permit" and more[1] in PERMISSIONS:
                self._turns.permit(name, more[0], cast(Permission, more[1]))
            elif method == "reply":
                with contextlib.suppress(Problem):  # an invalid reply leaves the question open
                    self._turns.reply(name, more[0], more[1])

    def _check_soon(self, generation_id: str) -> None:
        if (copy := self._copies.get(generation_id)) is not None:
            copy.check_now.set()

    def _on_gap(self) -> None:
        self._feed.invalidate_revisions()
        for copy in self._copies.values():
            copy.check_now.set()

    async def _follow(self, copy: _Copy) -> None:
        # Keep the copy up to date until the turn ends (according to the replica that runs it, or to the database), or
        # until the copy has had no readers for UNREAD_SECONDS.
        try:
            with self._exchange.following(copy.generation_id, copy.apply_changes):
                while copy.unread_s < UNREAD_SECONDS and not copy.log.finished:
                    received = copy.received
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(SILENT_SECONDS):
                            await copy.check_now.wait()
                    is_check_requested, has_changed = copy.check_now.is_set(), copy.received > received
                    copy.check_now.clear()
                    if not copy.log.finished and (is_check_requested or not has_changed):
                        await self._end_if_ended(copy)
                    copy.unread_s = 0.0 if copy.log.has_readers else copy.unread_s + SILENT_SECONDS
            if copy.log.finished:
                await asyncio.sleep(UNREAD_SECONDS)
        finally:
            self._copies.pop(copy.generation_id, None)

    async def _end_if_ended(self, copy: _Copy) -> None:
        with contextlib.suppress(StorageError):
            message = await self._store.generation(copy.owner, copy.generation_id)
            if copy.log.finished or (message is not None and message.active):
                return
            if message is None:  # deleted, or continued under another id
                copy.log.finish("interrupted", words["phase_interrupted"])
                return
            if message.renderer and not message.tool_uses:  # the copy may lack the end of the text
                copy.log.replace_html({"answer": message.answer_html, "reasoning": message.reasoning_html})
            copy.log.words = len(message.content.split())
            error = message.note if message.state == "failed" else None
            copy.log.finish(message.state, words[f"phase_{message.state}"], error, asdict(message.numbers))
