"""Connect the `mcp` library to MCP servers (child processes or URLs), and limit the messages of the servers.

The servers are not trusted, but the library does not limit its work: it buffers lines of any length, validates each
listed tool, and matches results against regular expressions from the server. Therefore, this module checks and reduces
messages before they reach the library.

For servers at a URL (streamable HTTP or SSE), the library manages the session and follows redirects only within the
URL's origin. With streamable HTTP, the optional GET stream is not opened, because its messages are not used. The size
of each response is limited. With the older SSE transport, responses arrive as events of a GET stream, and the size of
each event is limited.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, cast

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.sse import sse_client
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from notso.web.tools.elicitation import QUESTION_SECONDS
from notso.web.tools.mcp_config import McpServerConfig, SkippedItem
from notso.web.values.visible_text import sanitize_line

MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # large enough for a result with an image, although images are not used
MAX_MESSAGE_ITEMS = 50_000
"""Maximum number of commas and opening brackets in a message (over HTTP, newlines are counted, too). A message with
this many items takes 50 ms to parse, which blocks the event loop."""
MAX_LISTED_TOOLS = 200  # per page of a list, because the library validates each tool
MAX_TOOL_NAME_CHARACTERS = 80  # in reports of unusable tools
MAY_ASK = frozenset({"tools/call", "prompts/get", "resources/read"})
"""Methods of requests during which a server may ask the user for input."""
MAX_OPEN_REQUESTS = 16  # unanswered requests from the server
NICENESS = 10  # gives MCP servers a lower priority than the pages and the model
READ_BYTES = 65_536
PARSING_SECONDS = 0.005  # after a server's messages have been parsed for this long, reading pauses
PAUSE_FACTOR = 19
"""The pause is this many times as long as the parsing, so that a server gets at most 5% of the event loop's time."""
WRITE_SECONDS = 10.0  # time within which a server must read a message
LEAVE_SECONDS = 2.0  # time within which a server must exit after the end of its input
TERMINATE_SECONDS = 1.0  # time within which a server must exit after SIGTERM
POLL_SECONDS = 0.02

CLIENT_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"  # part of each request since protocol 2026-07-28

Incoming = SessionMessage | Exception
"""Item of a stream from which the `mcp` library reads."""

Streams = tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]


class McpTransport(contextlib.AbstractAsyncContextManager[Streams]):
    """Connection to a server, for `mcp.Client`."""

    def __init__(self, entry: McpServerConfig, *, ends_with_stream: bool = True) -> None:
        self.fault = ""  # the exceeded limit or expired session that ended the connection, if any
        self.ended = asyncio.Event()  # set when the server closes its output or accepts no more input
        self.left_out: list[SkippedItem] = []
        self.unanswered: set[str] = set()  # ids of the requests in MAY_ASK that have no response yet
        self._entry = entry
        self._open_requests = 0
        self._ends_with_stream = ends_with_stream
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Streams:
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack)
            incoming, read_stream = anyio.create_memory_object_stream[Incoming](0)
            write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
            tasks = [asyncio.create_task(self._receive(incoming)), asyncio.create_task(self._send(outgoing, incoming))]
            stack.push_async_callback(_cancel_tasks, tasks)
            for stream in (incoming, read_stream, write_stream, outgoing):
                stack.callback(stream.close)
            if self._ends_with_stream:
                for task in tasks:
                    task.add_done_callback(lambda _: self.ended.set())
            self._stack = stack.pop_all()
        return read_stream, write_stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @abc.abstractmethod
    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Connect, and let `stack` close the connection."""

    @abc.abstractmethod
    async def _receive(self, incoming: MemoryObjectSendStream[Incoming]) -> None:
        """Pass the server's messages to `incoming` until the connection ends."""

    @abc.abstractmethod
    async def _send(
        self, outgoing: MemoryObjectReceiveStream[SessionMessage], incoming: MemoryObjectSendStream[Incoming]
    ) -> None:
        """Send messages to the server. Closing `incoming` makes pending requests fail."""

    def _accept_incoming(self, message: JSONRPCMessage) -> bool:
        # Returns whether to pass the message on. Notifications are dropped, because progress, log records and list
        # changes are not used.
        if isinstance(message, JSONRPCRequest):
            if self._open_requests == MAX_OPEN_REQUESTS:
                return False
            self._open_requests += 1
        elif isinstance(message, JSONRPCResponse):
            self.left_out += sanitize_tool_list(message.result)
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self.unanswered.discard(str(message.id))
        return not isinstance(message, JSONRPCNotification)

    def _prepare_outgoing(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self._open_requests -= 1
        elif isinstance(message, JSONRPCRequest) and message.method in MAY_ASK:
            self.unanswered.add(str(message.id))
        remove_url_elicitation(message)


class McpStdioTransport(McpTransport):
    """Runs the server's process. On exit, the process group is killed.

    Raises OSError if the process cannot be started.
    """

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        entry = self._entry
        env = get_default_environment() | entry.env
        try:
            self._process = await asyncio.create_subprocess_exec(
                entry.command,
                *entry.args,
                env=env,
                cwd=entry.cwd,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # not logged, because it may contain user data from requests
                start_new_session=True,
            )
        except PermissionError as error:
            # If a directory in PATH is unreadable, a missing program is reported as a permission error.
            if os.sep in entry.command or shutil.which(entry.command, path=env.get("PATH")) is not None:
                raise
            raise FileNotFoundError(error.errno, "no such program") from error
        stack.push_async_callback(self._stop_process)
        with contextlib.suppress(OSError):  # the process may have exited already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    async def _receive(self, incoming: MemoryObjectSendStream[Incoming]) -> None:
        stdout = cast(asyncio.StreamReader, self._process.stdout)
        line, spent = bytearray(), 0.0
        with incoming, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            while data := await stdout.read(READ_BYTES):
                *ends, rest = data.split(b"\n")
                for end in ends:
                    line += end
                    began = time.perf_counter()
                    message = self._parse_message(line) if self._check_size(line) else None
                    line.clear()
                    spent += time.perf_counter() - began
                    if self.fault:
                        return
                    if message is not None:
                        await incoming.send(SessionMessage(message))
                    if spent > PARSING_SECONDS:
                        await asyncio.sleep(PAUSE_FACTOR * spent)
                        spent = 0.0
                line += rest
                if not self._check_size(line):
                    return

    def _check_size(self, line: bytearray) -> bool:
        if len(line) > MAX_MESSAGE_BYTES:
            self.fault = f"it sent a message of more than {MAX_MESSAGE_BYTES // 2**20} MiB"
        return not self.fault

    def _parse_message(self, line: bytearray) -> JSONRPCMessage | None:
        # Returns None if the message is to be ignored. Sets `fault` if the message has too many parts.
        if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_MESSAGE_ITEMS:
            self.fault = f"it sent a message of more than {MAX_MESSAGE_ITEMS:,} parts"
            return None
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            return None
        return message if self._accept_incoming(message) else None

    async def _send(
        self, outgoing: MemoryObjectReceiveStream[SessionMessage], incoming: MemoryObjectSendStream[Incoming]
    ) -> None:
        stdin = cast(asyncio.StreamWriter, self._process.stdin)
        try:
            with outgoing:
                async for each in outgoing:
                    self._prepare_outgoing(each.message)
                    stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    async with asyncio.timeout(WRITE_SECONDS):
                        await stdin.drain()
        except TimeoutError:
            self.fault = f"it did not read its input for {WRITE_SECONDS:g} s"
        except OSError:
            pass  # the process has exited
        finally:
            incoming.close()

    async def _stop_process(self) -> None:
        try:
            cast(asyncio.StreamWriter, self._process.stdin).close()
            if not await self._wait_for_exit(LEAVE_SECONDS) or self._signal(0):  # signal 0 tests if the group exists
                self._signal(signal.SIGTERM)
                await self._wait_for_exit(TERMINATE_SECONDS)
        finally:
            self._signal(signal.SIGKILL)  # also end the server's child processes, even if the wait above was canceled
            self._process._transport.close()  # type: ignore[attr-defined]  # a detached child may keep the pipes open

    async def _wait_for_exit(self, seconds: float) -> bool:
        # Poll the return code, because `Process.wait` would also wait for the pipes to close.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._process.returncode is None:
                    await asyncio.sleep(POLL_SECONDS)
        return self._process.returncode is not None

    def _signal(self, number: int) -> bool:
        # Returns False if no process of the group is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
            return True
        return False


def remove_url_elicitation(message: JSONRPCMessage) -> None:
    """Remove elicitation by URL from a request, because only forms are supported."""
    params = message.params if isinstance(message, JSONRPCRequest) and message.params else {}
    for offered in (params.get("capabilities"), (params.get("_meta") or {}).get(CLIENT_CAPABILITIES)):
        if isinstance(offered, dict) and isinstance(offered.get("elicitation"), dict):
            offered["elicitation"].pop("url", None)


def sanitize_tool_list(result: dict[str, Any]) -> list[SkippedItem]:
    """Remove unused fields of listed tools. Remove and return tools with an unusable name or schema."""
    # The library would reject a whole list because of one unusable tool. It would also match results against the
    # regular expressions in `outputSchema`, which can take unlimited time.
    tools = result.get("tools")
    if not isinstance(tools, list):
        return []
    left_out, usable = [], []
    for number, tool in enumerate(tools[:MAX_LISTED_TOOLS], 1):
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(name, str) or not name:
            left_out.append(SkippedItem(f"tool {number}", "it has no name"))
            continue
        fault = _repair_schema(tool.get("inputSchema"))
        if fault:
            left_out.append(SkippedItem(sanitize_line(name, MAX_TOOL_NAME_CHARACTERS), fault))
            continue
        texts = {key: tool[key] for key in ("title", "description") if isinstance(tool.get(key), str)}
        usable.append({"name": name, "inputSchema": tool["inputSchema"], **texts})
    if len(tools) > MAX_LISTED_TOOLS:
        left_out.append(SkippedItem(f"tools after the first {MAX_LISTED_TOOLS} of a list", "too many tools"))
    tools[:] = usable
    if not isinstance(result.get("nextCursor", ""), str):
        del result["nextCursor"]
    return left_out


def _repair_schema(schema: Any) -> str:
    # Repairs common faults of a tool's schema. Returns the reason if the schema is unusable, otherwise ''.
    if schema is None:
        return "it has no inputSchema"
    if not isinstance(schema, dict):
        return "its inputSchema is not an object"
    if schema.setdefault("type", "object") is None:
        schema["type"] = "object"
    if schema["type"] != "object":
        return "its inputSchema is not of type object"
    if schema.get("properties", {}) is None:
        schema["properties"] = {}
    if not isinstance(schema.get("properties", {}), dict):
        return "the properties of its inputSchema are not an object"
    if schema.get("required", []) is None:
        del schema["required"]
    return ""


CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0 + QUESTION_SECONDS  # timeout between parts of a response; includes the time for a user's reply
MAX_REDIRECTS = 3
MAX_SSE_EVENT_BYTES = 1024 * 1024  # same as the library's limit
SESSION_ID = "mcp-session-id"
SESSION_LOST = "its session has expired"
NO_STREAMABLE_HTTP = frozenset({400, 404, 405, 406, 415})
"""Status codes with which a server that supports only SSE may reject the first message."""


class McpHttpTransport(McpTransport):
    """Session with a server at a URL.

    `fault` and `ended` are set when the session has expired or the server has exceeded a limit. `refused` is true if
    the server rejected streamable HTTP.
    """

    def __init__(self, entry: McpServerConfig, *, sse: bool = False) -> None:
        super().__init__(entry, ends_with_stream=sse)
        self.refused = False
        self.sse = sse

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        client = httpx2.AsyncClient(
            headers=self._entry.headers | {"accept-encoding": "identity"},
            # An SSE stream has no read timeout, because nothing is sent between requests.
            timeout=httpx2.Timeout(CONNECT_SECONDS, read=None if self.sse else READ_SECONDS),
            transport=_LimitedTransport(self),
            max_redirects=MAX_REDIRECTS,
            trust_env=False,  # ignore the machine's proxy settings and .netrc
        )
        if self.sse:
            connection = sse_client(
                self._entry.url, httpx_client_factory=lambda headers=None, timeout=None, auth=None: client
            )
        else:
            await stack.enter_async_context(client)
            connection = streamable_http_client(
                self._entry.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        reader, writer = await stack.enter_async_context(connection)
        self._reader = cast(MemoryObjectReceiveStream[Incoming], reader)
        self._writer = cast(MemoryObjectSendStream[SessionMessage], writer)

    def end(self, fault: str) -> None:
        self.fault = self.fault or fault
        self.ended.set()

    async def _receive(self, incoming: MemoryObjectSendStream[Incoming]) -> None:
        with incoming, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for each in self._reader:
                if isinstance(each, SessionMessage) and self._accept_incoming(each.message):
                    await incoming.send(each)

    async def _send(
        self, outgoing: MemoryObjectReceiveStream[SessionMessage], incoming: MemoryObjectSendStream[Incoming]
    ) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with outgoing, self._writer:
                async for each in outgoing:
                    self._prepare_outgoing(each.message)
                    await self._writer.send(each)


class _LimitedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, owner: McpHttpTransport) -> None:
        super().__init__()
        self._owner = owner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and not self._owner.sse:
            return httpx2.Response(405, request=request)
        response = await super().handle_async_request(request)
        if request.method == "POST" and SESSION_ID not in request.headers:
            self._owner.refused = response.status_code in NO_STREAMABLE_HTTP
        if response.status_code == 404 and SESSION_ID in request.headers and request.method == "POST":
            self._owner.end(SESSION_LOST)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("an encoding that was not requested", request=request)
        body = cast(httpx2.AsyncByteStream, response.stream)
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_LimitedBody(body, self._owner),
            extensions=response.extensions,
        )


class _LimitedBody(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, owner: McpHttpTransport) -> None:
        self._body = body
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = items = 0
        end = b""  # end of the previous piece: the blank line after an event may span two pieces
        most = MAX_SSE_EVENT_BYTES if self._owner.sse else MAX_MESSAGE_BYTES
        async for piece in self._body:
            size += len(piece)
            items += sum(piece.count(sign) for sign in (b",", b"[", b"{", b"\n"))
            if size > most:
                self._owner.end(f"it sent a message of more than {most // 2**20} MiB")
            elif items > MAX_MESSAGE_ITEMS:
                self._owner.end(f"it sent a message of more than {MAX_MESSAGE_ITEMS:,} parts")
            else:
                yield piece
                end += piece
                if self._owner.sse and (b"\n\n" in end or b"\r\n\r\n" in end):
                    size = items = 0  # an event has ended; the start of the next event in this piece is not counted
                end = end[-3:]
                continue
            raise httpx2.ReadError(self._owner.fault)

    async def aclose(self) -> None:
        await self._body.aclose()


async def _cancel_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
