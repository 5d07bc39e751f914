"""Large parts of a response, such as log probabilities and token texts, are built and encoded off the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import EngineError
from notso.web.api.chat_completions.routes import ChatSerializer
from notso.web.api.completions.fields import TextSerializer
from notso.web.api.llama_cpp.request import NativeSerializer
from notso.web.api.messages.routes import MessageSerializer
from notso.web.api.ollama.routes import OllamaSerializer
from notso.web.api.responses import stream
from notso.web.api.responses.stream import ResponseSerializer
from notso.web.values import json_steps

Start = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (ChatSerializer, "/v1/chat/completions", CHAT),
        (TextSerializer, "/v1/completions", {"prompt": "x", "logprobs": 5}),
        (NativeSerializer, "/completion", {"prompt": "x", "n_probs": 20}),
        (MessageSerializer, "/v1/messages", {"messages": HELLO, "max_tokens": 50}),
        (OllamaSerializer, "/api/chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 20}),
        (ResponseSerializer, "/v1/responses", {"input": "x", "top_logprobs": 20, "store": True}),
    ],
)
def test_answer_is_built_off_event_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    threads: dict[str, set[int]] = {"body": set(), "closing_events": set()}
    ended: list[Any] = []
    finalize = kind.finalize

    async def noted_end(self: Any) -> None:
        ended.append(self)
        await finalize(self)

    monkeypatch.setattr(kind, "finalize", noted_end)
    for name in threads:
        own = getattr(kind, name)

        def noted(self: Any, own: Any = own, name: str = name) -> Any:
            if self in ended:  # before the end the body is still small
                threads[name].add(threading.get_ident())
            return own(self)

        monkeypatch.setattr(kind, name, noted)
    server = start(ScriptedEngine(lambda messages, thinking: say("one two three " * 20))).ready()
    answer = server.client.post(path, json=body | {"stream": stream, "model": "smollm3"})
    assert answer.status_code == 200, answer.text
    assert threads["closing_events"] if stream else threads["body"]
    assert server.on_loop(_ident) not in threads["body"] | threads["closing_events"]


@pytest.mark.parametrize("more", [{}, {"background": True}], ids=["one reader", "resumable"])
def test_failed_response_is_built_off_event_loop_and_encoded_in_steps(
    start: Start, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    threads: list[int] = []
    steps: dict[str, bool] = {}
    failure, named_event = ResponseSerializer.failure, stream.named_event

    def noted(self: Any, error: Any) -> bytes:
        threads.append(threading.get_ident())
        return failure(self, error)

    def noted_event(name: str, value: Any, *, is_whole: bool = False) -> bytes:
        steps[name] = is_whole
        return named_event(name, value, is_whole=is_whole)

    monkeypatch.setattr(ResponseSerializer, "failure", noted)
    monkeypatch.setattr(stream, "named_event", noted_event)
    broken = ScriptedEngine(lambda messages, thinking: say("one two"), failure=EngineError("it broke"))
    server = start(broken).ready()
    answer = server.client.post("/v1/responses", json={"input": "x", "stream": True} | more)
    assert "response.failed" in answer.text
    assert threads and server.on_loop(_ident) not in threads
    assert steps["response.failed"]


async def _ident() -> int:
    return threading.get_ident()


def test_repeated_token_text_is_created_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeated token text is created once; a million separate objects would take 300 MB."""
    asked: list[int] = []
    token_bytes = ScriptedEngine.token_bytes

    def noted(engine: ScriptedEngine, ids: Sequence[int]) -> list[bytes]:
        asked.extend(ids)
        return token_bytes(engine, ids)

    monkeypatch.setattr(ScriptedEngine, "token_bytes", noted)
    server = start(ScriptedEngine()).ready()
    answer = server.client.post("/tokenize", json={"content": "abb" * 1000, "with_pieces": True})
    assert [each["piece"] for each in answer.json()["tokens"]] == list("abb" * 1000) and len(asked) == 2


def test_token_pieces_are_encoded_in_steps_off_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, sizes, threads = json_steps._encode, [], set()

    def noted(value: Any) -> str:
        text = encode(value)
        sizes.append(len(text))
        threads.add(threading.get_ident())
        return text

    monkeypatch.setattr(json_steps, "_encode", noted)
    server = start(ScriptedEngine()).ready()
    answer = server.client.post("/tokenize", json={"content": "ab" * 50_000, "with_pieces": True})
    tokens = json.loads(answer.content)["tokens"]
    assert [each["piece"] for each in tokens] == list("ab" * 50_000)
    assert len(sizes) > 1000 and max(sizes) < 4096 < len(answer.content) // 100
    assert server.on_loop(_ident) not in threads
