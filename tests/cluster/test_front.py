"""A replica starts when its model is loaded, identifies browsers by a cookie, and ends long-lived feeds cleanly."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from notso.cluster.front import ReplicaMiddleware
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


def app(**changes: Any) -> ReplicaMiddleware:
    paths = ("/", "/chats", "/v1/models")
    routes = [*(Route(path, page) for path in paths), Route("/feed", feed)]
    return ReplicaMiddleware(Starlette(routes=routes), **{"ready": nothing, "drain": nothing, **changes})


def test_browser_gets_one_cookie_and_programs_get_none() -> None:
    client, html = TestClient(app()), {"accept": "text/html"}
    assert "set-cookie" not in client.get("/v1/models", headers=html).headers
    assert "set-cookie" not in client.get("/chats", headers={"accept": "*/*"}).headers
    given = client.get("/", headers=html).headers["set-cookie"]
    assert "HttpOnly" in given and "SameSite=Lax" in given
    assert "set-cookie" not in client.get("/", headers=html).headers


def test_feed_ends_as_a_complete_response() -> None:
    """Otherwise a proxy would report the response as truncated."""
    response = TestClient(app(feed_seconds=0.05)).get("/feed")
    assert response.status_code == 200 and response.text == ": attached\n\n"


def test_lifespan_waits_for_ready_and_calls_drain() -> None:
    seen = []

    async def ready() -> None:
        seen.append("ready")

    async def drain() -> None:
        seen.append("left")

    with TestClient(app(ready=ready, drain=drain)):
        assert seen == ["ready"]
    assert seen == ["ready", "left"]


def test_startup_fails_if_the_model_cannot_be_loaded() -> None:
    async def ready() -> None:
        raise EngineError("no such file")

    with pytest.raises(EngineError, match="no such file"), TestClient(app(ready=ready)):
        pass


def test_application_timeout_error_is_not_taken_for_the_feed_limit() -> None:
    """The application's own TimeoutError must not be mistaken for the feed's time limit."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise TimeoutError("of the application")

    front = ReplicaMiddleware(broken, ready=nothing, drain=nothing)
    with pytest.raises(TimeoutError, match="of the application"):
        TestClient(front).get("/feed")


def test_replica_uses_watchdog_and_private_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica uses the watchdog and private memory like a standalone server. Ray is replaced by a stub."""
    serve = SimpleNamespace(ingress=lambda: lambda cls: cls)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    monkeypatch.delitem(sys.modules, "notso.cluster.replica", raising=False)
    from notso.cluster import replica

    seen: list[str] = []

    class Watched:
        def start(self) -> None:
            seen.append("watched")

        def stop(self) -> None:
            seen.append("not watched any more")

    async def stopping(parts: object) -> None:
        seen.append("stopping")

    monkeypatch.setattr(replica, "Watchdog", Watched)
    monkeypatch.setattr(replica, "make_undumpable", lambda: seen.append("private"))
    monkeypatch.setattr(replica, "_settings", lambda chosen: None)
    monkeypatch.setattr(replica, "drain_work", stopping)

    async def live() -> None:
        made = replica.Replica({"engine": {}})
        made._parts = SimpleNamespace(
            shared=SimpleNamespace(engine=SimpleNamespace(wait_for_first_load=nothing, state="ready"))
        )
        await made._ready()
        await made._drain()

    asyncio.run(live())
    monkeypatch.delitem(sys.modules, "notso.cluster.replica")
    assert seen == ["private", "watched", "stopping", "not watched any more"]
