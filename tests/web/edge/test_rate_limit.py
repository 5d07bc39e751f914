"""Rate limits per address: applied before the route runs, and reported with the time to wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedEngine

from notso.web.edge import rate_limit
from notso.web.edge.rate_limit import OTHER_ADDRESSES, RateLimit
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings

Start = Callable[..., Any]
KEY = "correct horse battery staple"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def asked(layer: RateLimit, address: str, path: str = "/v1/x", method: str = "POST") -> tuple[int, dict[str, str]]:
    """Return the status and headers of one request; the status is 200 if the limit let it pass."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    layer._app = app
    scope = {"type": "http", "method": method, "path": path, "headers": [], "client": (address, 1)}
    asyncio.run(layer(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def layer(per_minute: int) -> RateLimit:
    return RateLimit(None, per_minute)  # type: ignore[arg-type]


def test_requests_beyond_limit_return_429() -> None:
    limited = layer(5)
    assert [asked(limited, "10.0.0.1")[0] for _ in range(7)] == [200] * 5 + [429] * 2
    status, headers = asked(limited, "10.0.0.1")
    assert status == 429 and 1 <= int(headers["retry-after"]) <= 60
    assert asked(limited, "10.0.0.2")[0] == 200, "other addresses are not limited"
    assert asked(limited, "10.0.0.1", method="GET")[0] == 200
    assert asked(limited, "10.0.0.1", method="DELETE")[0] == 200, "stopping is never refused"
    assert asked(limited, "10.0.0.1", "/chats")[0] == 200, "the page is not limited"
    assert asked(limited, "10.0.0.1", "/login")[0] == 429, "sign-in is limited, so that keys cannot be guessed"
    for path in ("/login/oidc", "/login/oidc/callback"):
        assert asked(limited, "10.0.0.1", path, "GET")[0] == 429, "requests to the sign-in provider are limited"


def test_retry_after_is_time_until_next_allowed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    limited = layer(2)
    asked(limited, "10.0.0.1")
    now[0] += 20
    asked(limited, "10.0.0.1")
    now[0] += 5.5
    status, headers = asked(limited, "10.0.0.1")
    assert (status, headers["retry-after"]) == (429, "35")
    now[0] += 33.0
    assert asked(limited, "10.0.0.1")[0] == 429
    now[0] += 2.0
    assert asked(limited, "10.0.0.1")[0] == 200
    assert asked(limited, "10.0.0.1")[0] == 429, "only the oldest request has expired"


def test_large_clock_set_back_resets_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [1e9]
    monkeypatch.setattr("time.time", lambda: ahead[0] + time.monotonic())
    limited = layer(2)
    assert [asked(limited, "10.0.0.1")[0] for _ in range(3)] == [200, 200, 429]
    ahead[0] -= 1.0
    assert asked(limited, "10.0.0.1")[0] == 429, "a small correction of the clock does not reset the limit"
    ahead[0] -= 3600.0
    assert [asked(limited, "10.0.0.1")[0] for _ in range(3)] == [200, 200, 429]


def test_zero_disables_rate_limit() -> None:
    free = layer(0)
    assert {asked(free, "10.0.0.1")[0] for _ in range(50)} == {200}


def test_ipv6_network_shares_one_limit() -> None:
    limited = layer(2)
    assert [asked(limited, f"2001:db8::{number}")[0] for number in range(4)] == [200, 200, 429, 429]
    assert asked(limited, "2001:db8:0:1::1")[0] == 200


def test_number_of_tracked_addresses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MAX_ADDRESSES", 10)
    limited = layer(2)
    for number in range(100):
        asked(limited, f"10.0.1.{number}")
    events = limited._counters._storage.events  # type: ignore[attr-defined]
    assert len(events) <= 11
    assert asked(limited, "10.0.1.3")[0] == 200, "an address known before the table was full has its own counter"
    assert asked(limited, "10.0.1.99")[0] == 429, "all later addresses share one counter"
    assert any(OTHER_ADDRESSES in key for key in events)


def test_default_rate_limit_applies_beyond_loopback() -> None:
    assert Settings().rate == 0
    assert Settings(host="0.0.0.0", api_key=KEY).rate == 600
    assert Settings(host="0.0.0.0", api_key=KEY, requests_per_minute=0).rate == 0
    assert Settings(requests_per_minute=7).rate == 7
    with pytest.raises(SettingsError):
        Settings(requests_per_minute=-1)


def test_rate_limited_api_request_returns_openai_error(start: Start) -> None:
    server = start(ScriptedEngine(), requests_per_minute=3, api_key=KEY).ready()
    for _ in range(2):
        assert server.client.post("/v1/chat/completions", headers={"x-api-key": "guess"}).status_code == 401
    held = {"Authorization": f"Bearer {KEY}"}
    assert server.client.post("/v1/chat/completions", headers=held, json={"messages": HELLO}).status_code == 200
    answer = server.client.post("/v1/chat/completions", headers=held, json={"messages": HELLO})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limited")
    assert answer.json()["error"]["type"] == "rate_limit_error" and 1 <= int(answer.headers["retry-after"]) <= 60
    with pytest.raises(openai.RateLimitError):
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0)
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert server.client.get("/v1/models", headers=held).status_code == 200


def test_key_guesses_are_rate_limited(start: Start) -> None:
    server = start(ScriptedEngine(), requests_per_minute=3, api_key=KEY).ready()

    def tried(method: str, path: str, **headers: str) -> int:
        status: int = server.client.request(method, path, headers=headers, follow_redirects=False).status_code
        return status

    assert tried("GET", "/v1/models", authorization=f"Bearer {KEY}") == 200
    assert tried("GET", "/v1/models", authorization="Bearer a") == 401
    assert tried("GET", "/", accept="text/html") == 303, "a request without a key does not count as a guess"
    assert tried("GET", "/", accept="text/html", **{"x-api-key": "b"}) == 303
    assert tried("POST", "/chats", **{"x-api-key": "c"}) == 401
    assert tried("GET", "/v1/models", authorization=f"Bearer {KEY}") == 429, "at the limit the key is not checked"
    assert tried("DELETE", "/v1/responses/x", **{"x-api-key": "d"}) == 429
    assert tried("GET", "/", accept="text/html") == 303
