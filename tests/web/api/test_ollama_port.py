"""The port for Ollama's clients: its root endpoint, which no other port has, and conversations as token ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Message
from notso.web.api.ollama.fields import decode_context, encode_context
from notso.web.app import create_app
from notso.web.edge.errors import ApiError
from notso.web.edge.security import DEFAULT_ORIGINS
from notso.web.server import ChatServer, listen, page_url
from notso.web.values.settings import Settings

Start = Callable[..., Any]
KEY = "a key of twenty letters"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return the addresses of the page's port and of Ollama's port, on a server with a key."""
    settings = Settings(port=0, ollama_port=0, data_dir=tmp_path_factory.mktemp("ollama"), api_key=KEY)
    sockets = [listen(settings), listen(settings, 0)]
    app = create_app(ScriptedEngine, settings)
    app.state.ollama_port = sockets[1].getsockname()[1]
    ready = threading.Event()
    server = ChatServer(app, page_url(sockets[0], settings), lambda address: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
    thread.start()
    assert ready.wait(60)
    yield tuple(f"http://127.0.0.1:{each.getsockname()[1]}" for each in sockets)  # type: ignore[misc]
    server.should_exit = True
    thread.join()


def test_root_reports_ollama_is_running_without_key(ports: tuple[str, str]) -> None:
    page, ollama = ports
    answer = httpx2.get(f"{ollama}/")
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert answer.headers["content-type"].startswith("text/plain")
    assert httpx2.head(f"{ollama}/").status_code == 200
    assert "Ollama is running" not in httpx2.get(f"{page}/", follow_redirects=True).text
    assert httpx2.get(f"{ollama}/api/tags").status_code == 401, "all other endpoints require the key"
    assert httpx2.get(f"{ollama}/", headers={"Host": "rebound.example"}).status_code == 421


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:5173", True),
        ("https://127.0.0.1", True),
        ("http://0.0.0.0:8080", True),
        ("app://obsidian.md", True),
        ("tauri://localhost", True),
        ("vscode-webview://1a2b3c", True),
        ("vscode-file://vscode-app", True),
        ("https://example.org", False),
        ("http://localhost.example.org", False),
        ("null", False),
    ],
)
def test_ollama_port_allows_only_default_origins(ports: tuple[str, str], origin: str, allowed: bool) -> None:
    page, ollama = ports
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answers = [httpx2.options(f"{at}/api/chat", headers=asked) for at in (ollama, page)]
    assert [each.headers.get("access-control-allow-origin") for each in answers] == [origin if allowed else None, None]
    root = httpx2.get(f"{ollama}/", headers={"Origin": origin})
    assert root.headers.get("access-control-allow-origin") == (origin if allowed else None)
    told = {"Origin": origin, "Authorization": f"Bearer {KEY}"}
    assert (
        httpx2.get(f"{ollama}/api/tags", headers=told).headers.get("access-control-allow-origin") == origin
    ) == allowed


def test_default_origins_are_unique() -> None:
    assert len(set(DEFAULT_ORIGINS)) == len(DEFAULT_ORIGINS) == 11


def test_generate_continues_conversation_from_context(start: Start) -> None:
    engine = ScriptedEngine(
        lambda messages, thinking: iter(say(f"{len(messages)} messages, the last {messages[-1].content}"))
    )
    server = start(engine).ready()
    ask: dict[str, Any] = {"stream": False, "think": False}
    url = "/api/generate"
    first = server.client.post(url, json=ask | {"system": "Be brief.", "prompt": 'ä "1"'}).json()
    assert first["response"] == '2 messages, the last ä "1"'
    lines = server.client.post(url, json=ask | {"prompt": "2", "context": first["context"], "stream": True})
    second = [each for each in lines.iter_lines() if each][-1]
    assert '"context":[' in second.replace(" ", "")
    third = server.client.post(url, json=ask | {"prompt": "3", "context": first["context"]}).json()
    assert third["response"] == "4 messages, the last 3"
    assert [each.role for each in decode_context(third["context"])] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    other = server.client.post(
        "/api/generate", json=ask | {"prompt": "4", "system": "No.", "context": third["context"]}
    )
    said = decode_context(other.json()["context"])
    assert [each.content for each in said if each.role == "system"] == ["No."]
    raw = server.client.post(url, json=ask | {"prompt": "x", "raw": True}).json()
    assert (
        "context" not in raw
        and "context"
        not in server.client.post("/api/chat", json=ask | {"messages": [{"role": "user", "content": "x"}]}).json()
    )


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", 'ä🙂\n"', "x" * 10_000])
def test_context_round_trips_messages(text: str) -> None:
    said = (Message("user", text), Message("assistant", text))
    assert decode_context(encode_context(said)) == said and decode_context([]) == ()


@pytest.mark.parametrize("context", [[1], [128011, 2, 3], [0x6E6F7401], [0x6E6F7401, 700], [0x6E6F7401, 1 << 40], [-1]])
def test_invalid_context_ids_are_rejected(start: Start, context: list[int]) -> None:
    with pytest.raises(ApiError) as caught:
        decode_context(context)
    assert caught.value.param == "context" and caught.value.status == 400


def test_unknown_fields_and_options_are_reported(start: Start) -> None:
    server = start(ScriptedEngine(lambda *_: iter(say("x")))).ready()
    body = {"prompt": "x", "stream": False, "options": {"num_ctx": 4096, "wobble": 3}, "colour": "red"}
    answer = server.client.post("/api/generate", json=body)
    assert answer.status_code == 200
    assert set(answer.headers["x-notso-ignored"].split(", ")) == {"colour", "options.num_ctx", "options.wobble"}


def test_show_returns_license_and_parameters(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    name = server.client.get("/api/tags").json()["models"][0]["name"]
    told = server.client.post("/api/show", json={"model": name}).json()
    assert isinstance(told["license"], str) and isinstance(told["parameters"], str)
