"""Transport to an untrusted MCP server at an address (streamable HTTP or SSE), with bounds on its messages.

The library manages the session and follows redirects only within the address's origin. Responses are bounded here
before the library reads them. Over streamable HTTP, the server's own stream (GET) is not opened, because nothing in it
is used. Over the older SSE transport it carries the responses, so each of its events is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import cast

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from notso.web.tools.elicitation import QUESTION_SECONDS
from notso.web.tools.mcp_config import LeftOut, McpEntry
from notso.web.tools.mcp_process import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_ITEMS,
    MAX_OPEN_REQUESTS,
    Said,
    cut_down,
    declare_forms_only,
)

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0 + QUESTION_SECONDS  # between two parts of a response, during which the user may be asked
MAX_REDIRECTS = 3
MAX_SSE_EVENT_BYTES = 1024 * 1024  # the library's limit for SSE
SESSION_ID = "mcp-session-id"
SESSION_LOST = "its session has expired"
NO_STREAMABLE_HTTP = frozenset({400, 404, 405, 406, 415})
"""Statuses with which an SSE-only server rejects the first message, by the protocol."""


class McpAddress:
    """Transport for `mcp.Client`: an asynchronous context manager with a session.

    `ended` is set when a new session is needed, with the reason in `fault`: the server forgot this one, or exceeded a
    bound. `refused` is set if the server does not support streamable HTTP. `left_out` names unusable tools.
    """

    def __init__(self, entry: McpEntry, *, sse: bool = False) -> None:
        self.fault = ""
        self.refused = False
        self.sse = sse
        self.ended = asyncio.Event()
        self.left_out: list[LeftOut] = []
        self._entry = entry
        self._stack = contextlib.AsyncExitStack()
        self._open_requests = 0

    async def __aenter__(self) -> tuple[MemoryObjectReceiveStream[Said], MemoryObjectSendStream[SessionMessage]]:
        client = httpx2.AsyncClient(
            headers=self._entry.headers | {"accept-encoding": "identity"},
            # an SSE stream is silent between requests
            timeout=httpx2.Timeout(CONNECT_SECONDS, read=None if self.sse else READ_SECONDS),
            transport=_Bounded(self),
            max_redirects=MAX_REDIRECTS,
            trust_env=False,  # ignore the machine's proxy settings and .netrc
        )
        async with contextlib.AsyncExitStack() as stack:
            if self.sse:
                opened = sse_client(
                    self._entry.url, httpx_client_factory=lambda headers=None, timeout=None, auth=None: client
                )
            else:
                await stack.enter_async_context(client)
                opened = streamable_http_client(
                    self._entry.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
                )
            told, to_tell = await stack.enter_async_context(opened)
            heard, said = anyio.create_memory_object_stream[Said](0)
            sent, to_send = anyio.create_memory_object_stream[SessionMessage](0)
            listening = self._listen(cast(MemoryObjectReceiveStream[Said], told), heard)
            telling = self._tell(to_send, cast(MemoryObjectSendStream[SessionMessage], to_tell))
            for each in (listening, telling):
                stack.push_async_callback(_end, asyncio.create_task(each))
            stack.callback(said.close)
            stack.callback(sent.close)
            self._stack = stack.pop_all()
        return said, sent

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def end(self, fault: str) -> None:
        """End the session."""
        self.fault = self.fault or fault
        self.ended.set()

    async def _listen(self, told: MemoryObjectReceiveStream[Said], heard: MemoryObjectSendStream[Said]) -> None:
        with heard, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for each in told:
                if isinstance(each, SessionMessage) and self._passes(each):
                    await heard.send(each)
        if self.sse:
            self.ended.set()

    async def _tell(
        self, to_send: MemoryObjectReceiveStream[SessionMessage], to_tell: MemoryObjectSendStream[SessionMessage]
    ) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with to_send, to_tell:
                async for each in to_send:
                    if isinstance(each.message, JSONRPCResponse | JSONRPCError):
                        self._open_requests -= 1
                    declare_forms_only(each.message)
                    await to_tell.send(each)

    def _passes(self, each: SessionMessage) -> bool:
        """Whether to pass on a message: no notifications, and no requests beyond a limit. Reduces lists of tools."""
        if isinstance(each.message, JSONRPCRequest):
            if self._open_requests == MAX_OPEN_REQUESTS:
                return False
            self._open_requests += 1
        elif isinstance(each.message, JSONRPCResponse):
            self.left_out += cut_down(each.message.result)
        return not isinstance(each.message, JSONRPCNotification)


class _Bounded(httpx2.AsyncHTTPTransport):
    """httpx transport that ends a response at its bound."""

    def __init__(self, owner: McpAddress) -> None:
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
            stream=_BoundedBody(body, self._owner),
            extensions=response.extensions,
        )


class _BoundedBody(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, owner: McpAddress) -> None:
        self._body = body
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = items = 0
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
                if self._owner.sse and (b"\n\n" in piece or b"\r\n\r\n" in piece):
                    size = items = 0  # an event ended; the start of the next one is small compared to the bounds
                continue
            raise httpx2.ReadError(self._owner.fault)

    async def aclose(self) -> None:
        await self._body.aclose()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
