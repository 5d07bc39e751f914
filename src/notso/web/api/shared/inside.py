"""Requests of this program to its own API, without a connection."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Scope

from notso.web.edge.access import INSIDE, Caller

RETRY_STATUSES = frozenset({429, 503})
LONGEST_RETRY_SECONDS = 30


def scope_inside(app: FastAPI | None, path: str, caller: Caller) -> Scope:
    """Return the scope of a POST request with a JSON body, sent for `caller`."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "app": app,
        "state": {},
        INSIDE: caller,
    }


async def asked_inside(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, bytes]:
    """Send a request, again while the program is busy; return status and body."""
    while True:
        status, headers, answer = await sent_inside(app, {**scope, "state": {}}, body)
        if status not in RETRY_STATUSES:
            return status, answer
        wait_s = headers.get("retry-after", "")
        await asyncio.sleep(min(LONGEST_RETRY_SECONDS, max(1, int(wait_s) if wait_s.isdecimal() else 1)))


async def sent_inside(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request once; return status, headers and body."""
    status, headers, pieces = 500, dict[str, str](), list[bytes]()
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in message["headers"]}
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(pieces)
