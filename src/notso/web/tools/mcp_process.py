"""The process of an MCP server and the two pipes to it, with bounds on all it says: nothing of it is to be trusted.

What the library for MCP would do with a server's words grows with them: a line is too long is kept, a list of tools
checked one by one, a result matched against patterns that the server wrote. So they are cut down before it sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from types import TracebackType
from typing import Any, cast

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from notso.web.tools.mcp_config import LeftOut, McpEntry
from notso.web.values.visible_text import visible_line

MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # a picture that is left out anyway may come along
MAX_MESSAGE_ITEMS = 50_000  # commas and opening brackets: reading so many holds the event loop for 50 ms
MAX_LISTED_TOOLS = 200  # on one page: each is checked by the library
MAX_TOOL_NAME_CHARACTERS = 80  # shown of a tool that is left out
MAX_OPEN_REQUESTS = 16  # of the server, which we refuse one by one
NICENESS = 10  # whatever it computes gives way to the pages and to the model
READ_BYTES = 65_536
PIECE_SECONDS = 0.005  # of reading what it said, then
REST = 19  # times as long the event loop is for others: however much it says, a twentieth of the loop is its
WRITE_SECONDS = 10.0  # for a server to take what it is told
LEAVE_SECONDS = 2.0  # to end by itself once its input has ended
TERMINATE_SECONDS = 1.0  # and once it was told to
POLL_SECONDS = 0.02

CLIENT_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"  # with each request, since protocol 2026-07-28

Said = SessionMessage | Exception


class McpProcess:
    """A transport for `mcp.Client`: an asynchronous context manager, in which the process runs.

    `ended` is set once nothing more is heard of it, `fault` says why if it broke a bound, `left_out` names the tools
    that it lists in a form that cannot be used. Raises OSError: it could not be started. What it starts itself ends
    with it, unless that has left its process group.
    """

    def __init__(self, entry: McpEntry) -> None:
        self.fault = ""
        self.ended = asyncio.Event()
        self.left_out: list[LeftOut] = []
        self._entry = entry
        self._open_requests = 0

    async def __aenter__(self) -> tuple[MemoryObjectReceiveStream[Said], MemoryObjectSendStream[SessionMessage]]:
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
                stderr=asyncio.subprocess.DEVNULL,  # is its own; it may quote what it was asked
                start_new_session=True,
            )
        except PermissionError as error:
            # An unreadable directory in PATH is reported in place of a program that is nowhere.
            if os.sep in entry.command or shutil.which(entry.command, path=env.get("PATH")) is not None:
                raise
            raise FileNotFoundError(error.errno, "no such program") from error
        with contextlib.suppress(OSError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        heard, said = anyio.create_memory_object_stream[Said](0)
        sent, to_send = anyio.create_memory_object_stream[SessionMessage](0)
        self._streams = (heard, said, sent, to_send)
        self._tasks = [asyncio.create_task(self._listen(heard)), asyncio.create_task(self._tell(to_send, heard))]
        for task in self._tasks:
            task.add_done_callback(lambda _: self.ended.set())
        return said, sent

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            for stream in self._streams:
                stream.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._leave()
        finally:
            self._signal(signal.SIGKILL)  # whoever is left of its group, and whatever cut the patience above short
            self._process._transport.close()  # type: ignore[attr-defined]  # a child that left may hold the pipes open

    async def _listen(self, heard: MemoryObjectSendStream[Said]) -> None:
        stdout = cast(asyncio.StreamReader, self._process.stdout)
        line, spent = bytearray(), 0.0
        with heard, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            while data := await stdout.read(READ_BYTES):
                *ends, rest = data.split(b"\n")
                for end in ends:
                    line += end
                    began = time.perf_counter()
                    message = self._message(line) if self._fits(line) else None
                    line.clear()
                    spent += time.perf_counter() - began
                    if self.fault:
                        return
                    if message is not None:
                        await heard.send(SessionMessage(message))
                    if spent > PIECE_SECONDS:
                        await asyncio.sleep(REST * spent)
                        spent = 0.0
                line += rest
                if not self._fits(line):
                    return

    def _fits(self, line: bytearray) -> bool:
        """Otherwise `fault` says why not."""
        if len(line) > MAX_MESSAGE_BYTES:
            self.fault = f"it sent a message of more than {MAX_MESSAGE_BYTES // 2**20} MiB"
        return not self.fault

    def _message(self, line: bytearray) -> JSONRPCMessage | None:
        """What is worth to be heard; None for rubbish, notifications, and requests while enough of them are open."""
        if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_MESSAGE_ITEMS:
            self.fault = f"it sent a message of more than {MAX_MESSAGE_ITEMS:,} parts"
            return None
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            return None
        if isinstance(message, JSONRPCNotification):
            return None  # of progress, of its log, of changes: none is followed
        if isinstance(message, JSONRPCRequest):
            if self._open_requests == MAX_OPEN_REQUESTS:
                return None
            self._open_requests += 1
        if isinstance(message, JSONRPCResponse):
            self.left_out += cut_down(message.result)
        return message

    async def _tell(
        self, to_send: MemoryObjectReceiveStream[SessionMessage], heard: MemoryObjectSendStream[Said]
    ) -> None:
        stdin = cast(asyncio.StreamWriter, self._process.stdin)
        try:
            with to_send:
                async for each in to_send:
                    if isinstance(each.message, JSONRPCResponse | JSONRPCError):
                        self._open_requests -= 1
                    declare_forms_only(each.message)
                    stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    async with asyncio.timeout(WRITE_SECONDS):
                        await stdin.drain()
        except TimeoutError:
            self.fault = f"it did not read for {WRITE_SECONDS:g} s"
        except OSError:
            pass  # it has gone
        finally:
            heard.close()  # so that who waits for an answer hears that none will come

    async def _leave(self) -> None:
        """End of its input, then SIGTERM; what is left then is killed."""
        stdin = cast(asyncio.StreamWriter, self._process.stdin)
        stdin.close()
        if not await self._gone(LEAVE_SECONDS) or not self._is_group_gone():
            self._signal(signal.SIGTERM)
            await self._gone(TERMINATE_SECONDS)

    async def _gone(self, seconds: float) -> bool:
        """Whether the process has ended. `Process.wait` would also wait for all who hold its pipes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._process.returncode is None:
                    await asyncio.sleep(POLL_SECONDS)
        return self._process.returncode is not None

    def _is_group_gone(self) -> bool:
        return not self._signal(0)

    def _signal(self, number: int) -> bool:
        """To its whole group, which is named after it. False if nobody is left there."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
            return True
        return False


def declare_forms_only(message: JSONRPCMessage) -> None:
    """The library says of who can ask a person that pages are opened for servers, too; they are not."""
    params = message.params if isinstance(message, JSONRPCRequest) and message.params else {}
    for offered in (params.get("capabilities"), (params.get("_meta") or {}).get(CLIENT_CAPABILITIES)):
        if isinstance(offered, dict) and isinstance(offered.get("elicitation"), dict):
            offered["elicitation"].pop("url", None)


def cut_down(result: dict[str, Any]) -> list[LeftOut]:
    """Reduce a list of tools to what is used of each, and return those that were removed because they have no usable
    name or no schema of an object.

    The library rejects the whole list for one such tool, and would match results against `outputSchema`, whose patterns
    can occupy a regular expression for ever.
    """
    tools = result.get("tools")
    if not isinstance(tools, list):
        return []
    left_out, kept = [], []
    for at, tool in enumerate(tools[:MAX_LISTED_TOOLS], 1):
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(name, str) or not name:
            left_out.append(LeftOut(f"tool {at}", "it has no name"))
            continue
        fault = _make_object_schema(tool.get("inputSchema"))
        if fault:
            left_out.append(LeftOut(visible_line(name, MAX_TOOL_NAME_CHARACTERS), fault))
            continue
        texts = {key: tool[key] for key in ("title", "description") if isinstance(tool.get(key), str)}
        kept.append({"name": name, "inputSchema": tool["inputSchema"], **texts})
    if len(tools) > MAX_LISTED_TOOLS:
        left_out.append(LeftOut(f"{len(tools) - MAX_LISTED_TOOLS} tools", f"a list has more than {MAX_LISTED_TOOLS}"))
    tools[:] = kept
    if not isinstance(result.get("nextCursor", ""), str):
        del result["nextCursor"]
    return left_out


def _make_object_schema(schema: Any) -> str:
    """Complete the schema of a tool's arguments where that is clear; otherwise return why it cannot be used."""
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
