"""Which tools a chat may use, which of them without asking, and what of the chat they may know."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from notso.web.chat.chat_view import ChatView
from notso.web.chat.services import ChatServices
from notso.web.store.protocol import Chat, SettingValue
from notso.web.tools.chat_tool import ChatTool, Surroundings
from notso.web.turns.chat_settings import NO_LIMIT
from notso.web.turns.tool_calls import ToolOffer
from notso.web.values.errors import StorageError

logger = logging.getLogger("notso.web.tools")

ALLOWED = "tools_allowed"
"""In a chat's settings: the tools it may use without asking, each as `name=digest`. It is no setting that a file could
bring along."""


async def offer_in(services: ChatServices, owner: str, view: ChatView) -> ToolOffer | None:
    """What the model may call when it answers at the end of a branch; None for nothing."""
    chat, tools = view.chat, services.toolbox.chosen(view.settings.tool_names)
    if not tools:
        return None
    attachments = tuple(each for message in view.line for each in message.attachments)
    if view.above:
        above = await services.shared.store.attachments_above(owner, chat.id, view.line[0].id)
        attachments = (*above, *attachments)

    async def grant(tool: ChatTool) -> None:
        await _grant(services, owner, chat.id, tool)

    return ToolOffer(tools, Surroundings(owner, chat.id, services.shared.store, attachments), allowed_in(chat), grant)


def allowed_in(chat: Chat | None) -> set[str]:
    """The digests of the tools that need no asking in this chat."""
    return {digest for _, digest in _allowed(chat.settings)} if chat is not None else set()


def with_tools(
    settings: Mapping[str, SettingValue], names: Iterable[str], *, ask_again: bool = False
) -> dict[str, SettingValue]:
    """A chat's settings with other tools. Permission goes with a tool that is switched off, or on request."""
    chosen = list(names)
    changed = dict(settings) | {"tools": " ".join(chosen) or NO_LIMIT}
    kept = [] if ask_again else [each for each in _allowed(settings) if each[0] in chosen]
    changed.pop(ALLOWED, None)
    return changed | ({ALLOWED: " ".join(map("=".join, kept))} if kept else {})


def _allowed(settings: Mapping[str, SettingValue]) -> list[tuple[str, str]]:
    """Names and digests. What an older release allowed has no digest, and is asked about again."""
    pairs = (each.rpartition("=") for each in str(settings.get(ALLOWED, "")).split())
    return [(name, digest) for name, _, digest in pairs if name]


async def _grant(services: ChatServices, owner: str, chat_id: str, tool: ChatTool) -> None:
    try:
        chat = await services.shared.store.chat(owner, chat_id)
        if chat is not None:
            others = (each for each in _allowed(chat.settings) if each[0] != tool.name)
            allowed = " ".join(map("=".join, sorted([*others, (tool.name, tool.digest)])))
            await services.shared.store.set_settings(owner, chat_id, dict(chat.settings) | {ALLOWED: allowed})
    except StorageError as error:
        logger.warning("a permission was not kept: %s", error)
