"""Cache of rendered messages. HTML is generated and stored when an answer ends or a message is first shown."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from notso.web.rendering.budget import Budget, Deadline
from notso.web.rendering.markdown import RENDERER_VERSION, render_markdown
from notso.web.rendering.mathml import PAGE_BYTES, Formula, convert_all
from notso.web.store.protocol import ChatStore, ShownMessage, StoredMessage
from notso.web.turns.prompt import split_at_tool_calls
from notso.web.turns.turn_log import CARD_MARK
from notso.web.turns.turns import Turns
from notso.web.values.errors import StorageError
from notso.web.values.fair_queue import FairQueue

PIECE_SECONDS = 0.1
"""Time after which no further message is added to a batch."""
WAIT_SECONDS = 5.0
"""Messages that are not rendered within this time are shown as plain text for now."""
MATHML_BYTES = 4 * PAGE_BYTES  # maximum memory used by cached MathML and its formulas
FAILED_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Converted:
    mathml: list[str | None]
    size: int  # bytes of memory, including the formulas
    expires: float


class HtmlCache:
    """Adds stored HTML to messages; first renders and stores it if it is missing or outdated."""

    def __init__(self, store: ChatStore, turns: Turns, queue: FairQueue) -> None:
        self._store = store
        self._turns = turns
        self._queue = queue
        self._running: dict[str, asyncio.Task[list[StoredMessage]]] = {}
        self._mathml: dict[tuple[Formula, ...], _Converted] = {}  # least recently used first
        self._mathml_size = 0

    async def path(self, owner: str, path: Sequence[ShownMessage], *, user_messages: bool) -> list[ShownMessage]:
        selected = [each.message for each in path if user_messages or each.message.role == "assistant"]
        rendered = {message.id: message for message in await self.messages(owner, selected)}
        return [replace(each, message=rendered.get(each.message.id, each.message)) for each in path]

    async def messages(self, owner: str, messages: Sequence[StoredMessage]) -> list[StoredMessage]:
        stale = [message for message in messages if _is_stale(message)]
        rendered = await self._render_stale(owner, stale) if stale else {}
        return [self._with_partial_html(rendered.get(each.id, each)) for each in messages]

    async def mathml(self, formulas: tuple[Formula, ...]) -> list[str | None]:
        """Convert a shared page's formulas, or return the cached result. Failures are cached for FAILED_SECONDS."""
        kept = self._mathml.get(formulas)
        if kept is None or kept.expires <= time.monotonic():
            converted = await convert_all(formulas)
            # String lengths would underestimate the memory: strings have overhead, and up to four bytes per character.
            size = sum(map(sys.getsizeof, (formulas, converted, *formulas, *chain(*formulas), *converted)))
            kept = _Converted(converted, size, time.monotonic() + (FAILED_SECONDS if None in converted else math.inf))
        if (earlier := self._mathml.pop(formulas, None)) is not None:
            self._mathml_size -= earlier.size
        self._mathml[formulas] = kept
        self._mathml_size += kept.size
        while self._mathml_size > MATHML_BYTES:
            self._mathml_size -= self._mathml.pop(next(iter(self._mathml))).size
        return kept.mathml

    def _with_partial_html(self, message: StoredMessage) -> StoredMessage:
        # For an answer in progress, use the HTML that has already been sent on its stream.
        turn = self._turns.find(message.generation_id or "") if message.active else None
        if turn is None:
            return message
        answer, reasoning = turn.log.html("answer"), turn.log.html("reasoning")
        return replace(message, answer_html=answer, reasoning_html=reasoning, renderer=RENDERER_VERSION)

    async def _render_stale(self, owner: str, stale: list[StoredMessage]) -> dict[str, StoredMessage]:
        chat_id, rendered = stale[0].chat_id, dict[str, StoredMessage]()
        deadline = time.monotonic() + WAIT_SECONDS
        while stale and (remaining_seconds := deadline - time.monotonic()) > 0:
            work = self._running.get(chat_id) or self._start_rendering(owner, chat_id, stale)
            await asyncio.wait({work}, timeout=remaining_seconds)
            if work.done():
                # Take only the HTML: the task may belong to another page, which loaded the messages at another time. A
                # message that was edited while it was rendered must be rendered again.
                found = {_rendered_parts(each): each for each in work.result()}
                rendered |= {
                    each.id: replace(
                        each, answer_html=html.answer_html, reasoning_html=html.reasoning_html, renderer=html.renderer
                    )
                    for each in stale
                    if (html := found.get(_rendered_parts(each))) is not None
                }
                stale = [each for each in stale if each.id not in rendered]
        return rendered

    def _start_rendering(
        self, owner: str, chat_id: str, stale: list[StoredMessage]
    ) -> asyncio.Task[list[StoredMessage]]:
        # All pages of a chat wait for the same task, which stores its batch even if the pages disconnect.
        work = self._running[chat_id] = asyncio.create_task(self._render_batch(owner, stale))
        work.add_done_callback(lambda _: self._running.pop(chat_id))
        return work

    async def _render_batch(self, owner: str, stale: list[StoredMessage]) -> list[StoredMessage]:
        batch = await self._queue.run(owner, lambda: _render_until_deadline(stale))
        with contextlib.suppress(StorageError):  # without stored HTML, messages are rendered again when they are shown
            await self._store.keep_html(owner, batch)
        return batch


def with_html(message: StoredMessage) -> StoredMessage:
    """Render a message within a time budget. Blocking."""
    budget = Budget()
    answer = CARD_MARK.join(render_markdown(part, budget=budget) for part in split_at_tool_calls(message))
    reasoning = render_markdown(message.reasoning, budget=budget)
    return replace(message, answer_html=answer, reasoning_html=reasoning, renderer=RENDERER_VERSION)


def _render_until_deadline(messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    batch: list[StoredMessage] = []
    deadline = Deadline(PIECE_SECONDS)
    for message in messages:
        batch.append(with_html(message))
        if deadline.has_passed:
            break
    return batch


def _rendered_parts(message: StoredMessage) -> tuple[object, ...]:
    return message.id, message.content, message.reasoning, message.tool_uses


def _is_stale(message: StoredMessage) -> bool:
    return message.renderer != RENDERER_VERSION and not message.active
