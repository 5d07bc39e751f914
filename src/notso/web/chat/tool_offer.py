"""Which tools a chat may use, which of them without asking, and what of the chat they may know."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from notso.web.chat.services import ChatServices
from notso.web.store.protocol import Chat, SettingValue, StoredMessage
from notso.web.tools.chat_tool import Surroundings
from notso.web.turns.chat_settings import NO_LIMIT, ChatSettings
from notso.web.turns.tool_calls import ToolOffer
from notso.web.values.errors import StorageError

logger = logging.getLogger("notso.web.tools")

ALLOWED = "tools_allowed"
"""In a chat's settings: the tools it may use without asking. It is no setting that a file could bring along."""


def offer_in(
    services: ChatServices, owner: str, chat: Chat, settings: ChatSettings, line: Sequence[StoredMessage]
) -> ToolOffer | None:
    """What the model may call when it answers after `line`; None for nothing."""
    tools = services.toolbox.chosen(settings.tool_names)
    if not tools:
        return None
    attachments = tuple(each for message in line for each in message.attachments)

    async def grant(name: str) -> None:
        await _grant(services, owner, chat.id, name)

    return ToolOffer(tools, Surroundings(owner, chat.id, services.shared.store, attachments), allowed_in(chat), grant)


def allowed_in(chat: Chat | None) -> set[str]:
    """The tools that need no asking in this chat."""
    return set(str(chat.settings.get(ALLOWED, "")).split()) if chat is not None else set()


def with_tools(
    settings: Mapping[str, SettingValue], names: Iterable[str], *, ask_again: bool = False
) -> dict[str, SettingValue]:
    """A chat's settings with other tools. Permission goes with a tool that is switched off, or on request."""
    chosen = list(names)
    changed = dict(settings) | {"tools": " ".join(chosen) or NO_LIMIT}
    kept = [] if ask_again else [name for name in str(settings.get(ALLOWED, "")).split() if name in chosen]
    changed.pop(ALLOWED, None)
    return changed | ({ALLOWED: " ".join(kept)} if kept else {})


async def _grant(services: ChatServices, owner: str, chat_id: str, name: str) -> None:
    try:
        chat = await services.shared.store.chat(owner, chat_id)
        if chat is not None:
            allowed = " ".join(sorted(allowed_in(chat) | {name}))
            await services.shared.store.set_settings(owner, chat_id, dict(chat.settings) | {ALLOWED: allowed})
    except StorageError as error:
        logger.warning("a permission was not kept: %s", error)
