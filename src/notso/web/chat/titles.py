"""Generate chat titles while the engine is idle, if the user has enabled this in the settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from dataclasses import replace

from notso.web.chat.submit import derive_title
from notso.web.chat.suggestions import Suggestions, generate_text
from notso.web.engine.port import Message, Request, RequestOptions
from notso.web.engine.running import RunningRequest, RunningRequests
from notso.web.store.protocol import Chat, ChatStore, StoredMessage
from notso.web.tools.toolbox import Toolbox
from notso.web.turns.chat_settings import ChatSettings, effective_settings
from notso.web.turns.documents import PromptDocuments, prompt_documents
from notso.web.turns.prompt import cache_conversation_id, prompt_messages
from notso.web.turns.sse import Feed
from notso.web.turns.turn import Turn
from notso.web.turns.turns import Turns
from notso.web.values.errors import NotsoError

logger = logging.getLogger("notso.web.titles")

REQUEST = "Give our conversation a title of two to six words. Write only the title."
MAX_TOKENS = 24
MAX_CHARACTERS = 60
PATIENCE_SECONDS = 60.0
AFTER_SECONDS = 2.0  # delay, so that suggestions, for which the page is already waiting, are generated first

_LABEL = re.compile(r"(?:title|name) ?: ?", re.IGNORECASE)
_DECORATION = " \"'*_`#“”"


class Titles:
    """Sets the titles of chats after their first answer. Runs on the event loop."""

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
        self._running: set[RunningRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        turns.at_start.append(lambda turn: self.cancel())

    def cancel(self) -> None:
        for running in list(self._running):
            running.stop()

    def schedule_if_needed(self, turn: Turn) -> None:
        if turn.message.state == "done" and turn.message.kind == "turn":
            task = asyncio.create_task(self._generate_title(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate_title(self, turn: Turn) -> None:
        owner, chat_id = turn.request.options.owner, turn.message.chat_id
        with contextlib.suppress(NotsoError):
            found = await self._store.shown_chat(owner, chat_id, 3)
            if found is None:
                return
            chat, line = found.chat, [shown.message for shown in found.path]
            settings = effective_settings(found.base, chat)
            is_first = len(line) == 2 and not any(shown.previous or shown.next for shown in found.path)
            if not settings.titles or not is_first or chat.title not in _derived_titles(line[0]):
                return  # titles are disabled, this is not the first answer, or the user has renamed the chat
            engine = self._requests.host.model(turn.request.model).engine
            documents = await prompt_documents(
                self._store, owner, chat.prompt_date, line, engine=engine, project=found.base.project
            )
            messages = await asyncio.to_thread(
                prompt_messages,
                line,
                settings.system_prompt,
                keep_thinking=settings.keep_thinking,
                documents=documents,
            )
            if not await self._suggestions.wait_until_idle(AFTER_SECONDS, PATIENCE_SECONDS):
                return
            text = await self._request_title(
                owner, chat, messages, cache_conversation_id(line), settings, turn.request, documents
            )
            title = parse_title(text or "")
            current = await self._store.chat(owner, chat_id)
            if title and current is not None and current.title == chat.title:  # not renamed in the meantime
                await self._store.update_chat(owner, chat_id, title=title)
                self._feed.announce(owner, chat_id, "", turns=False)

    async def _request_title(
        self,
        owner: str,
        chat: Chat,
        messages: tuple[Message, ...],
        conversation: str | None,
        settings: ChatSettings,
        turn_request: Request,
        documents: PromptDocuments,
    ) -> str | None:
        options = RequestOptions(
            # Thinking and tools are as in the chat, so that the chat's cached prompt can be reused.
            thinking=chat.thinking,
            tools=self._toolbox.definitions(settings.tool_names),
            tool_choice="none",
            date=chat.prompt_date,
            priority="background",
            owner=owner,
            conversation=conversation,
            adapter=turn_request.options.adapter,
        )
        messages = (*messages, Message("user", REQUEST))
        params = replace(settings.sampling, temperature=0.0, max_tokens=MAX_TOKENS, thinking_budget=0)
        request = Request(messages, params, documents.options(messages, options), turn_request.model)

        started_requests: list[RunningRequest] = []

        def on_start(running: RunningRequest) -> None:
            started_requests.append(running)
            self._running.add(running)

        try:
            return await generate_text(self._requests, request, PATIENCE_SECONDS, on_start)
        finally:
            self._running.difference_update(started_requests)


def _derived_titles(question: StoredMessage) -> list[str]:
    # A chat that begins with attachments alone is named after one of them.
    names = [each.name for each in question.attachments] if not question.content else []
    return [derive_title(each) for each in (question.content, *names)]


def parse_title(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")
    line = " ".join(line.split())
    for _ in range(2):  # decoration may enclose the label and also the title, as in **Title: "…"**
        line = line.lstrip(_DECORATION).rstrip(_DECORATION + ".")
        label = _LABEL.match(line)
        line = line[label.end() :] if label else line
    line = line.strip()
    return line if 2 <= len(line) <= MAX_CHARACTERS else ""
