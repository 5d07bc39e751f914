"""All tools there are, found by name, and how one is run: bounded in time and output, never raising."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from notso.extras import install_line
from notso.web.engine.port import Tool
from notso.web.tools.built_in import BuiltInTools
from notso.web.tools.chat_tool import ChatTool, Surroundings, check_arguments
from notso.web.tools.elicitation import CANCELLED, Ask, Elicitation, Reply
from notso.web.tools.mcp_config import LeftOut, read_mcp_config
from notso.web.values.errors import NotsoError, SettingsError, ToolError

if TYPE_CHECKING:
    from notso.web.tools.mcp_servers import McpServers

logger = logging.getLogger("notso.web.tools")

MAX_RESULT_CHARACTERS = 8_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call: `text` is what the model reads."""

    state: Literal["done", "failed"]
    text: str
    duration_ms: float = 0.0


class ToolSource(Protocol):
    """Where tools come from: the program itself, plugins, MCP servers."""

    def tools(self) -> Sequence[ChatTool]:
        """Those there are at the moment."""

    def failures(self) -> Mapping[str, str]:
        """What is not running, and why."""

    def left_out(self) -> Sequence[LeftOut]:
        """Return what was configured or offered and is not used."""

    async def ready(self) -> None:
        """Wait until it is known which there are."""


class Toolbox:
    """The built-in tools, and those of `others`. Of two tools of one name the first is used."""

    def __init__(self, *others: ToolSource) -> None:
        self._sources: tuple[ToolSource, ...] = (BuiltInTools(), *others)

    async def ready(self, names: Iterable[str] | None = None) -> None:
        """Wait until all tools are known, or those of that name: nobody waits for a server whose tools are not used."""
        if names is None or set(names) - {tool.name for tool in BuiltInTools.TOOLS}:
            await asyncio.gather(*(source.ready() for source in self._sources))

    def failures(self) -> Mapping[str, str]:
        """Which servers of tools and plugins are not running, and why."""
        return {name: why for source in self._sources for name, why in source.failures().items()}

    def left_out(self) -> list[LeftOut]:
        """Return what was configured or offered and is not used, and why."""
        return [each for source in self._sources for each in source.left_out()]

    def all(self) -> tuple[ChatTool, ...]:
        """Every tool, in the order in which they are shown and told to the model."""
        found: dict[str, ChatTool] = {}
        for source in self._sources:
            for tool in source.tools():
                found.setdefault(tool.name, tool)
        return tuple(found.values())

    def find(self, name: str) -> ChatTool | None:
        """The tool of that name."""
        return next((tool for tool in self.all() if tool.name == name), None)

    def chosen(self, names: Iterable[str]) -> tuple[ChatTool, ...]:
        """Those of them that were chosen; a name that no tool has is skipped."""
        wanted = frozenset(names)
        return tuple(tool for tool in self.all() if tool.name in wanted)

    def definitions(self, names: Iterable[str]) -> list[Tool] | None:
        """The chosen ones as the engine is told of them; None for none."""
        return [tool.definition for tool in self.chosen(names)] or None


async def use(tool: ChatTool, arguments: str, surroundings: Surroundings) -> Outcome:
    """Call a tool with arguments as the model wrote them, a JSON object. What goes wrong is told to the model."""
    started = time.monotonic()

    def outcome(state: Literal["done", "failed"], text: str) -> Outcome:
        return Outcome(state, cut(text), 1000 * (time.monotonic() - started))

    try:
        given = json.loads(arguments)
        if not tool.origin:
            check_arguments(tool.parameters, given)
        async with asyncio.timeout(tool.seconds) as clock:
            ask = surroundings.ask and _unhurried(surroundings.ask, clock)
            text = await tool.run(given, replace(surroundings, ask=ask))
    except ToolError as error:
        return outcome("failed", f"error: {error}")
    except TimeoutError:
        return outcome("failed", f"error: {tool.name} did not respond within {tool.seconds:g} s")
    except NotsoError as error:
        return outcome("failed", f"error: {error}")
    except Exception:
        logger.exception("the tool %s failed", tool.name)
        return outcome("failed", f"error: {tool.name} failed")
    return outcome("done", text)


def _unhurried(ask: Ask, clock: asyncio.Timeout) -> Ask:
    """While a person is asked, the call's time stands still. One question at a time: others are as good as unasked."""

    async def paused(question: Elicitation) -> Reply:
        end = clock.when()
        if end is None:
            return CANCELLED
        left = end - asyncio.get_running_loop().time()
        clock.reschedule(None)
        try:
            return await ask(question)
        finally:
            with contextlib.suppress(RuntimeError):  # the call has ended meanwhile
                clock.reschedule(asyncio.get_running_loop().time() + left)

    return paused


def cut(text: str) -> str:
    """A result that the context can take, and that says so where it was longer; never characters no store holds."""
    text = text.replace("\x00", " ").encode("utf-8", "replace").decode()
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return f"{text[:MAX_RESULT_CHARACTERS]}\n[cut: {MAX_RESULT_CHARACTERS:,} of {len(text):,} characters]"


def mcp_servers(path: Path | None, allowed_http: Iterable[str] = ()) -> McpServers | None:
    """Those of a configuration; None for none. Raises SettingsError: the file is unfit, or the extra is missing."""
    if path is None:
        return None
    config = read_mcp_config(path, allowed_http)
    try:
        from notso.web.tools.mcp_servers import McpServers
    except ImportError as error:
        message = f"the extra mcp is not installed: {install_line('mcp')}"
        raise SettingsError(message, setting="mcp_config") from error
    return McpServers(config.entries, config.left_out)
