"""A chat as one request sees it: read once, and handed down to all that needs to know something of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from notso.web.chat.services import ChatServices
from notso.web.store.protocol import Chat, SettingValue, Shown, ShownChat, StoredMessage, TurnAccepted
from notso.web.store.tree import branch, end_of, line_to, shown_path
from notso.web.turns.chat_settings import ChatSettings, settings_from
from notso.web.values.ids import is_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

NEWEST_MESSAGES = 40
"""What a page of a chat begins with; older ones come as they are scrolled to."""


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
    """A chat, its owner's default settings and its messages of all branches, oldest first.

    `revision` says how much a page that is shown this has heard of other tabs' doings.
    """

    chat: Chat
    defaults: Mapping[str, SettingValue]
    messages: tuple[StoredMessage, ...]
    revision: str

    @property
    def settings(self) -> ChatSettings:
        """What counts in the chat."""
        return settings_from(self.defaults, self.chat.settings)

    def message(self, message_id: str) -> StoredMessage:
        """A message of the chat. Raises Problem 404."""
        found = next((each for each in self.messages if each.id == message_id), None)
        if found is None:
            raise Problem(404, words["error_unknown_page"])
        return found

    def path(self, through: str | None = None) -> list[Shown]:
        """The shown branch; through a given message where one is named."""
        return shown_path(self.messages, self.chat.chosen_root, through)

    def shown(self, through: str | None = None, first: str | None = None) -> ShownView:
        """What a page shows of it: see `read_shown`."""
        path, earlier = end_of(self.path(through), NEWEST_MESSAGES, first)
        return ShownView(self.chat, self.defaults, _on_page(path, earlier), earlier, self.revision)

    def line(self, instead_of: str | None = None, last: str | None = None) -> list[StoredMessage]:
        """What a new question follows: the branch down to `last` ('': nothing, None: the chosen branch), or what the
        question `instead_of` follows. Raises Problem 409 where `last` is not in the chat."""
        if instead_of is not None:
            return line_to(self.messages, instead_of)[:-1]
        if last is None:
            return branch(self.messages, self.chat.chosen_root)
        if last and not any(each.id == last for each in self.messages):
            raise Problem(409, words["error_moved"], moved=True)
        return line_to(self.messages, last)

    def passing(self, message_id: str, last: str | None) -> str:
        """The end of the branch that a page shows, where it passes this message; else the message."""
        return last if last and any(each.id == message_id for each in self.line_to(last)) else message_id

    def line_to(self, message_id: str) -> list[StoredMessage]:
        """The messages from the first down to this one."""
        return line_to(self.messages, message_id)

    def after(self, accepted: TurnAccepted) -> ChatView | None:
        """The chat with a turn that was stored since. None where it must be read again: something else was stored
        meanwhile, or a message above the turn was still being written."""
        user_message, assistant_message = accepted.user_message, accepted.assistant_message
        stored = {user_message.id: user_message, assistant_message.id: assistant_message}
        before = [each for each in self.messages if each.id not in stored]
        line = line_to([*before, user_message], user_message.id)
        is_whole = line[0].parent_id is None and not any(each.active for each in line)
        if accepted.repeated or not is_whole:
            return None
        kept = [stored.pop(each.id, each) for each in self.messages]
        return replace(self, messages=(*kept, *stored.values()))


async def read_chat(services: ChatServices, owner: str, chat_id: str) -> ChatView:
    """The chat with all its messages. Raises Problem 404."""
    view = await read_chat_if_any(services, owner, chat_id)
    if view is None:
        raise Problem(404, words["error_unknown_chat"])
    return view


async def read_chat_if_any(services: ChatServices, owner: str, chat_id: str) -> ChatView | None:
    """The chat with all its messages, where there is one of that id."""
    revision = services.feed.revision  # before looking: what changes meanwhile is heard of
    found = await services.shared.store.whole_chat(owner, chat_id) if is_id(chat_id) else None
    return ChatView(found.chat, found.defaults, found.messages, revision) if found is not None else None


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
