"""Load read-only views of a chat, once per request.

A branch (`line`) is the path of messages from the start of a chat to one message; a chat with edited questions or
regenerated answers has several. The feed notifies open pages of changes, and a revision is a position in the feed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from notso.web.chat.services import ChatServices, ChatUser
from notso.web.store.protocol import (
    Chat,
    ChatDefaults,
    SettingValue,
    ShownChat,
    ShownMessage,
    StoredMessage,
    TurnAccepted,
)
from notso.web.turns.chat_settings import ChatSettings, effective_settings, with_permissions_of
from notso.web.values.errors import Problem
from notso.web.values.ids import is_id
from notso.web.values.wording import words

NEWEST_MESSAGES = 40
"""Number of messages shown when a chat page opens; older ones are loaded when the user scrolls up."""
USUAL_MOST_CHARACTERS = 1 << 23
"""Prompt size limit in characters while no model is loaded: enough for 65,536 tokens of 128 characters."""


T = TypeVar("T")


def require(found: T | None, sentence: str = "", status: int = 404) -> T:
    """Return `found`. Raises Problem if it is None or False."""
    if found is None or found is False:
        raise Problem(status, sentence or words["error_unknown_page"])
    return found


@dataclass(frozen=True, slots=True)
class _View:
    chat: Chat
    base: ChatDefaults
    revision: str  # the view includes all changes up to this position in the feed

    @property
    def settings(self) -> ChatSettings:
        return effective_settings(self.base, self.chat)


@dataclass(frozen=True, slots=True)
class ShownView(_View):
    """The part of a chat that a page shows. `earlier`: number of older messages."""

    path: list[ShownMessage]
    earlier: int


@dataclass(frozen=True, slots=True)
class ChatView(_View):
    """Data for prompts: a chat, its defaults and the end of one branch."""

    line: tuple[StoredMessage, ...] = ()
    # Id of the branch's first message, which identifies the conversation in the prompt cache. The chat's id is not used
    # for this, because a cleared chat keeps its id.
    first_id: str | None = None
    above: int = 0  # number of earlier messages that were not loaded: they are summarized, or do not fit in any prompt
    summarized: bool = False  # whether `line` starts with a summary of these earlier messages

    @property
    def left_out(self) -> int:
        return 0 if self.summarized else self.above

    def with_settings(self, settings: Mapping[str, SettingValue] | None) -> ChatView:
        """Return the view with these settings in place of the chat's (None: unchanged). Tool permissions
        remain those of the chat."""
        if settings is None:
            return self
        return replace(self, chat=replace(self.chat, settings=with_permissions_of(self.chat.settings, settings)))

    def with_question(self, question: StoredMessage) -> ChatView:
        return replace(self, line=(*self.line, question), first_id=self.first_id or question.id)

    def with_accepted(self, accepted: TurnAccepted) -> ChatView | None:
        """Return a view that ends in a stored turn's question, or None if the branch must be loaded again."""
        question, line = accepted.user_message, self.line
        # The text of a message that was unfinished when this view was loaded may be outdated.
        if any(each.active for each in line):
            return None
        if line and line[-1].id == question.id:
            return replace(self, line=(*line[:-1], question))
        return self.with_question(question) if question.parent_id == (line[-1].id if line else None) else None


def _most_characters(services: ChatServices) -> int:
    limits = [each.info.most_prompt_bytes for each in services.shared.engine.loaded() if each.info is not None]
    return max(limits, default=0) or USUAL_MOST_CHARACTERS


async def read_branch(user: ChatUser, chat_id: str, last: str | None) -> ChatView:
    """Load as much of the branch ending in `last` as fits in a prompt.

    last: a message id; '' for an empty branch; None for the branch chosen on the page. Raises Problem: 404 for an
    unknown chat, 409 if the message is not in the chat.
    """
    revision = user.services.feed.revision  # read before the chat, so that a concurrent change is still announced
    most = _most_characters(user.services)
    branch = await user.store.branch(user.owner, chat_id, last, most_characters=most) if is_id(chat_id) else None
    found = require(branch, words["error_unknown_chat"])
    if last and not found.line:
        raise Problem(409, words["error_moved"], moved=True)
    return ChatView(found.chat, found.base, revision, found.line, found.first_id, found.above, found.summarized)


async def read_branch_above(user: ChatUser, message: StoredMessage) -> ChatView:
    """Load the branch that ends before a message. Raises the same errors as `read_branch`."""
    return await read_branch(user, message.chat_id, message.parent_id or "")


async def read_turn(
    user: ChatUser,
    accepted: TurnAccepted,
    *,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView:
    """Load a ShownView of the branch that contains a new turn. Raises Problem (404)."""
    stored = {each.id: each for each in (accepted.user_message, accepted.assistant_message)}
    answer = accepted.assistant_message
    view = await read_shown(user, answer.chat_id, through=answer.id, first=first, limit=limit)
    # Show the answer as it was when the turn was stored; later text arrives on the answer's stream.
    path = [replace(each, message=stored.get(each.message.id, each.message)) for each in view.path]
    return replace(view, path=path)


async def read_new_turn(user: ChatUser, view: ChatView, accepted: TurnAccepted) -> ShownView:
    question, answer = accepted.user_message, accepted.assistant_message
    previous_question = next((each.id for each in reversed(view.line[:-1]) if each.role == "user"), None)
    if accepted.repeated or (previous_question is None and view.above):
        shown = await read_turn(user, accepted, limit=3)  # also loads the previous turn, to link to its question
        return replace(shown, path=[each for each in shown.path if each.message in (question, answer)])
    path = [ShownMessage(question, (question.id,), previous_question), ShownMessage(answer, (answer.id,), question.id)]
    return ShownView(view.chat, view.base, view.revision, path, 0)


async def read_shown(
    user: ChatUser,
    chat_id: str,
    *,
    through: str | None = None,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView:
    """Load the newest `limit` messages of the branch that contains `through`, and older ones back to `first`.

    Raises Problem (404).
    """
    revision, store = user.services.feed.revision, user.store
    found = await store.shown_chat(user.owner, chat_id, limit, through=through, first=first) if is_id(chat_id) else None
    return _to_view(require(found, words["error_unknown_chat"]), revision)


async def read_earlier(user: ChatUser, chat_id: str, message_id: str) -> ShownView:
    """Load the messages before `message_id`. Raises Problem (404)."""
    revision = user.services.feed.revision
    is_valid = is_id(chat_id) and is_id(message_id)
    found = await user.store.shown_before(user.owner, chat_id, message_id, NEWEST_MESSAGES) if is_valid else None
    return _to_view(require(found), revision)


def _to_view(found: ShownChat, revision: str) -> ShownView:
    return ShownView(found.chat, found.base, revision, _unlink_missing(list(found.path), found.earlier), found.earlier)


def _unlink_missing(path: list[ShownMessage], earlier: int) -> list[ShownMessage]:
    first_question = next((at for at, each in enumerate(path) if each.message.role == "user"), None)
    if earlier and first_question is not None:
        path[first_question] = replace(path[first_question], previous_user_message=None)
    return path
