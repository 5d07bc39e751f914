"""Use the tools, prompts and resources of MCP servers, which run as child processes or at a URL.

Only this module, `mcp_offers` and `mcp_process` import `mcp`, an optional dependency (`notso[mcp]`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.client.session import ClientRequestContext
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    ContentBlock,
    ElicitRequestFormParams,
    ElicitRequestParams,
    ElicitResult,
    EmbeddedResource,
    ErrorData,
    Prompt,
    Resource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from notso.web.tools.chat_tool import CHANGED, ChatTool, ToolContext
from notso.web.tools.elicitation import Ask, parse_question
from notso.web.tools.mcp_config import McpServerConfig, SkippedItem, unique_name
from notso.web.tools.mcp_offers import (
    Offer,
    is_text,
    list_offers,
    offer_description,
    parse_prompt_arguments,
    prompt_text,
    resource_text,
    unique_command,
    usage_of,
)
from notso.web.tools.mcp_process import (
    MAX_TOOL_NAME_CHARACTERS,
    SESSION_LOST,
    McpHttpTransport,
    McpStdioTransport,
    McpTransport,
)
from notso.web.values.errors import ToolError
from notso.web.values.visible_text import sanitize_line

logger = logging.getLogger("notso.web.mcp")
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # servers could make the library log any number of messages

START_SECONDS = 20.0
RESTART_SECONDS = 10.0  # minimum time between attempts to start a failed server
CALL_SECONDS = 60.0
OFFERS_SECONDS = 5.0  # timeout for listing prompts and resources
STOP_SECONDS = 5.0
MAX_TOOLS = 24  # for all servers together, because the definitions of enabled tools are part of the prompt
MAX_PAGES = 10
MAX_DESCRIPTION_CHARACTERS = 600
MAX_SCHEMA_CHARACTERS = 6_000
MAX_SCHEMA_DEPTH = 32  # the engine has the same limit
MAX_ERROR_CHARACTERS = 500
MAX_NAME_CHARACTERS = 64
TOO_MANY = f"at most {MAX_TOOLS} tools can be used"
CONNECTION_CLOSED = -32_000
NO_MCP = "it violates the MCP protocol"

_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")
T = TypeVar("T")
_REQUESTER: ContextVar[tuple[Ask | None] | None] = ContextVar("_REQUESTER", default=None)


class McpServer:
    """Connection to an MCP server, in a separate task.

    `tools` and `offers` (prompts and resources) stay available after the server has exited; a call restarts it.
    `failure` is the reason why it is not running. `left_out` lists unusable tools.
    """

    # The library requires the same task to open and close a connection.

    def __init__(self, entry: McpServerConfig) -> None:
        self.entry = entry
        self.tools: tuple[ChatTool, ...] = ()
        self.offers: tuple[Offer, ...] = ()
        self.left_out: tuple[SkippedItem, ...] = ()
        self.failure = ""
        self._client: Client | None = None
        self._transport: McpTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_requested = asyncio.Event()
        self._starting = asyncio.Lock()
        self._not_before = 0.0
        self._ask_callbacks: list[Ask | None] = []  # one per running request, to ask the user for input

    async def start(self) -> bool:
        """Start the server unless it is running or has failed recently. Return whether it is running."""
        async with self._starting:
            if self._client is not None:
                return True
            if time.monotonic() < self._not_before:
                return False
            await self.stop()
            self._stop_requested = asyncio.Event()
            started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run_connection(started, self._stop_requested))
            try:
                async with asyncio.timeout(START_SECONDS):
                    await asyncio.shield(started)
            except TimeoutError:
                self.failure = f"it did not respond within {START_SECONDS:g} s"
                await self.stop()
            except ToolError as error:
                self.failure = str(error)
            else:
                self.failure = ""
            if self.failure:
                self._not_before = time.monotonic() + RESTART_SECONDS
                logger.warning("MCP server %s: %s", self.entry.title, self.failure)
            return not self.failure

    async def stop(self) -> None:
        task, self._task = self._task, None
        self._stop_requested.set()
        if task is None:
            return
        if self._client is None:
            task.cancel()  # the task is waiting for the server's first response, and does not notice `_stop_requested`
        self._client = None
        _, late = await asyncio.wait([task], timeout=STOP_SECONDS)
        for each in late:
            each.cancel()
            await asyncio.wait([each], timeout=STOP_SECONDS)

    @property
    def _is_current_task(self) -> bool:
        # False in the task of a stopped connection, which may end only after another connection has been opened.
        return self._task is asyncio.current_task()

    async def _request(
        self, operation: str, send: Callable[[Client], Awaitable[T]], ask: Ask | None = None, *, is_retry: bool = False
    ) -> T:
        if not await self.start() or self._client is None:
            raise ToolError(f"the server {self.entry.title} is not running: {self.failure}")
        client, transport = self._client, self._transport
        try:
            with self._asking(ask):
                return await send(client)
        except MCPError as error:
            fault = transport.fault if transport is not None else ""
            has_ended = error.code == CONNECTION_CLOSED or bool(fault)
            if has_ended and self._client is client:  # false if another request has reconnected
                await self.stop()
            if fault == SESSION_LOST and not is_retry:  # retry, because a request in an expired session has no effect
                return await self._request(operation, send, ask, is_retry=True)
            if has_ended:
                fault = transport.fault if transport is not None else ""  # may be set only after the exit
                reason = self.failure or fault or "it has exited"
                if self._client is None:  # not if the server is running again
                    self.failure = reason
                raise ToolError(f"the server {self.entry.title} exited during the {operation}: {reason}") from error
            raise ToolError(sanitize_line(str(error.message), MAX_ERROR_CHARACTERS)) from error
        except (ValidationError, RuntimeError) as error:
            raise ToolError(f"the server {self.entry.title} returned no result: {NO_MCP}") from error

    @contextlib.contextmanager
    def _asking(self, ask: Ask | None) -> Iterator[None]:
        self._ask_callbacks.append(ask)
        token = _REQUESTER.set((ask,))
        try:
            yield
        finally:
            _REQUESTER.reset(token)
            self._ask_callbacks.remove(ask)

    async def _elicit(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult | ErrorData:
        # In the newest protocol, a server requests input in its response to a request, and this method runs in that
        # request's context (_REQUESTER). In older protocols, an elicitation does not name the request to which it
        # belongs. To keep it from the wrong user, reply `cancel` unless the server has exactly one unanswered request.
        # A canceled request counts as unanswered until the server answers it.
        if not isinstance(params, ElicitRequestFormParams):
            return ErrorData(code=INVALID_PARAMS, message="only forms are supported")
        named = _REQUESTER.get()
        requesters = named or self._ask_callbacks
        unanswered = 0 if self._transport is None else len(self._transport.unanswered)
        if len(requesters) != 1 or (named is None and unanswered != 1):
            return ElicitResult(action="cancel")
        ask = requesters[0]
        if ask is None:
            return ElicitResult(action="decline")
        try:
            question = parse_question(self.entry.title, params.message, params.requested_schema)
        except ToolError as error:
            return ErrorData(code=INVALID_PARAMS, message=str(error))
        reply = await ask(question)
        if reply.action != "accept":
            return ElicitResult(action=reply.action)
        return ElicitResult(action="accept", content=dict(reply.values))

    async def _run_connection(self, started: asyncio.Future[None], stop_requested: asyncio.Event) -> None:
        try:
            for transport in self._transports():
                self._transport = transport
                try:
                    await self._connect(transport, started, stop_requested)
                    return
                except Exception as error:
                    if not self._is_current_task:
                        return
                    self.failure = transport.fault or _reason(error, "reached" if self.entry.url else "started")
                    if self._client is not None or not _may_support_sse(self.entry, transport):
                        break
            if not started.done():
                started.set_exception(ToolError(self.failure))
        finally:
            if self._is_current_task:
                self._client = None
            if not started.done():
                started.cancel()

    def _transports(self) -> Iterator[McpTransport]:
        if not self.entry.url:
            yield McpStdioTransport(self.entry)
            return
        if self.entry.transport != "sse":
            yield McpHttpTransport(self.entry)
        yield McpHttpTransport(self.entry, sse=True)

    async def _connect(
        self, transport: McpTransport, started: asyncio.Future[None], stop_requested: asyncio.Event
    ) -> None:
        async with Client(transport, elicitation_callback=self._elicit) as client:
            self.tools = await self._list_tools(client, transport)
            self.offers = await self._list_offers(client)
            if not self._is_current_task:
                return
            self._client = client
            if not started.done():
                started.set_result(None)
            await _wait_for_any(stop_requested, transport.ended)
            if transport.ended.is_set() and self._is_current_task:
                self.failure = transport.fault or "it has exited"

    async def _list_tools(self, client: Client, transport: McpTransport) -> tuple[ChatTool, ...]:
        tools: dict[str, ChatTool] = {}
        left_out: list[SkippedItem] = []
        transport.left_out.clear()
        capabilities = client.server_capabilities
        if capabilities.tools is None and (capabilities.prompts is not None or capabilities.resources is not None):
            self.left_out = ()
            return ()
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                fault = _exclusion_reason(self.entry, tool.name, tool.input_schema, len(tools))
                if fault:
                    left_out.append(SkippedItem(sanitize_line(tool.name, MAX_TOOL_NAME_CHARACTERS), fault))
                    continue
                description = sanitize_line(tool.description or tool.title or "", MAX_DESCRIPTION_CHARACTERS)
                name = unique_name(f"{self.entry.name}__{_UNFIT.sub('_', tool.name)}", tools, MAX_NAME_CHARACTERS)
                tools[name] = self._tool(name, description, tool.input_schema, tool.name)
            cursor = page.next_cursor
            if not cursor:
                break
        else:
            left_out.append(SkippedItem("further tools", f"a list has more than {MAX_PAGES} pages"))
        self.left_out = (*transport.left_out, *left_out)
        if self.left_out:  # the tools are not named in the log, because their names come from the server
            logger.warning("MCP server %s: %d tools are not used", self.entry.title, len(self.left_out))
        return tuple(tools.values())

    async def _list_offers(self, client: Client) -> tuple[Offer, ...]:
        # If listing fails, keep the connection and the items listed so far, because the tools can still be used.
        found: dict[str, Offer] = {}
        capabilities = client.server_capabilities
        try:
            async with asyncio.timeout(OFFERS_SECONDS):
                if capabilities.prompts is not None:
                    async for prompt in list_offers(client, "prompt"):
                        command = unique_command(self.entry.name, prompt.name, found)
                        found[command] = self._prompt(command, prompt)
                if capabilities.resources is not None:
                    async for resource in list_offers(client, "resource"):
                        if is_text(resource.mime_type):
                            command = unique_command(self.entry.name, resource.name, found)
                            found[command] = self._resource(command, resource)
        except (MCPError, ValidationError, TimeoutError) as error:
            reason = "the list was not received in time" if isinstance(error, TimeoutError) else NO_MCP
            self.left_out = (*self.left_out, SkippedItem("prompts and resources", reason))
        return tuple(found.values())

    def _prompt(self, command: str, prompt: Prompt) -> Offer:
        async def fetch(typed: str) -> str:
            arguments = parse_prompt_arguments(prompt, typed)
            result = await self._request("request", lambda client: client.get_prompt(prompt.name, arguments))
            return prompt_text(result)

        return Offer(
            "prompt", command, usage_of(prompt), offer_description(prompt.title, prompt.description), "", fetch
        )

    def _resource(self, command: str, resource: Resource) -> Offer:
        async def fetch(typed: str) -> str:
            uri = resource.uri
            return resource_text(await self._request("request", lambda client: client.read_resource(uri)))

        name = sanitize_line(resource.title or resource.name, MAX_TOOL_NAME_CHARACTERS)
        return Offer(
            "resource", command, "", offer_description(resource.title, resource.description) or name, name, fetch
        )

    def _tool(self, name: str, description: str, schema: Mapping[str, Any], remote_name: str) -> ChatTool:
        async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
            async def call(client: Client) -> str:
                if all(each.digest != tool.digest for each in self.tools):  # the server has been restarted
                    raise ToolError(CHANGED)
                return _text_of(await client.call_tool(remote_name, dict(arguments)))

            return await self._request("call", call, context.ask)

        tool = ChatTool(name, description, schema, run, self.entry.title, CALL_SECONDS, remote_name)
        return tool


class McpServers:
    """All servers of a configuration, and its skipped parts. Use only on the event loop."""

    def __init__(self, entries: Sequence[McpServerConfig], left_out: Sequence[SkippedItem] = ()) -> None:
        self._entries = entries
        self._left_out = left_out
        self._servers: list[McpServer] = []
        self._starting: asyncio.Future[list[bool]] | None = None

    def start(self) -> None:
        for each in self._left_out:
            logger.warning("MCP configuration: %s: %s", each.name, each.reason)
        self._servers = [McpServer(entry) for entry in self._entries]
        self._starting = asyncio.ensure_future(asyncio.gather(*(server.start() for server in self._servers)))

    async def ready(self) -> None:
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))

    def tools(self) -> tuple[ChatTool, ...]:
        return tuple(tool for server in self._servers for tool in server.tools)[:MAX_TOOLS]

    def offers(self) -> tuple[Offer, ...]:
        """Return the prompts and resources, but only the first of several with the same command."""
        found: dict[str, Offer] = {}
        for server in self._servers:
            for each in server.offers:
                found.setdefault(each.command, each)
        return tuple(found.values())

    def failures(self) -> dict[str, str]:
        return {server.entry.title: server.failure for server in self._servers if server.failure}

    def left_out(self) -> list[SkippedItem]:
        found = list(self._left_out)
        count = 0
        for server in self._servers:
            beyond = server.tools[max(MAX_TOOLS - count, 0) :]
            count += len(server.tools)
            rows = (*server.left_out, *(SkippedItem(each.remote_name, TOO_MANY) for each in beyond))
            found += [
                SkippedItem(f"{server.entry.title}: {sanitize_line(each.name, 80)}", each.reason) for each in rows
            ]
        return found


async def _wait_for_any(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def _may_support_sse(entry: McpServerConfig, transport: McpTransport) -> bool:
    return (
        isinstance(transport, McpHttpTransport)
        and not transport.sse
        and transport.refused
        and entry.transport == "http or sse"
    )


def _exclusion_reason(entry: McpServerConfig, name: str, schema: Mapping[str, Any], count: int) -> str:
    if not entry.allows_tool(name):
        return "the configuration excludes it"
    if count == MAX_TOOLS:
        return TOO_MANY
    if not _is_schema_small(schema):
        return f"its schema has more than {MAX_SCHEMA_CHARACTERS:,} characters or more than {MAX_SCHEMA_DEPTH} levels"
    return ""


def _is_schema_small(schema: Mapping[str, Any]) -> bool:
    written, depth, deepest = json.dumps(schema), 0, 0
    for sign in written if len(written) <= MAX_SCHEMA_CHARACTERS else "":
        depth += (sign in "{[") - (sign in "}]")  # brackets in strings count, too
        deepest = max(deepest, depth)
    return len(written) <= MAX_SCHEMA_CHARACTERS and deepest <= MAX_SCHEMA_DEPTH


def _text_of(result: CallToolResult) -> str:
    parts = [_part_of(each) for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolError(text or "the tool failed")
    return text


def _part_of(content: ContentBlock) -> str:
    if isinstance(content, TextContent):
        return content.text
    if isinstance(content, ResourceLink):
        return f"{content.title or content.name}: {content.uri}"
    if isinstance(content, EmbeddedResource) and isinstance(content.resource, TextResourceContents):
        return content.resource.text
    return f"[{content.type} left out]"


def _reason(error: BaseException, step: str) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return "no such program"
    if isinstance(error, OSError):
        return error.strerror or f"it could not be {step}"
    if isinstance(error, MCPError):
        return "it exited immediately" if error.code == CONNECTION_CLOSED else NO_MCP
    if isinstance(error, ValidationError):
        return NO_MCP
    return f"it could not be {step}"
