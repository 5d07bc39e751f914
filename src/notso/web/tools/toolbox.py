"""Look up tools by name, and call them with a timeout and a size limit for results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from notso.plugins.errors import PluginError
from notso.plugins.process import SEND_SECONDS, PluginProcess, Plugins
from notso.smollm3 import Tool
from notso.web.tools.built_in import BUILT_IN_TOOLS
from notso.web.tools.chat_tool import CHANGED, ChatTool, ToolContext, check_arguments
from notso.web.tools.elicitation import CANCELLED, Ask, Elicitation, Reply
from notso.web.tools.mcp_config import SkippedItem, read_mcp_config
from notso.web.values.child_work import call_plugin
from notso.web.values.errors import NotsoError, ToolError, require_extra
from notso.web.values.visible_text import sanitize_line

if TYPE_CHECKING:
    from notso.web.tools.mcp_servers import McpServers

MOST_SECONDS = 60.0
MAX_DESCRIPTION_CHARACTERS = 600


class PluginTools:
    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins

    async def ready(self) -> None:
        await asyncio.to_thread(self._plugins.wait)

    def failures(self) -> Mapping[str, str]:
        return {each.name: each.failure for each in self._plugins.processes if each.failure}

    def left_out(self) -> Sequence[SkippedItem]:
        # Unusable tools of plugins are listed in PluginProcess.left_out, which the page shows with the plugin.
        return ()

    def tools(self) -> Sequence[ChatTool]:
        return [_tool(process, row) for process, row in self._plugins.entries("tools")]


def _tool(process: PluginProcess, row: Mapping[str, Any]) -> ChatTool:
    seconds = min(float(row["seconds"]), MOST_SECONDS)
    description = sanitize_line(str(row["description"]), MAX_DESCRIPTION_CHARACTERS)

    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        current = (_tool(process, each) for each in process.offer.get("tools", []) if each["name"] == tool.name)
        if any(each.digest != tool.digest for each in current):
            raise ToolError(CHANGED)
        attachments = {each.name: each.text for each in context.attachments}
        called_in = {"owner": context.owner, "chat_id": context.chat_id, "attachments": attachments}
        request = {"name": tool.name, "arguments": arguments, "called_in": called_in}
        try:
            return str(await call_plugin(process, "tool", request, f"tool {tool.name}", seconds))
        except PluginError as error:
            raise ToolError(str(error)) from None

    # A call that exceeds `seconds` disables the plugin. The timeout in `use` is longer, so `seconds` expires first.
    tool = ChatTool(str(row["name"]), description, row["parameters"], run, process.name, seconds + 2 * SEND_SECONDS)
    return tool


logger = logging.getLogger("notso.web.tools")

MAX_RESULT_CHARACTERS = 8_000


@dataclass(frozen=True, slots=True)
class ToolResult:
    state: Literal["done", "failed"]
    text: str  # for the model
    duration_ms: float = 0.0


class ToolSource(Protocol):
    """Source of tools: plugins or MCP servers."""

    def tools(self) -> Sequence[ChatTool]: ...

    def failures(self) -> Mapping[str, str]:
        """Return the plugins or servers that are not running, with the reasons."""

    def left_out(self) -> Sequence[SkippedItem]:
        """Return the skipped parts of a configuration, and unusable tools."""

    async def ready(self) -> None:
        """Wait until `tools` is complete."""


class Toolbox:
    """The built-in tools and those of `others`. Of several tools with the same name, the first one is used."""

    def __init__(self, *others: ToolSource) -> None:
        self._sources = others

    async def ready(self, names: Iterable[str] | None = None) -> None:
        if names is None or set(names) - {tool.name for tool in BUILT_IN_TOOLS}:
            await asyncio.gather(*(source.ready() for source in self._sources))

    def failures(self) -> Mapping[str, str]:
        return {name: why for source in self._sources for name, why in source.failures().items()}

    def left_out(self) -> list[SkippedItem]:
        return [each for source in self._sources for each in source.left_out()]

    def all(self) -> tuple[ChatTool, ...]:
        found = {tool.name: tool for tool in BUILT_IN_TOOLS}
        for source in self._sources:
            for tool in source.tools():
                found.setdefault(tool.name, tool)
        return tuple(found.values())

    def chosen(self, names: Iterable[str]) -> tuple[ChatTool, ...]:
        """Return the tools with these names, skipping unknown names."""
        chosen = frozenset(names)
        return tuple(tool for tool in self.all() if tool.name in chosen)

    def definitions(self, names: Iterable[str]) -> list[Tool] | None:
        """Return the definitions of these tools, or None if there are none."""
        return [tool.definition for tool in self.chosen(names)] or None


async def use(tool: ChatTool, arguments: str, context: ToolContext) -> ToolResult:
    """Call a tool with the model's arguments (a JSON object). Errors become failed results for the model."""
    started = time.monotonic()

    def outcome(state: Literal["done", "failed"], text: str) -> ToolResult:
        return ToolResult(state, truncate_result(text), 1000 * (time.monotonic() - started))

    try:
        parsed = json.loads(arguments)
        if not tool.origin:
            check_arguments(tool.parameters, parsed)
        async with asyncio.timeout(tool.seconds) as clock:
            ask = context.ask and _with_suspended_timeout(context.ask, clock)
            text = await tool.run(parsed, replace(context, ask=ask))
    except TimeoutError:
        return outcome("failed", f"error: {tool.name} did not respond within {tool.seconds:g} s")
    except NotsoError as error:
        return outcome("failed", f"error: {error}")
    except Exception:
        logger.exception("the tool %s failed", tool.name)
        return outcome("failed", f"error: {tool.name} failed")
    return outcome("done", text)


def _with_suspended_timeout(ask: Ask, clock: asyncio.Timeout) -> Ask:
    # While a question is open, the timeout is suspended, and a second question is canceled.

    async def ask_without_timeout(question: Elicitation) -> Reply:
        end = clock.when()
        if end is None:
            return CANCELLED
        remaining_s = end - asyncio.get_running_loop().time()
        clock.reschedule(None)
        try:
            return await ask(question)
        finally:
            with contextlib.suppress(RuntimeError):  # the call ended while the user was being asked
                clock.reschedule(asyncio.get_running_loop().time() + remaining_s)

    return ask_without_timeout


def truncate_result(text: str) -> str:
    """Cut a result to MAX_RESULT_CHARACTERS, with a note, and replace characters that the database rejects."""
    text = text.replace("\x00", " ").encode("utf-8", "replace").decode()
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return f"{text[:MAX_RESULT_CHARACTERS]}\n[cut: {MAX_RESULT_CHARACTERS:,} of {len(text):,} characters]"


def mcp_servers(path: Path | None, allowed_http: Iterable[str] = ()) -> McpServers | None:
    """Return the MCP servers of a configuration file, or None if `path` is None. Raises SettingsError."""
    if path is None:
        return None
    config = read_mcp_config(path, allowed_http)
    with require_extra("mcp", "mcp_config"):
        from notso.web.tools.mcp_servers import McpServers
    return McpServers(config.entries, config.left_out)
