"""A chat as one request sees it: read once, and handed down to all that needs to know something of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from notso.web.chat.services import ChatServices
from notso.web.store.protocol import Chat, SettingValue, Shown, ShownChat, StoredMessage, TurnAccepted
from notso.web.turns.chat_settings import ChatSettings, settings_from
from notso.web.values.ids import is_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

NEWEST_MESSAGES = 40
"""What a page of a chat begins with; older ones come as they are scrolled to."""
USUAL_MOST_CHARACTERS = 1 << 23
"""Of a prompt where no model is loaded: 65,536 tokens of 128 bytes."""


@dataclass(frozen=True, slots=True)
class ShownView:
    """A chat as a page shows it: the end of its shown branch, with `earlier` messages above that."""

    chat: Chat
    defaults: Mapping[str, SettingValue]
    path: list[Shown]
    earlier: int
    revision: str

    @property
    def settings(self) -> ChatSettings:
        """What counts in the chat."""
        return settings_from(self.defaults, self.chat.settings)


@dataclass(frozen=True, slots=True)
class ChatView:
    """A chat, its owner's default settings and the end of one of its branches: as much as a prompt can be made of.

    `first_id` is the branch's first message, and names it for the engine: so an emptied chat goes on as another
    conversation. `above` messages were not read, because a summary stands for them
    (`summarized`) or because no prompt has room for them. `revision` says how much a page that is shown this has heard
    of other tabs' doings.
    """

    chat: Chat
    defaults: Mapping[str, SettingValue]
    revision: str
    line: tuple[StoredMessage, ...] = ()
    first_id: str | None = None
    above: int = 0
    summarized: bool = False

    @property
    def settings(self) -> ChatSettings:
        """What counts in the chat."""
        return settings_from(self.defaults, self.chat.settings)

    @property
    def left_out(self) -> int:
        """How many messages no prompt has room for, and no summary stands for."""
        return 0 if self.summarized else self.above

    def with_question(self, question: StoredMessage) -> ChatView:
        """Return the branch with a question at its end."""
        return replace(self, line=(*self.line, question), first_id=self.first_id or question.id)

    def after(self, accepted: TurnAccepted) -> ChatView | None:
        """Return the branch down to the question of a turn that was stored since. None where it must be read again:
        something else was stored meanwhile, or a message above the turn was still being written."""
        question, line = accepted.user_message, self.line
        if any(each.active for each in line):
            return None
        if line and line[-1].id == question.id:
            return replace(self, line=(*line[:-1], question))
        return self.with_question(question) if question.parent_id == (line[-1].id if line else None) else None


def _most_characters(services: ChatServices) -> int:
    """No prompt of more characters fits into the context of a model that is loaded, or usual."""
    known = [each.info.most_prompt_bytes for each in services.shared.engine.loaded() if each.info is not None]
    return max(known, default=0) or USUAL_MOST_CHARACTERS


async def read_branch(services: ChatServices, owner: str, chat_id: str, last: str | None) -> ChatView:
    """Read the branch that ends in the message `last` ('': nothing, None: the chosen branch), as much of it as a prompt
    can be made of. Raises Problem 404, and 409 where the message is not in the chat."""
    view = await read_branch_if_any(services, owner, chat_id, last)
    if view is None:
        raise Problem(404, words["error_unknown_chat"])
    if last and not view.line:
        raise Problem(409, words["error_moved"], moved=True)
    return view


async def read_branch_if_any(services: ChatServices, owner: str, chat_id: str, last: str | None) -> ChatView | None:
    """The same, where there is a chat of that id; its line is empty where the message is not in it."""
    if not is_id(chat_id):
        return None
    revision = services.feed.revision  # before looking: what changes meanwhile is heard of
    most = _most_characters(services)
    found = await services.shared.store.branch(owner, chat_id, last, most_characters=most)
    if found is None:
        return None
    return ChatView(*(found.chat, found.defaults, revision), found.line, found.first_id, found.above, found.summarized)


async def read_turn(
    services: ChatServices,
    owner: str,
    accepted: TurnAccepted,
    *,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView:
    """What a page shows of a chat with a turn that was just stored: the answer as it was then, for what was written
    since comes by its stream. Raises Problem 404."""
    stored = {each.id: each for each in (accepted.user_message, accepted.assistant_message)}
    answer = accepted.assistant_message
    view = await read_shown(services, owner, answer.chat_id, through=answer.id, first=first, limit=limit)
    path = [replace(each, message=stored.get(each.message.id, each.message)) for each in view.path]
    return replace(view, path=path)


async def new_turn(services: ChatServices, owner: str, view: ChatView, accepted: TurnAccepted) -> ShownView:
    """What a page adds when a question was asked at the end of the branch that it shows: the turn alone."""
    question, answer = accepted.user_message, accepted.assistant_message
    above = next((each.id for each in reversed(view.line[:-1]) if each.role == "user"), None)
    if accepted.repeated or (above is None and view.above):
        shown = await read_turn(services, owner, accepted, limit=3)  # with the turn above, which links to it
        return replace(shown, path=[each for each in shown.path if each.message in (question, answer)])
    path = [Shown(question, (question.id,), above), Shown(answer, (answer.id,), question.id)]
    return ShownView(view.chat, view.defaults, path, 0, view.revision)


async def read_shown(
    services: ChatServices,
    owner: str,
    chat_id: str,
    *,
    through: str | None = None,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView:
    """What a page shows of a chat: its newest messages, on the branch that passes `through`, and from the message
    `first` on where that is further up. Raises Problem 404."""
    view = await read_shown_if_any(services, owner, chat_id, through=through, first=first, limit=limit)
    if view is None:
        raise Problem(404, words["error_unknown_chat"])
    return view


async def read_shown_if_any(
    services: ChatServices,
    owner: str,
    chat_id: str,
    *,
    through: str | None = None,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView | None:
    """The same, where there is a chat of that id."""
    if not is_id(chat_id):
        return None
    revision = services.feed.revision
    found = await services.shared.store.shown_chat(owner, chat_id, limit, through=through, first=first)
    return _view_of(found, revision) if found is not None else None


async def read_above(services: ChatServices, owner: str, chat_id: str, message_id: str) -> ShownView:
    """The messages above one that a page begins with, some of them. Raises Problem 404."""
    revision = services.feed.revision
    known = is_id(chat_id) and is_id(message_id)
    found = await services.shared.store.shown_above(owner, chat_id, message_id, NEWEST_MESSAGES) if known else None
    if found is None:
        raise Problem(404, words["error_unknown_page"])
    return _view_of(found, revision)


def _view_of(found: ShownChat, revision: str) -> ShownView:
    return ShownView(found.chat, found.defaults, _on_page(list(found.path), found.earlier), found.earlier, revision)


def _on_page(path: list[Shown], earlier: int) -> list[Shown]:
    """Without a way to a question that is not on the page."""
    head = next((at for at, each in enumerate(path) if each.message.role == "user"), None)
    if earlier and head is not None:
        path[head] = replace(path[head], previous_user_message=None)
    return path
