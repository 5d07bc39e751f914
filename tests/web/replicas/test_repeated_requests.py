"""A request is repeated with its Idempotency-Key at another replica, during the answer and after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
KEY = {"Idempotency-Key": "a key"}


def test_repeated_request_replays_first_answer_on_every_replica(replica: Callable[..., Any]) -> None:
    asked, go = 0, threading.Event()

    def script(messages: object, thinking: bool) -> Iterator[Event]:
        nonlocal asked
        asked += 1
        yield from say(f"begun \u2028 {asked} ")
        assert go.wait(60)
        yield from say("done")

    here, there = replica(ScriptedEngine(script)), replica(ScriptedEngine(script))
    for server in (here, there):
        server.wait(lambda server=server: server.shared.exchange._at is not None)
    with (
        httpx.Client(base_url=here.address, timeout=60) as left,
        left.stream("POST", CHAT, json=BODY, headers=KEY) as answer,
    ):
        begun = next(answer.iter_text())
    other = there.client.post(CHAT, json=BODY | {"seed": 1}, headers=KEY)
    assert other.status_code == 422, other.text
    with there.client.stream("POST", CHAT, json=BODY, headers=KEY) as again:
        chunks = again.iter_text()
        text = next(chunks)
        go.set()
        text += "".join(chunks)
    assert asked == 1 and text.startswith(begun) and text.endswith("data: [DONE]\n\n")
    for server in (here, there):
        assert server.client.post(CHAT, json=BODY, headers=KEY).text == text
        assert server.client.post(CHAT, json=BODY | {"seed": 1}, headers=KEY).status_code == 422
    assert asked == 1
