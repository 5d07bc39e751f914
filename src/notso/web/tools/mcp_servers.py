"""Tools of other programs: MCP servers, each a child process or at an address, watched, and started again when needed.

This module, `mcp_process` and `mcp_address` alone import `mcp`, which comes with the extra of that name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mcp import Client, MCPError
from mcp.client.session import ClientRequestContext
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    ErrorData,
    TextContent,
)
from pydantic import ValidationError

from notso.web.tools.chat_tool import CHANGED, ChatTool, Surroundings
from notso.web.tools.elicitation import Ask, question_of
from notso.web.tools.mcp_address import SESSION_LOST, McpAddress
from notso.web.tools.mcp_config import McpEntry
from notso.web.tools.mcp_process import McpProcess
from notso.web.values.errors import ToolError
from notso.web.values.visible_text import visible_line

logger = logging.getLogger("notso.web.mcp")
logging.getLogger("mcp").setLevel(
    logging.CRITICAL
)  # the library would write down what servers say, as often as they do

START_SECONDS = 20.0
RESTART_SECONDS = 10.0  # after it did not start, before it is tried again
CALL_SECONDS = 60.0
STOP_SECONDS = 5.0
MAX_TOOLS = 24  # of all servers together: a model is told of each that is on
MAX_PAGES = 10
MAX_DESCRIPTION_CHARACTERS = 600
MAX_SCHEMA_CHARACTERS = 6_000
MAX_SCHEMA_DEPTH = 32  # as the engine has it
MAX_SAID_CHARACTERS = 500  # of an error
MAX_NAME_CHARACTERS = 64
CONNECTION_CLOSED = -32_000
NO_MCP = "it does not speak MCP as it should"

_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


class McpServer:
    """One server. Its connection lives in a task of its own, since it must be closed where it was opened.

    `tools` stay listed when the server has gone: the next call starts it again. `failure` says why it is not running.
    """

    def __init__(self, entry: McpEntry) -> None:
        self.entry = entry
        self.tools: tuple[ChatTool, ...] = ()
        self.failure = ""
        self._client: Client | None = None
        self._transport: McpAddress | McpProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._starting = asyncio.Lock()
        self._not_before = 0.0
        self._asks: list[Ask | None] = []  # of the calls that run: how their people are asked

    async def start(self) -> bool:
        """Whether it runs, after an attempt to start it where it does not and did not fail to a moment ago."""
        async with self._starting:
            if self._client is not None:
                return True
            if time.monotonic() < self._not_before:
                return False
            await self.stop()
            self._over = asyncio.Event()
            up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._live(up, self._over))
            try:
                await asyncio.wait_for(asyncio.shield(up), START_SECONDS)
            except TimeoutError:
                self.failure = f"it did not answer within {START_SECONDS:g} s"
                await self.stop()
            except ToolError as error:
                self.failure = str(error)
            else:
                self.failure = ""
            if self.failure:
                self._not_before = time.monotonic() + RESTART_SECONDS
                logger.warning("MCP server %s: %s", self.entry.name, self.failure)
            return not self.failure

    async def stop(self) -> None:
        """End the child process, if there is one."""
        task, self._task = self._task, None
        self._over.set()
        if task is None:
            return
        if self._client is None:
            task.cancel()  # it waits for a server that says nothing
        self._client = None
        _, late = await asyncio.wait([task], timeout=STOP_SECONDS)
        for each in late:
            each.cancel()

    async def call(
        self, tool: ChatTool, arguments: Mapping[str, Any], ask: Ask | None = None, *, again: bool = False
    ) -> str:
        """What the tool says. Raises ToolError: it failed, the server has gone and does not come back, or has come back
        with another tool of that name."""
        if not await self.start() or self._client is None:
            raise ToolError(f"the server {self.entry.name} is not running: {self.failure}")
        if all(each.digest != tool.digest for each in self.tools):
            raise ToolError(CHANGED)
        try:
            return await self._called(self._client, tool.name_there, arguments, ask)
        except MCPError as error:
            fault = self._transport.fault if self._transport is not None else ""
            if fault == SESSION_LOST and not again:
                await self.stop()  # it did nothing of what was asked, so that may be asked again
                return await self.call(tool, arguments, ask, again=True)
            if error.code == CONNECTION_CLOSED or fault:
                await self.stop()
                self.failure = self.failure or fault or "it has ended"
                raise ToolError(f"the server {self.entry.name} ended during the call: {self.failure}") from error
            raise ToolError(visible_line(str(error.message), MAX_SAID_CHARACTERS)) from error
        except (ValidationError, RuntimeError) as error:
            raise ToolError(f"the server {self.entry.name} gave no result: {NO_MCP}") from error

    async def _called(self, client: Client, name: str, arguments: Mapping[str, Any], ask: Ask | None) -> str:
        self._asks.append(ask)
        try:
            return _text_of(await client.call_tool(name, dict(arguments)))
        finally:
            self._asks.remove(ask)

    async def _elicit(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        """The server asks a person for values. The protocol does not say during which call: where several run it cannot
        be known whom to ask, and nobody is."""
        if not isinstance(params, ElicitRequestFormParams):
            return ErrorData(code=INVALID_PARAMS, message="only forms are shown here")
        if len(self._asks) != 1:
            return ElicitResult(action="cancel")
        ask = self._asks[0]
        if ask is None:
            return ElicitResult(action="decline")
        try:
            question = question_of(self.entry.name, params.message, params.requested_schema)
        except ToolError as error:
            return ErrorData(code=INVALID_PARAMS, message=str(error))
        reply = await ask(question)
        if reply.action != "accept":
            return ElicitResult(action=reply.action)
        return ElicitResult(action="accept", content=dict(reply.values))

    async def _live(self, up: asyncio.Future[None], over: asyncio.Event) -> None:
        process = McpAddress(self.entry) if self.entry.url else McpProcess(self.entry)
        self._transport = process
        try:
            async with Client(process, elicitation_callback=self._elicit) as client:
                self.tools = await self._listed(client)
                self._client = client
                if not up.done():
                    up.set_result(None)
                await _first_of(over, process.ended)
                if process.ended.is_set():
                    self.failure = process.fault or "it has ended"
        except Exception as error:
            self.failure = process.fault or _reason(error)
            if not up.done():
                up.set_exception(ToolError(self.failure))
        finally:
            self._client = None
            if not up.done():
                up.cancel()

    async def _listed(self, client: Client) -> tuple[ChatTool, ...]:
        tools: dict[str, ChatTool] = {}
        cursor: str | None = None
        left_out = 0
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                name = _UNFIT.sub("_", f"{self.entry.name}__{tool.name}"[:MAX_NAME_CHARACTERS])
                if name in tools or len(tools) == MAX_TOOLS or not _is_schema_small(tool.input_schema):
                    left_out += 1
                    continue
                said = visible_line(tool.description or tool.title or "", MAX_DESCRIPTION_CHARACTERS)
                tools[name] = self._tool(name, said, tool.input_schema, tool.name)
            cursor = page.next_cursor
            if not cursor or len(tools) == MAX_TOOLS:
                break
        if left_out:
            logger.warning("MCP server %s: %d tools were left out", self.entry.name, left_out)
        return tuple(tools.values())

    def _tool(self, name: str, description: str, schema: Mapping[str, Any], name_there: str) -> ChatTool:
        async def run(arguments: Mapping[str, Any], surroundings: Surroundings) -> str:
            return await self.call(tool, arguments, surroundings.ask)

        tool = ChatTool(name, description, schema, run, self.entry.name, CALL_SECONDS, name_there)
        return tool


class McpServers:
    """All servers of a configuration. Everything here runs on the event loop."""

    def __init__(self, entries: Sequence[McpEntry]) -> None:
        self._entries = entries
        self._servers: list[McpServer] = []
        self._starting: asyncio.Future[list[bool]] | None = None

    def start(self) -> None:
        """Begin to start them, all at once; nobody waits for that yet."""
        self._servers = [McpServer(entry) for entry in self._entries]
        self._starting = asyncio.ensure_future(asyncio.gather(*(server.start() for server in self._servers)))

    async def ready(self) -> None:
        """Wait until each has either come up or failed to."""
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def close(self) -> None:
        """End them all."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))

    def tools(self) -> tuple[ChatTool, ...]:
        """What they offer, as named by server and tool."""
        return tuple(tool for server in self._servers for tool in server.tools)[:MAX_TOOLS]

    def failures(self) -> dict[str, str]:
        """The servers that are not running, and why."""
        return {server.entry.name: server.failure for server in self._servers if server.failure}


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def _is_schema_small(schema: Mapping[str, Any]) -> bool:
    written, depth, deepest = json.dumps(schema), 0, 0
    for sign in written if len(written) <= MAX_SCHEMA_CHARACTERS else "":
        depth += (sign in "{[") - (sign in "}]")  # those within texts count as well
        deepest = max(deepest, depth)
    return len(written) <= MAX_SCHEMA_CHARACTERS and deepest <= MAX_SCHEMA_DEPTH


def _text_of(result: CallToolResult) -> str:
    parts = [each.text if isinstance(each, TextContent) else f"[{each.type} left out]" for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolError(text or "the tool failed")
    return text


def _reason(error: BaseException) -> str:
    """One line about why a server did not come up, without paths or secrets."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return "there is no such program"
    if isinstance(error, OSError):
        return error.strerror or "it could not be started"
    if isinstance(error, MCPError):
        return "it ended at once" if error.code == CONNECTION_CLOSED else NO_MCP
    if isinstance(error, ValidationError):
        return NO_MCP
    return "it could not be started"
