"""Affinity keys: requests of one browser or conversation share a key, and others do not."""

from __future__ import annotations

import re

from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from notso.cluster.front import COOKIE, SESSION, affinity_key, browser, new_cookie, proxy_layers

CHAT = "/v1/chat/completions"


def program(*headers: tuple[bytes, bytes], address: str = "10.0.0.1") -> str:
    return affinity_key(CHAT, headers, address)


def test_a_browser_stays_by_its_cookie_wherever_it_comes_from() -> None:
    cookie = new_cookie().split(b";")[0]
    other = new_cookie().split(b";")[0]
    keys = {
        affinity_key(path, [(b"cookie", b"a=b; " + value + b"; c=d")], address)
        for path in ("/", "/chats/x", "/feed")
        for address in ("10.0.0.1", "10.0.0.2")
        for value in (cookie, other)
    }
    assert len(keys) == 2


def test_a_browser_without_one_stays_by_its_address() -> None:
    first, again, other = (affinity_key("/", [], address) for address in ("::1", "::1", "::2"))
    assert first == again != other


def test_a_program_stays_by_the_conversation_else_by_its_key_else_by_its_address() -> None:
    key, name = (b"authorization", b"Bearer secret"), (b"x-conversation-id", b"7")
    assert program(key, name) == program(name, address="10.0.0.2") != program((b"x-conversation-id", b"8"))
    assert program(key) == program(key, address="10.0.0.2") != program((b"x-api-key", b"other"))
    assert program() == program((b"cookie", new_cookie())) != program(address="10.0.0.2")


def test_a_key_says_nothing_of_what_it_is_made_of() -> None:
    assert re.fullmatch("[0-9a-f]{32}", program((b"authorization", b"Bearer secret")))


def test_only_a_cookie_of_ours_is_taken() -> None:
    assert browser(f"x{COOKIE}=0123456789abcdef".encode()) is None
    assert browser(f"{COOKIE}=0123456789abcdefg".encode()) is None
    assert browser(f"{COOKIE}=0123456789abcdef".encode()) == b"0123456789abcdef"


def test_a_proxy_writes_the_session_unless_there_is_one() -> None:
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append([value for name, value in scope["headers"] if name == SESSION])
        await PlainTextResponse("")(scope, receive, send)

    [layer] = proxy_layers()
    client = TestClient(layer.cls(app, *layer.args, **layer.kwargs))
    client.get(CHAT, headers={"X-Conversation-Id": "7"})
    client.get(CHAT, headers={"X-Session-Id": "mine"})
    assert heard == [[program((b"x-conversation-id", b"7")).encode()], [b"mine"]]
