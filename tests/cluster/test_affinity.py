"""Affinity keys: requests of one browser or conversation share a key, and others do not."""

from __future__ import annotations

import re

from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from notso.cluster.front import COOKIE, SESSION, affinity_key, browser_id, new_cookie, proxy_layers

CHAT = "/v1/chat/completions"


def program(*headers: tuple[bytes, bytes], address: str = "10.0.0.1") -> str:
    return affinity_key(CHAT, headers, address)


def test_browser_key_depends_only_on_its_cookie() -> None:
    cookie = new_cookie().split(b";")[0]
    other = new_cookie().split(b";")[0]
    keys = {
        affinity_key(path, [(b"cookie", b"a=b; " + value + b"; c=d")], address)
        for path in ("/", "/chats/x", "/feed")
        for address in ("10.0.0.1", "10.0.0.2")
        for value in (cookie, other)
    }
    assert len(keys) == 2


def test_browser_without_cookie_is_keyed_by_address() -> None:
    first, again, other = (affinity_key("/", [], address) for address in ("::1", "::1", "::2"))
    assert first == again != other


def test_program_key_prefers_conversation_then_api_key_then_address() -> None:
    key, name = (b"authorization", b"Bearer secret"), (b"x-conversation-id", b"7")
    assert program(key, name) == program(name, address="10.0.0.2") != program((b"x-conversation-id", b"8"))
    assert program(key) == program(key, address="10.0.0.2") != program((b"x-api-key", b"other"))
    assert program() == program((b"cookie", new_cookie())) != program(address="10.0.0.2")


def test_affinity_key_is_an_opaque_hash() -> None:
    assert re.fullmatch("[0-9a-f]{32}", program((b"authorization", b"Bearer secret")))


def test_only_valid_replica_cookies_are_accepted() -> None:
    assert browser_id(f"x{COOKIE}=0123456789abcdef".encode()) is None
    assert browser_id(f"{COOKIE}=0123456789abcdefg".encode()) is None
    assert browser_id(f"{COOKIE}=0123456789abcdef".encode()) == b"0123456789abcdef"


def test_proxy_adds_session_header_unless_present() -> None:
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append([value for name, value in scope["headers"] if name == SESSION])
        await PlainTextResponse("")(scope, receive, send)

    [layer] = proxy_layers()
    client = TestClient(layer.cls(app, *layer.args, **layer.kwargs))
    client.get(CHAT, headers={"X-Conversation-Id": "7"})
    client.get(CHAT, headers={"X-Session-Id": "mine"})
    assert heard == [[program((b"x-conversation-id", b"7")).encode()], [b"mine"]]
