"""Cross-origin requests: refused by default. Origins that the operator allows reach only the API, without cookies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.web.edge.access import COOKIE

Start = Callable[..., Any]
URL = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}]}
OBSIDIAN, OTHER = "app://obsidian.md", "https://evil.example"
KEY = "correct horse battery staple"


def from_page(origin: str) -> dict[str, str]:
    return {"Origin": origin, "Sec-Fetch-Site": "cross-site"}


def preflight(server: Any, origin: str, url: str = URL, **more: str) -> Any:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return server.client.options(url, headers={"Origin": origin} | asked | more)


def test_cross_origin_requests_are_rejected_by_default(shared: Any) -> None:
    answer = shared.client.post(URL, json=BODY, headers=from_page(OBSIDIAN))
    assert answer.status_code == 403 and "--allow-origin" in answer.json()["error"]["message"]
    for answer in (preflight(shared, OBSIDIAN), shared.client.get("/v1/models", headers=from_page(OBSIDIAN))):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("url", [URL, "/chat/completions", "/api/chat", "/v1/messages"])
def test_only_allowed_origins_may_call_api(start: Start, url: str) -> None:
    server = start(ScriptedEngine(), allowed_origins=(OBSIDIAN, "http://localhost:*")).ready()
    for origin in (OBSIDIAN, "http://localhost:5173"):
        before = preflight(server, origin, url, **{"Access-Control-Request-Private-Network": "true"})
        assert before.status_code == 204 and not before.content
        assert before.headers["access-control-allow-origin"] == origin
        assert before.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-private-network"] == "true"
        answer = server.client.post(
            url, json=BODY | ({} if "api" in url else {"max_tokens": 9}), headers=from_page(origin)
        )
        assert answer.status_code == 200, answer.text
        assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (origin, "Origin")
        assert "access-control-allow-credentials" not in [*answer.headers, *before.headers]
    assert server.client.post(url, json=BODY, headers=from_page(OTHER)).status_code == 403
    assert "access-control-allow-origin" not in preflight(server, OTHER, url).headers


def test_error_response_has_cors_headers(start: Start) -> None:
    server = start(ScriptedEngine(), allowed_origins=(OBSIDIAN,)).ready()
    answer = server.client.post(URL, json={"magic": 1}, headers=from_page(OBSIDIAN))
    assert answer.status_code == 400 and answer.headers["access-control-allow-origin"] == OBSIDIAN


def test_pages_reject_cross_origin_requests(start: Start) -> None:
    server = start(ScriptedEngine(), allowed_origins=("*",)).ready()
    answer = server.client.post("/chats", data={"text": "x"}, headers=from_page(OBSIDIAN))
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in server.client.get("/", headers=from_page(OBSIDIAN)).headers


def test_cross_origin_requests_ignore_session_cookie(start: Start) -> None:
    server = start(ScriptedEngine(), allowed_origins=("*",), api_key=KEY)
    name = f"{COOKIE}_{server.address.rpartition(':')[2]}"
    cookie = {"Cookie": f"{name}={server.on_loop(server.app.state.key_ring.new_session)}"}
    assert server.client.get("/v1/models", headers=cookie).status_code == 200
    assert server.client.get("/v1/models", headers=from_page(OBSIDIAN) | cookie).status_code == 401
    shown = from_page(OBSIDIAN) | {"Authorization": f"Bearer {KEY}"}
    assert server.client.get("/v1/models", headers=shown).status_code == 200


def test_multiple_origin_headers_are_rejected(start: Start) -> None:
    server = start(ScriptedEngine(), allowed_origins=("*",)).ready()
    headers = [("Origin", OBSIDIAN), ("Origin", OTHER), ("Content-Type", "application/json")]
    assert server.client.post(URL, content=b"{}", headers=headers).status_code == 403
