"""Compaction: while the engine is idle, a summary replaces a chat's older messages before its context is full.

An optional setting. The card is the one of /summarize, and removing it restores what the model reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from notso.web.chat.chat_view import read_branch
from notso.web.chat.context_gauge import WARN_PERCENT
from notso.web.chat.services import ChatServices, models_of
from notso.web.chat.submit import new_summary, summary_request
from notso.web.chat.suggestions import whole_text
from notso.web.engine.model_names import chosen_model
from notso.web.engine.port import Usage
from notso.web.engine.running import RunningRequest
from notso.web.store.protocol import NewMessage, TurnAccepted
from notso.web.turns.turn import Turn
from notso.web.values.errors import NotsoError, Problem
from notso.web.values.ids import new_id

AFTER_SECONDS = 5.0  # titles and suggestions go first
PATIENCE_SECONDS = 300.0


class Compaction:
    """Summarizes chats whose last answer ended near the limit, on the event loop. A question interrupts it."""

    def __init__(self, services: ChatServices) -> None:
        self._services = services
        self._running: set[RunningRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        services.turns.at_start.append(lambda turn: self._cancel())

    def consider(self, turn: Turn, usage: Usage | None) -> None:
        """Summarize the chat of an ended turn if it is nearly full and its settings ask for that."""
        engine = self._services.shared.engine.model(turn.request.model).engine
        if usage is None or engine is None or (turn.message.kind, turn.message.state) != ("turn", "done"):
            return
        if 100 * (usage.prompt_tokens + usage.completion_tokens) >= WARN_PERCENT * engine.info.context_of(
            turn.request.options
        ):
            task = asyncio.create_task(self._compact(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _cancel(self) -> None:
        for running in list(self._running):
            running.stop()

    async def _compact(self, turn: Turn) -> None:
        services, owner, last = self._services, turn.request.options.owner, turn.message
        begun: list[RunningRequest] = []

        def started(running: RunningRequest) -> None:
            begun.append(running)
            self._running.add(running)

        with contextlib.suppress(NotsoError, Problem):
            view = await read_branch(services, owner, last.chat_id, last.id)
            if view.settings.compaction != "automatic":
                return
            if not await services.suggestions.until_idle(AFTER_SECONDS, PATIENCE_SECONDS):
                return
            choice = await chosen_model(*models_of(services), view.settings.model)
            request = await summary_request(services, owner, view, choice)
            request = replace(request, options=replace(request.options, priority="background"))
            try:
                text = await whole_text(services.shared.requests, request, PATIENCE_SECONDS, started)
            finally:
                self._running.difference_update(begun)
            if not text or not text.strip():
                return
            summary = replace(new_summary(view.chat), content=text.strip(), state="done", generation_id=None)
            stored = await services.shared.store.add_message(owner, NewMessage(summary, last.id, new_id()))
            if isinstance(stored, TurnAccepted):  # else the chat has continued, or was deleted
                services.feed.announce(owner, last.chat_id, "")
