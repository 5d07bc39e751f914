"""List the plugins for the settings page, and the slash commands for the command palette."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notso.plugins.process import PluginProcess, Plugins, entry_names
from notso.web.tools.built_in import BUILT_IN_TOOLS
from notso.web.values.slash_commands import SlashCommand, commands_of

if TYPE_CHECKING:
    from notso.web.tools.mcp_servers import McpServers

BUILT_IN = "notso"
MAX_WORDS_CHARACTERS = 80
_COMMAND = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class PluginRow:
    """A plugin on the settings page. `gives` lists what it provides, by kind. `pages` maps addresses to titles."""

    name: str
    state: str
    failure: str
    printed_lines: int
    gives: Mapping[str, list[str]]
    pages: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    built_in: bool = False


class CommandView:
    def __init__(self, plugins: Plugins, mcp: McpServers | None = None) -> None:
        self._plugins = plugins
        self._mcp = mcp

    def rows(self) -> list[PluginRow]:
        tools = {"tools": [tool.name for tool in BUILT_IN_TOOLS]}
        return [PluginRow(BUILT_IN, "on", "", 0, tools, {}, built_in=True), *map(_row, self._plugins.processes)]

    def commands(self) -> tuple[SlashCommand, ...]:
        """Return the commands of the page, plugins and MCP servers."""
        own = commands_of("page")
        taken = {command.name for command in own}
        added = (
            SlashCommand(
                name,
                str(row["usage"])[:MAX_WORDS_CHARACTERS],
                ("page",),
                "post",
                f"/plugins/{process.name}/commands/{name}",
                "argument",
                ".*",
                str(row["does"])[:MAX_WORDS_CHARACTERS],
            )
            for process, row in self._plugins.entries("slash_commands")
            if _COMMAND.fullmatch(name := str(row["name"])) and name not in taken
        )
        offers = self._mcp.offers() if self._mcp is not None else ()
        offered = (
            SlashCommand(
                each.command,
                each.usage,
                ("page",),
                "offer",
                f"/tools/offers/{each.command}",
                argument=".*",
                said=each.description or each.command,
            )
            for each in offers
        )
        return (*own, *added, *offered)


def _row(process: PluginProcess) -> PluginRow:
    offer = process.offer if process.state == "on" else {}
    gives = {kind: entry_names(offer.get(kind, [])) for kind in ("tools", "logits_processors", "slash_commands")}
    gives["signs_in"] = [process.name] if offer.get("signs_in") else []
    pages = {f"/plugins/{process.name}/pages/{row['path']}": str(row["title"]) for row in offer.get("pages", [])}
    nonempty = {kind: names for kind, names in gives.items() if names}
    return PluginRow(
        process.name, process.state, process.failure, process.printed_lines, nonempty, pages, tuple(process.left_out)
    )
