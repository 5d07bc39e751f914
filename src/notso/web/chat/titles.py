"""Generate chat titles while the engine is idle, if the user has enabled this in the settings."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

from notso.web.chat.chat_view import ChatView
from notso.web.chat.services import ChatServices, ChatUser
from notso.web.chat.submit import derive_title, follow_up_request
from notso.web.chat.suggestions import IdleRequests
from notso.web.engine.model_names import ModelChoice
from notso.web.store.protocol import StoredMessage
from notso.web.turns.turn import Turn
from notso.web.values.errors import NotsoError

REQUEST = "Give our conversation a title of two to six words. Write only the title."
MAX_TOKENS = 24
MAX_CHARACTERS = 60
PATIENCE_SECONDS = 60.0
AFTER_SECONDS = 2.0  # delay, so that suggestions, for which the page is already waiting, are generated first

_LABEL = re.compile(r"(?:title|name) ?: ?", re.IGNORECASE)
_DECORATION = " \"'*_`#“”"


class Titles:
    """Sets the titles of chats after their first answer. Runs on the event loop."""

    def __init__(self, services: ChatServices) -> None:
        self._services = services
        self._requests = IdleRequests(services.shared.requests, services.turns)

    def schedule_if_needed(self, turn: Turn) -> None:
        if turn.message.state == "done" and turn.message.kind == "turn":
            self._requests.start(self._generate_title(turn))

    async def _generate_title(self, turn: Turn) -> None:
        services, store = self._services, self._services.shared.store
        owner, chat_id = turn.request.options.owner, turn.message.chat_id
        with contextlib.suppress(NotsoError):
            found = await store.shown_chat(owner, chat_id, 3)
            if found is None:
                return
            line = tuple(shown.message for shown in found.path)
            is_first = len(line) == 2 and not any(shown.previous or shown.next for shown in found.path)
            if not is_first or found.chat.title not in _derived_titles(line[0]):
                return  # this is not the first answer, or the user has renamed the chat
            view = ChatView(found.chat, found.base, services.feed.revision, line, line[0].id)
            if not view.settings.titles:
                return
            choice = ModelChoice(turn.request.model, turn.request.options.adapter)
            params = replace(view.settings.sampling, temperature=0.0, max_tokens=MAX_TOKENS, thinking_budget=0)
            request = await follow_up_request(ChatUser(services, owner), view, choice, REQUEST, params)
            if not await self._requests.wait_until_idle(AFTER_SECONDS, PATIENCE_SECONDS):
                return
            title = parse_title(await self._requests.generate(request, PATIENCE_SECONDS) or "")
            current = await store.chat(owner, chat_id)
            if title and current is not None and current.title == view.chat.title:
                await store.update_chat(owner, chat_id, title=title)
                services.feed.announce(owner, chat_id, "", turns=False)


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
