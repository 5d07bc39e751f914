"""Tools of plugins; each call runs in the plugin's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from notso.plugins.errors import PluginError
from notso.plugins.plugin_set import Plugins
from notso.plugins.process import SEND_SECONDS, PluginProcess
from notso.web.tools.chat_tool import CHANGED, ChatTool, Surroundings
from notso.web.tools.mcp_config import LeftOut
from notso.web.values.child_work import call_plugin
from notso.web.values.errors import ToolError
from notso.web.values.visible_text import visible_line

MOST_SECONDS = 60.0
MAX_DESCRIPTION_CHARACTERS = 600


class PluginTools:
    """The tools of enabled plugins."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins

    async def ready(self) -> None:
        """Wait until each plugin is loaded or has failed."""
        await asyncio.to_thread(self._plugins.wait)

    def failures(self) -> Mapping[str, str]:
        """Return the plugins that are off, with reasons."""
        return {each.name: each.failure for each in self._plugins.processes if each.failure}

    def left_out(self) -> Sequence[LeftOut]:
        """Return nothing: a plugin with an unusable offer is off."""
        return ()

    def tools(self) -> Sequence[ChatTool]:
        """Return the current tools."""
        return [_tool(process, row) for process, row in self._plugins.given("tools")]


def _tool(process: PluginProcess, row: Mapping[str, Any]) -> ChatTool:
    seconds = min(float(row["seconds"]), MOST_SECONDS)
    description = visible_line(str(row["description"]), MAX_DESCRIPTION_CHARACTERS)

    async def run(arguments: Mapping[str, Any], surroundings: Surroundings) -> str:
        now = (_tool(process, each) for each in process.offer.get("tools", []) if each["name"] == tool.name)
        if any(each.digest != tool.digest for each in now):
            raise ToolError(CHANGED)
        texts = {each.name: each.text for each in surroundings.attachments}
        called_in = {"owner": surroundings.owner, "chat_id": surroundings.chat_id, "attachments": texts}
        given = {"name": tool.name, "arguments": arguments, "called_in": called_in}
        try:
            return str(await call_plugin(process, "tool", given, f"tool {tool.name}", seconds))
        except PluginError as error:
            raise ToolError(str(error)) from None

    # The plugin is switched off before the toolbox's timeout.
    tool = ChatTool(str(row["name"]), description, row["parameters"], run, process.name, seconds + 2 * SEND_SECONDS)
    return tool
