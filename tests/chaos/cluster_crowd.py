"""Simulated users of a cluster: each chat has one asker, and several readers stream each answer as a page does.

A reader whose connection breaks reconnects at once with its last event id, to any replica that the proxy chooses.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import urlencode

from notso.web.values.ids import new_id

PATIENCE_SECONDS = 120.0
PAUSE_SECONDS = 0.05
COOKIE: ContextVar[str] = ContextVar("COOKIE", default="")
"""The cookie of the browser that the current task simulates."""
_STREAM = re.compile(rb"/generations/([\w-]+)/events")
_PARTIAL = re.compile(r'<hx-partial hx-target="([^"]*)" hx-swap="([^"]*)">(.*?)</hx-partial>', re.DOTALL)


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces. Raise ConnectionError if it ends early."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self._line(), 16):
                yield (await self.body.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            yield await self.body.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await self.body.read(65_536):
                yield piece

    async def _line(self) -> bytes:
        if not (line := await self.body.readline()).endswith(b"\n"):
            raise ConnectionResetError("cut off")
        return line


@dataclass
class Crowd:
    """Simulated users and what they observed.

    `asked`: text of each acknowledged question -> chat. `resumed`: seconds from the end of a connection to the first
    event of the next.
    """

    port: int
    asked: dict[str, str] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    resumed: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    shown: dict[str, str] = field(default_factory=dict)
    broken: int = 0
    over: bool = False

    async def chat(self, number: int, readers: int, words: str) -> None:
        """Ask repeatedly in one chat, with this many readers for each answer."""
        path, turn = "/chats", 0
        while not self.over:
            turn += 1
            path = await self._ask(path, f"{number}.{turn} {words}")
            if path:
                page = await self._page(path)
                if streams := _STREAM.findall(page):
                    reading = [self._read(streams[-1].decode(), first=not each) for each in range(readers)]
                    await asyncio.gather(*reading)
            path = path or "/chats"

    async def _ask(self, path: str, text: str) -> str:
        """Send the question with one key until it is acknowledged. Return the chat's path, or '' if the chat is
        full."""
        key = new_id()
        while True:
            body = urlencode({"text": text, "key": key}).encode()
            target = path if path == "/chats" else f"{path}/messages"
            with suppress(OSError, EOFError):
                answer, _ = await self._request("POST", target, body)
                if answer.status == 303:
                    self.asked[text] = answer.headers["location"]
                    return answer.headers["location"]
                if (answer.status == 409 and self.over) or (answer.status == 400 and path != "/chats"):
                    return ""
            await asyncio.sleep(PAUSE_SECONDS)

    async def _page(self, path: str) -> bytes:
        while True:
            with suppress(OSError, EOFError):
                answer, page = await self._request("GET", path)
                if answer.status == 200:
                    return page
            await asyncio.sleep(PAUSE_SECONDS)

    async def _read(self, generation: str, *, first: bool) -> None:
        """Read to the event `done`. The `first` reader of each answer records the HTML it has received."""
        last, lost, screen = "", 0.0, dict[str, str]()
        while True:
            with suppress(OSError, EOFError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    answer = await self._begin("GET", f"/generations/{generation}/events", last=last)
                    self.statuses[answer.status] += 1
                    if answer.status == 404:
                        return
                    buffer = b""
                    try:
                        async for piece in answer.pieces():
                            *events, buffer = (buffer + piece).split(b"\n\n")
                            for event in events:
                                named = re.search(rb"^id: (\d+)$", event, re.MULTILINE)
                                if named is None:
                                    continue
                                last = named[1].decode()
                                if lost:
                                    self.resumed.append(time.monotonic() - lost)
                                    lost = 0.0
                                if event.startswith(b"event: done"):
                                    self._note_end(generation, event, screen if first else None)
                                    return
                                if first:
                                    _apply(screen, event)
                    finally:
                        answer.writer.close()
            if not lost:
                lost = time.monotonic()
                self.broken += 1
            await asyncio.sleep(PAUSE_SECONDS)

    def _note_end(self, generation: str, event: bytes, screen: dict[str, str] | None) -> None:
        state = re.search(rb'"state": "(\w+)"', event)
        assert state is not None
        self.ends[state[1].decode()] += 1
        if screen is not None and state[1] == b"done":
            answer = {name: html for name, html in screen.items() if "-answer-" in name}
            # sorting puts "closed" before "tail"
            self.shown[generation] = "".join(answer[name] for name in sorted(answer))

    async def _request(self, method: str, path: str, body: bytes = b"") -> tuple[Answer, bytes]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await self._begin(method, path, body)
            try:
                whole = b"".join([piece async for piece in answer.pieces()])
            finally:
                answer.writer.close()
        self.statuses[answer.status] += 1
        return answer, whole

    async def _begin(self, method: str, path: str, body: bytes = b"", last: str = "") -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"Last-Event-ID: {last}"] if last else []
        lines += [f"Cookie: {COOKIE.get()}"] if COOKIE.get() else []
        if body:
            lines += ["Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}"]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        status = (await reader.readline()).split()
        if len(status) < 2:
            writer.close()
            raise ConnectionResetError("no answer")
        headers: dict[str, str] = {}
        while (line := (await reader.readline()).decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Answer(int(status[1]), headers, reader, writer)


def _apply(screen: dict[str, str], event: bytes) -> None:
    text = "\n".join(line[6:] for line in event.decode().split("\n") if line.startswith("data: "))
    for target, swap, html in _PARTIAL.findall(text):
        screen[target] = (screen.get(target, "") if swap == "beforeend" else "") + html
