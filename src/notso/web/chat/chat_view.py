"""Read-only views of a chat, read once per request and passed to everything that needs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from notso.web.chat.services import ChatServices
from notso.web.store.protocol import Chat, ChatBase, Shown, ShownChat, StoredMessage, TurnAccepted
from notso.web.turns.chat_settings import ChatSettings, settings_in_chat
from notso.web.values.errors import Problem
from notso.web.values.ids import is_id
from notso.web.values.wording import words

NEWEST_MESSAGES = 40
"""Messages on a chat page at first; older ones load on scrolling."""
USUAL_MOST_CHARACTERS = 1 << 23
"""Prompt limit while no model is loaded: 65,536 tokens of 128 bytes."""


@dataclass(frozen=True, slots=True)
class ShownView:
    """A chat as a page shows it, below `earlier` hidden messages."""

    chat: Chat
    base: ChatBase
    path: list[Shown]
    earlier: int
    revision: str

    @property
    def settings(self) -> ChatSettings:
        return settings_in_chat(self.base, self.chat)


@dataclass(frozen=True, slots=True)
class ChatView:
    """A chat, what it starts from and the end of one branch: the source of a prompt."""

    chat: Chat
    base: ChatBase
    revision: str  # feed position that the view includes
    line: tuple[StoredMessage, ...] = ()
    # Not the chat's id: an emptied chat continues as another conversation.
    first_id: str | None = None
    above: int = 0  # not read: a summary replaces them (`summarized`) or no prompt has room
    summarized: bool = False

    @property
    def settings(self) -> ChatSettings:
        return settings_in_chat(self.base, self.chat)

    @property
    def left_out(self) -> int:
        return 0 if self.summarized else self.above

    def with_question(self, question: StoredMessage) -> ChatView:
        return replace(self, line=(*self.line, question), first_id=self.first_id or question.id)

    def after(self, accepted: TurnAccepted) -> ChatView | None:
        """Return the branch down to a stored turn's question; None: read it again."""
        question, line = accepted.user_message, self.line
        # A message above the turn was still being written: its text is outdated here.
        if any(each.active for each in line):
            return None
        if line and line[-1].id == question.id:
            return replace(self, line=(*line[:-1], question))
        return self.with_question(question) if question.parent_id == (line[-1].id if line else None) else None


def _most_characters(services: ChatServices) -> int:
    known = [each.info.most_prompt_bytes for each in services.shared.engine.loaded() if each.info is not None]
    return max(known, default=0) or USUAL_MOST_CHARACTERS


async def read_branch(services: ChatServices, owner: str, chat_id: str, last: str | None) -> ChatView:
    """Read as much of the branch ending in `last` ('': empty, None: the chosen one) as fits into a prompt.

    Raises Problem 404, and 409 if the message is not in the chat.
    """
    view = await read_branch_if_any(services, owner, chat_id, last)
    if view is None:
        raise Problem(404, words["error_unknown_chat"])
    if last and not view.line:
        raise Problem(409, words["error_moved"], moved=True)
    return view


async def read_branch_if_any(services: ChatServices, owner: str, chat_id: str, last: str | None) -> ChatView | None:
    """Like read_branch; None for an unknown chat, no line for a missing message."""
    if not is_id(chat_id):
        return None
    revision = services.feed.revision  # before reading, so that later changes are announced
    most = _most_characters(services)
    found = await services.shared.store.branch(owner, chat_id, last, most_characters=most)
    if found is None:
        return None
    return ChatView(found.chat, found.base, revision, found.line, found.first_id, found.above, found.summarized)


async def read_turn(
    services: ChatServices,
    owner: str,
    accepted: TurnAccepted,
    *,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView:
    """Read the page view of a newly stored turn. Raises Problem 404."""
    stored = {each.id: each for each in (accepted.user_message, accepted.assistant_message)}
    answer = accepted.assistant_message
    view = await read_shown(services, owner, answer.chat_id, through=answer.id, first=first, limit=limit)
    # The answer as it was stored: text written since then arrives by its stream.
    path = [replace(each, message=stored.get(each.message.id, each.message)) for each in view.path]
    return replace(view, path=path)


async def new_turn(services: ChatServices, owner: str, view: ChatView, accepted: TurnAccepted) -> ShownView:
    question, answer = accepted.user_message, accepted.assistant_message
    above = next((each.id for each in reversed(view.line[:-1]) if each.role == "user"), None)
    if accepted.repeated or (above is None and view.above):
        shown = await read_turn(services, owner, accepted, limit=3)  # includes the turn above, which links to this one
        return replace(shown, path=[each for each in shown.path if each.message in (question, answer)])
    path = [Shown(question, (question.id,), above), Shown(answer, (answer.id,), question.id)]
    return ShownView(view.chat, view.base, path, 0, view.revision)


async def read_shown(
    services: ChatServices,
    owner: str,
    chat_id: str,
    *,
    through: str | None = None,
    first: str | None = None,
    limit: int = NEWEST_MESSAGES,
) -> ShownView:
    """Read the newest messages on the branch through `through`, or those from `first` on. Raises Problem 404."""
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
    """Like read_shown; None for an unknown chat."""
    if not is_id(chat_id):
        return None
    revision = services.feed.revision
    found = await services.shared.store.shown_chat(owner, chat_id, limit, through=through, first=first)
    return _view_of(found, revision) if found is not None else None


async def read_above(services: ChatServices, owner: str, chat_id: str, message_id: str) -> ShownView:
    """Read messages above one. Raises Problem 404."""
    revision = services.feed.revision
    known = is_id(chat_id) and is_id(message_id)
    found = await services.shared.store.shown_above(owner, chat_id, message_id, NEWEST_MESSAGES) if known else None
    if found is None:
        raise Problem(404, words["error_unknown_page"])
    return _view_of(found, revision)


def _view_of(found: ShownChat, revision: str) -> ShownView:
    return ShownView(found.chat, found.base, _on_page(list(found.path), found.earlier), found.earlier, revision)


def _on_page(path: list[Shown], earlier: int) -> list[Shown]:
    head = next((at for at, each in enumerate(path) if each.message.role == "user"), None)
    if earlier and head is not None:
        # The previous question is not on the page, so there is nothing to link to.
        path[head] = replace(path[head], previous_user_message=None)
    return path
