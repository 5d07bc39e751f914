"""Fairness on every route: while the requests of a greedy owner are held, those of a modest owner are served. The tests
check which requests are served and which resources are held; they measure no time."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say

from notso.web.chat.submit import new_chat
from notso.web.edge.limits import RequestLimits
from notso.web.engine.running import RunningRequests
from notso.web.sign_in.issued_keys import KeyManager, owner_of_key
from notso.web.store.protocol import StoredMessage
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.fair_queue import FairQueue
from notso.web.values.ids import new_generation_id, new_id
from notso.web.values.sign_in import SignInSettings

SECURITY = (Path(__file__).parents[3] / "SECURITY.md").read_text()
ROUTES = re.findall(r"^\| `([A-Z]+) (/\S*)` \| [\w, ]+ \|", SECURITY, re.MULTILINE)
MOST_WAITING = 4
AT_ONCE = 8
"""Number of requests of the greedy owner: more than any thread pool has threads, and more than may wait."""
MESSAGES = {"messages": [{"role": "user", "content": "WHO"}]}
BODIES: dict[str, dict[str, Any]] = {
    r"(/v1)?/chat/completions(/input_tokens)?": MESSAGES | {"model": "smollm3"},
    r"/v1/messages": MESSAGES | {"model": "smollm3", "max_tokens": 9},
    r"/v1/messages/count_tokens": MESSAGES | {"model": "smollm3"},
    r"(/v1)?/completions?": {"prompt": "WHO"},
    r"(/v1)?/responses(/input_tokens)?": {"model": "smollm3", "input": "WHO"},
    r"/api/chat": MESSAGES | {"model": "smollm3", "stream": False},
    r"/api/generate": {"model": "smollm3", "prompt": "WHO", "stream": False},
    r"/api/(show|pull)": {"model": "smollm3"},
    r"/tokenize": {"content": "WHO"},
    r"/detokenize": {"tokens": [1]},
    r"/apply-template|/import": MESSAGES,
    r"/v1/.*|/api/.*|/engine/.*|/(embeddings?|infill|rerank|reranking)": {"model": "smollm3", "input": "WHO"},
}
REFUSED = {408, 429, 500, 502, 503, 504}


class Two:
    """A server, the keys of two owners, and a gate that holds the greedy owner's work."""

    def __init__(self, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.arrived = Counter[str]()
        self.held = Counter[str]()
        self.most_held = Counter[str]()

        def script(messages: Any, thinking: bool) -> Any:
            if "greedy" in messages[-1].content:
                self.gate.wait(60)
            return say("an answer")

        self.server = start(
            ScriptedEngine(script, slots=100),
            max_waiting_turns=MOST_WAITING,
            sign_in=SignInSettings(require_key=True),
        ).ready()
        book = KeyManager(lambda: SQLiteAccessStore(tmp_path / "data"))
        added = {name: book.add(name) for name in ("greedy", "modest")}
        self.keys = {name: secret for name, (secret, _) in added.items()}
        self.owners = {name: owner_of_key(key.id) for name, (_, key) in added.items()}
        self.most_waiting = 0
        plain_run, plain_call, plain_admit = FairQueue.run, RequestLimits.__call__, RunningRequests.admit
        owners, held = self.owners, self.held

        async def run(queue: FairQueue, owner: str, work: Callable[[], Any]) -> Any:
            def at_the_gate() -> Any:
                name = queue._threads._thread_name_prefix
                held[name] += 1
                self.most_held[name] = max(self.most_held[name], held[name])
                try:
                    self.gate.wait(60)
                    return work()
                finally:
                    held[name] -= 1

            # no owner can hold a pool of one thread for long, so its work is not held here
            is_held = owner == owners["greedy"] and queue._most > 1
            return await plain_run(queue, owner, at_the_gate if is_held else work)

        async def call(limits: RequestLimits, scope: Any, receive: Any, send: Any) -> None:
            self.arrived.update(value.decode() for name, value in scope.get("headers", ()) if name == b"x-who")
            await plain_call(limits, scope, receive, send)

        def admit(requests: RunningRequests, owner: str, *rest: Any, **more: Any) -> Any:
            admitted = plain_admit(requests, owner, *rest, **more)
            self.most_waiting = max(self.most_waiting, requests._waiting[owners["greedy"]])
            return admitted

        monkeypatch.setattr(FairQueue, "run", run)
        monkeypatch.setattr(RunningRequests, "admit", admit)
        monkeypatch.setattr(RequestLimits, "__call__", call)

    def a_chat(self, name: str) -> tuple[str, StoredMessage]:
        """Store a chat of that owner with one answer; return both."""
        chat = new_chat("a chat", thinking=False)
        question = StoredMessage(new_id(), chat.id, "user", name, "", "done", 1)
        answer = replace(question, id=new_id(), role="assistant", generation_id=new_generation_id())
        answer = replace(answer, parent_id=question.id)
        store = self.server.shared.store
        self.server.on_loop(lambda: store.add_chat(self.owners[name], chat, [question, answer]))
        return chat.id, answer

    def request(self, name: str, method: str, route: str) -> dict[str, Any]:
        """Build an owner's request for a route, with ids of the owner's own objects."""
        chat_id, answer = self.a_chat(name) if re.search(r"\{(chat|message|generation)_id", route) else ("", None)
        names = {"chat_id": chat_id, "name": "smollm3", "command": "x", "path": "x", "kind": "md"}
        names |= {"message_id": answer.id, "generation_id": answer.generation_id} if answer is not None else {}
        path = re.sub(r"\{(\w+)(:path)?\}", lambda m: str(names.get(m[1], new_generation_id())), route)
        asked: dict[str, Any] = {"method": method, "url": path}
        asked |= {"params": {"before": answer.id, "q": name}} if answer is not None and method == "GET" else {}
        body = next((body for pattern, body in BODIES.items() if re.fullmatch(pattern, path)), None)
        if method == "POST" and body is not None:
            asked["json"] = json.loads(json.dumps(body).replace("WHO", name))
        elif method == "POST":
            asked["data"] = {"text": name, "key": new_id(), "title": name, "kind": "message", "action": "archive"}
            asked["data"] |= {"name": name} if path == "/prompts" else {}
        return asked | {"headers": {"Authorization": f"Bearer {self.keys[name]}", "X-Who": name}}


@pytest.fixture
def two(start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    two = Two(start, tmp_path, monkeypatch)
    yield two
    two.gate.set()


async def status_of(client: httpx.AsyncClient, asked: dict[str, Any]) -> int:
    async with client.stream(**asked) as answer:
        if "event-stream" not in answer.headers.get("content-type", ""):
            await answer.aread()
        return answer.status_code


def test_every_route_serves_modest_owner_beside_greedy_owner(two: Two) -> None:
    async def beside(method: str, route: str) -> int:
        """Return the status of the modest owner's request while the greedy owner's requests are held."""
        greedy = [two.request("greedy", method, route) for _ in range(AT_ONCE)]
        modest = two.request("modest", method, route)
        async with httpx.AsyncClient(base_url=two.server.address, timeout=60) as client:
            two.gate.clear()
            two.arrived.clear()
            tasks = [asyncio.create_task(status_of(client, each)) for each in greedy]
            while two.arrived["greedy"] < AT_ONCE:
                await asyncio.sleep(0.001)
            got = await status_of(client, modest)
            two.gate.set()
            await asyncio.gather(*tasks)
        return got

    assert len(ROUTES) > 120
    answers = {f"{method} {route}": asyncio.run(beside(method, route)) for method, route in ROUTES}
    assert {route: got for route, got in answers.items() if got in REFUSED} == {}
    assert two.most_waiting == MOST_WAITING, "the greedy owner's requests occupied every waiting place"
    assert two.most_held == {"notso-db-read": 3, "notso-page": 1}, "the greedy owner held all threads except one"
