"""A chat as one request sees it: read once, and handed down to all that needs to know something of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from notso.web.chat.services import ChatServices
from notso.web.store.protocol import Chat, SettingValue, StoredMessage, TurnAccepted
from notso.web.store.tree import Shown, branch, line_to, shown_path
from notso.web.turns.chat_settings import ChatSettings, settings_from
from notso.web.values.ids import is_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words


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
