"""The first plugin: the tools that come with the program. They are ours, so they run in the server's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notso.web.tools.attachment_reader import ATTACHMENT_READER
from notso.web.tools.calculator import CALCULATOR
from notso.web.tools.chat_search import CHAT_SEARCH
from notso.web.tools.chat_tool import ChatTool
from notso.web.tools.clock import CLOCK
from notso.web.tools.fetch import FETCH
from notso.web.tools.mcp_config import LeftOut


class BuiltInTools:
    """A source of tools that is always there."""

    TOOLS: tuple[ChatTool, ...] = (CALCULATOR, CLOCK, CHAT_SEARCH, ATTACHMENT_READER, FETCH)

    def tools(self) -> Sequence[ChatTool]:
        """Return all of them."""
        return self.TOOLS

    def failures(self) -> Mapping[str, str]:
        """None ever."""
        return {}

    def left_out(self) -> Sequence[LeftOut]:
        """None ever."""
        return ()

    async def ready(self) -> None:
        """They are."""
