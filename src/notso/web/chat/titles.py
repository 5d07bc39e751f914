"""Names for chats that the model makes: a setting, off by default, and the last thing an idle engine does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from notso.web.chat.submit import title_of
from notso.web.chat.suggestions import Suggestions
from notso.web.engine.port import Message, Request, RequestOptions
from notso.web.engine.running import RunningRequest, RunningRequests
from notso.web.engine.short_text import whole_text
from notso.web.store.protocol import Chat, ChatStore, StoredMessage
from notso.web.tools.toolbox import Toolbox
from notso.web.turns.chat_settings import ChatSettings, settings_from
from notso.web.turns.prompt import conversation_of, prompt_messages
from notso.web.turns.tab_feed import Feed
from notso.web.turns.turn import Turn
from notso.web.turns.turns import Turns
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.titles")

REQUEST = "Give our conversation a title of two to six words. Write only the title."
MAX_TOKENS = 24
MAX_CHARACTERS = 60
PATIENCE_SECONDS = 60.0
AFTER_SECONDS = 2.0  # suggestions come first: they are on the page, a name is not
LOOK_SECONDS = 0.25

_LABEL = re.compile(r"(?:title|name) ?: ?", re.IGNORECASE)
_DECORATION = " \"'*_`#“”"


class Titles:
    """Names a chat after its first answer, unless a person did. Everything here runs on the event loop."""

    def __init__(
        self,
        requests: RunningRequests,
        turns: Turns,
        suggestions: Suggestions,
        store: ChatStore,
        feed: Feed,
        toolbox: Toolbox,
    ) -> None:
        self._requests = requests
        self._toolbox = toolbox
        self._suggestions = suggestions
        self._store = store
        self._feed = feed
        self._running: RunningRequest | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        turns.at_start.append(lambda turn: self.cancel())

    def cancel(self) -> None:
        """Something else wants the engine: let go."""
        if self._running is not None:
            self._running.stop()

    def consider(self, turn: Turn) -> None:
        """A turn has ended: perhaps its chat wants a name."""
        if turn.message.state == "done" and turn.message.kind == "turn":
            task = asyncio.create_task(self._name(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _name(self, turn: Turn) -> None:
        owner, chat_id = turn.request.options.owner, turn.message.chat_id
        with contextlib.suppress(NotsoError):
            found = await self._store.shown_chat(owner, chat_id, 3)
            if found is None:
                return
            chat, line = found.chat, [shown.message for shown in found.path]
            settings = settings_from(found.defaults, chat.settings)
            is_first = len(line) == 2 and not any(shown.previous or shown.next for shown in found.path)
            if not settings.titles or not is_first or chat.title != title_of(line[0].content):
                return  # it has a name of its own, or is past its first answer
            if not await self._idle():
                return
            title = title_in(await self._ask(owner, chat, line, settings, turn.request) or "")
            now = await self._store.chat(owner, chat_id)
            if title and now is not None and now.title == chat.title:  # nobody named it meanwhile
                await self._store.set_title(owner, chat_id, title)
                self._feed.announce(owner, chat_id, "", turns=False)

    async def _idle(self) -> bool:
        """Wait until nobody needs the engine; False where that takes too long."""
        await asyncio.sleep(AFTER_SECONDS)
        for _ in range(int(PATIENCE_SECONDS / LOOK_SECONDS)):
            if self._suggestions.idle:
                return True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def _ask(
        self, owner: str, chat: Chat, line: Sequence[StoredMessage], settings: ChatSettings, asked: Request
    ) -> str | None:
        messages = prompt_messages(line, settings.system_prompt, keep_thinking=settings.keep_thinking)
        request = Request(
            (*messages, Message("user", REQUEST)),
            replace(settings.sampling, temperature=0.0, max_tokens=MAX_TOKENS, thinking_budget=0),
            RequestOptions(
                thinking=chat.thinking,  # this and the tools as in the chat itself, so that its cached prompt serves
                tools=self._toolbox.definitions(settings.tool_names),
                tool_choice="none",
                date=chat.prompt_date,
                priority="background",
                owner=owner,
                conversation=conversation_of(line),
                adapter=asked.options.adapter,
            ),
            asked.model,
        )

        def started(running: RunningRequest) -> None:
            self._running = running

        return await whole_text(self._requests, request, PATIENCE_SECONDS, started)


def title_in(text: str) -> str:
    """The title in what the model said; '' where it said something else."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    line = " ".join(line.split())
    for _ in range(2):  # decoration may be inside of decoration
        line = line.lstrip(_DECORATION).rstrip(_DECORATION + ".")
        label = _LABEL.match(line)
        line = line[label.end() :] if label else line
    line = line.strip()
    return line if 2 <= len(line) <= MAX_CHARACTERS else ""
