"""A replica begins when its model is there, knows browsers again, and lets a page go that would listen for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from notso.cluster.front import Front
from notso.smollm3 import EngineError


async def nothing() -> None:
    return None


def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("page")


def feed(request: Request) -> StreamingResponse:
    async def events() -> Any:
        yield b": attached\n\n"
        await asyncio.Event().wait()

    return StreamingResponse(events(), media_type="text/event-stream")


def app(**changes: Any) -> Front:
    paths = ("/", "/chats", "/v1/models")
    routes = [*(Route(path, page) for path in paths), Route("/feed", feed)]
    return Front(Starlette(routes=routes), **{"ready": nothing, "leave": nothing, **changes})


def test_a_browser_gets_a_cookie_once_and_a_program_none() -> None:
    client, html = TestClient(app()), {"accept": "text/html"}
    assert "set-cookie" not in client.get("/v1/models", headers=html).headers
    assert "set-cookie" not in client.get("/chats", headers={"accept": "*/*"}).headers
    given = client.get("/", headers=html).headers["set-cookie"]
    assert "HttpOnly" in given and "SameSite=Lax" in given
    assert "set-cookie" not in client.get("/", headers=html).headers


def test_a_feed_ends_as_a_whole_response() -> None:
    """Else whoever passes it on would call it cut off."""
    response = TestClient(app(feed_seconds=0.05)).get("/feed")
    assert response.status_code == 200 and response.text == ": attached\n\n"


def test_it_begins_when_questions_can_be_answered_and_ends_when_they_are() -> None:
    seen = []

    async def ready() -> None:
        seen.append("ready")

    async def leave() -> None:
        seen.append("left")

    with TestClient(app(ready=ready, leave=leave)):
        assert seen == ["ready"]
    assert seen == ["ready", "left"]


def test_a_model_that_cannot_be_loaded_is_no_beginning() -> None:
    async def ready() -> None:
        raise EngineError("no such file")

    with pytest.raises(EngineError, match="no such file"), TestClient(app(ready=ready)):
        pass
