"""Quotas are exact: a request reserves the most it may use, and the unused rest is returned when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from scripted_engine import TEMPLATE_TOKENS, ScriptedEngine, say
from web.store.some_chats import a_chat, a_turn

from notso.smollm3 import InvalidRequestError, Usage
from notso.web.edge.rate_limit import LocalCounters
from notso.web.sign_in import accounts as accounts_module
from notso.web.sign_in.issued_keys import KeyManager, owner_of_key
from notso.web.store.access import ApiKey, UsageRow
from notso.web.store.opening import create_access_store
from notso.web.values.ids import new_id
from notso.web.values.quotas import MaxTokenUse, Quota, Reservation, allocate_tokens
from notso.web.values.sign_in import SignInSettings

Start = Callable[..., Any]
MANY = SignInSettings(require_key=True)
AT_ONCE = 40
PROMPT = TEMPLATE_TOKENS + 1
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


class Servers:
    """One or three servers over one store, and the key book of that store."""

    def __init__(self, start: Start, folder: Path, how: str, database: str | None) -> None:
        self.book = KeyManager(lambda: create_access_store(folder / "data", database))
        self.book.add("somebody")
        self.engines = [ScriptedEngine(slots=AT_ONCE, ends_at_limit=True) for _ in range(3 if how == "three" else 1)]
        settings: dict[str, Any] = {"sign_in": MANY, "max_waiting_turns": AT_ONCE}
        self.all = []
        for number, engine in enumerate(self.engines):
            data = {"data_dir": folder / f"data {number}", "database_url": database} if database else {}
            self.all.append(start(engine, **settings, **data).ready())

    def flood(self, secret: str, body: dict[str, Any]) -> list[httpx.Response]:
        """Send AT_ONCE requests at the same time, spread over all servers."""

        def ask(number: int) -> httpx.Response:
            server = self.all[number % len(self.all)]
            answer: httpx.Response = server.client.post("/v1/chat/completions", json=body, headers=bearer(secret))
            return answer

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(ask, range(AT_ONCE)))

    def used(self, key: ApiKey) -> Any:
        for each in self.all:
            each.on_loop(each.shared.accounts.flush)
        accounts = self.all[0].shared.accounts
        return self.all[0].on_loop(lambda: accounts.store.used_on(accounts.today(), owner_of_key(key.id)))


@pytest.fixture(params=["one", "three"])
def servers(request: pytest.FixtureRequest, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """One server over SQLite, or three over PostgreSQL. Requests wait long for reserved tokens, so slow machines pass
    too."""
    monkeypatch.setattr(accounts_module, "PATIENCE_SECONDS", 60.0)
    database = request.getfixturevalue("database") if request.param == "three" else None
    return Servers(start, tmp_path, request.param, database)


@pytest.fixture
def one(start: Start, tmp_path: Path) -> Servers:
    return Servers(start, tmp_path, "one", None)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def completions(answers: list[httpx.Response]) -> list[tuple[str, int]]:
    """Return the finish reason and length of each successful answer."""
    good = [each.json() for each in answers if each.status_code == 200]
    return sorted((each["choices"][0]["finish_reason"], each["usage"]["completion_tokens"]) for each in good)


def test_granted_tokens_are_divided_fairly_within_the_rest() -> None:
    assert allocate_tokens(100, [MaxTokenUse(10, 50)]) == [50] and allocate_tokens(40, [MaxTokenUse(10, 50)]) == [30]
    assert allocate_tokens(100, [MaxTokenUse(10, 5), MaxTokenUse(10, 500), MaxTokenUse(10, 500)]) == [5, 32, 33]
    assert allocate_tokens(11, [MaxTokenUse(10, 5)]) == [1] and allocate_tokens(10, [MaxTokenUse(10, 5)]) is None
    assert allocate_tokens(10, [MaxTokenUse(10, 0)]) == [0] and allocate_tokens(9, [MaxTokenUse(10, 0)]) is None


def test_concurrent_requests_never_exceed_the_request_quota(servers: Servers) -> None:
    secret, key = servers.book.add("ann", requests_per_day=3)
    answers = servers.flood(secret, BODY)
    assert Counter(each.status_code for each in answers) == {200: 3, 429: AT_ONCE - 3}
    assert servers.used(key).requests == 3 == sum(len(each.requests) for each in servers.engines)


def test_concurrent_requests_use_the_token_quota_exactly(servers: Servers) -> None:
    limit = 5 * (PROMPT + 10) + PROMPT + 4
    secret, key = servers.book.add("ann", tokens_per_day=limit)
    answers = servers.flood(secret, BODY | {"max_tokens": 10})
    assert completions(answers) == [("length", 4), *[("length", 10)] * 5]
    assert {each.status_code for each in answers} == {200, 429} and servers.used(key).tokens == limit
    refused = next(each for each in answers if each.status_code == 429)
    assert f"of {limit})" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) > 10


def test_unused_reserved_tokens_are_returned(servers: Servers) -> None:
    """Without max_tokens each request reserves the whole rest, and the others wait for the unused part."""
    for engine in servers.engines:
        engine.script = lambda *_: say("Hello!", piece=1)
    limit = 30 * (PROMPT + 6) + PROMPT
    secret, key = servers.book.add("ann", tokens_per_day=limit)
    answers = servers.flood(secret, BODY)
    assert completions(answers) == [("stop", 6)] * 30 and servers.used(key).tokens == limit - PROMPT
    assert Counter(each.status_code for each in answers) == {200: 30, 429: 10}


def test_request_with_several_choices_is_limited_as_a_whole(one: Servers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "notso.access")
    secret, key = one.book.add("ann", tokens_per_day=2 * PROMPT + 7, requests_per_day=3)
    server = one.all[0]

    def asked(**more: Any) -> httpx.Response:
        answer: httpx.Response = server.client.post("/v1/chat/completions", json=BODY | more, headers=bearer(secret))
        return answer

    assert asked(n=4).status_code == 429 and not one.engines[0].requests
    told = asked(n=2).json()
    assert [each["finish_reason"] for each in told["choices"]] == ["length", "length"]
    server.wait(lambda: caplog.text.count("generation ended: length (quota)") == 2)
    assert one.used(key).completion_tokens == 7 and one.used(key).requests == 2


def test_rejected_requests_do_not_count_against_the_quota(one: Servers) -> None:
    secret, key = one.book.add("ann", requests_per_day=1, tokens_per_day=1_000)
    server, engine = one.all[0], one.engines[0]
    engine.refusal = InvalidRequestError("not this", param="messages")
    for _ in range(3):
        answer = server.client.post("/v1/chat/completions", json=BODY, headers=bearer(secret))
        assert answer.status_code == 400, answer.text
    engine.refusal = None
    assert server.client.post("/v1/chat/completions", json=BODY, headers=bearer(secret)).status_code == 200
    assert one.used(key).requests == 1


def test_quota_applies_to_pages_suggestions_drafts_and_the_api(one: Servers) -> None:
    secret, key = one.book.add("ann", requests_per_day=1)
    server, engine = one.all[0], one.engines[0]
    engine.script = lambda *_: say("What is one? Where is two? Who is three?")
    client = httpx.Client(base_url=server.address, timeout=60, headers=bearer(secret))
    server.client = client
    made = client.post("/chats", data={"text": "Hello", "key": new_id()})
    assert made.status_code == 303
    owner, chat_id = owner_of_key(key.id), made.headers["location"].removeprefix("/chats/")
    server.wait(lambda: not server.on_loop(lambda: server.shared.store.messages(owner, chat_id))[-1].active)
    server.wait(lambda: one.used(key).requests == 1)
    refused = client.post("/chats", data={"text": "Hello again", "key": new_id()})
    assert refused.status_code == 429
    assert len(server.on_loop(lambda: server.shared.store.chats(owner))) == 1
    assert client.get(f"/chats/{chat_id}/suggestions").status_code == 204
    assert client.post(f"/chats/{chat_id}/estimate", data={"text": "A draft"}).status_code == 200
    assert client.post("/v1/completions", json={"prompt": "Hi"}).status_code == 429
    assert len(engine.requests) == 1 and not engine.drafts


def test_second_question_over_quota_is_rejected_before_storing(one: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both requests pass the first check of the quota; the engine holds one of them at that point."""
    monkeypatch.setattr(accounts_module, "PATIENCE_SECONDS", 0.05)
    secret, key = one.book.add("ann", requests_per_day=1)
    server, engine = one.all[0], one.engines[0]
    engine.gate.clear()
    first = server.client.post("/chats", data={"text": "One", "key": new_id()}, headers=bearer(secret))
    second = server.client.post("/chats", data={"text": "Two", "key": new_id()}, headers=bearer(secret))
    engine.gate.set()
    assert (first.status_code, second.status_code) == (303, 429)
    assert "Two" in second.text and second.headers["retry-after"] == "5"
    assert len(server.on_loop(lambda: server.shared.store.chats(owner_of_key(key.id)))) == 1


@pytest.mark.parametrize("what", ["regenerate", "continue", "summarize"])
def test_concurrent_chat_actions_over_quota_are_rejected_before_storing(servers: Servers, what: str) -> None:
    secret, key = servers.book.add("ann", requests_per_day=3)
    owner, paths, chats = owner_of_key(key.id), list[str](), list[Any]()
    for _ in range(AT_ONCE):
        chat = a_chat()
        turn = a_turn(chat)
        answer = replace(turn.assistant_message, state="stopped", content="half", parent_id=turn.user_message.id)
        chats.append((chat, [turn.user_message, answer]))
        paths.append(f"/chats/{chat.id}/" + ("summarize" if what == "summarize" else f"messages/{answer.id}/{what}"))
    store = servers.all[0].shared.store
    servers.all[0].on_loop(lambda: store.add_chats(owner, chats))

    def ask(number: int) -> int:
        server = servers.all[number % len(servers.all)]
        status: int = server.client.post(paths[number], data={"key": new_id()}, headers=bearer(secret)).status_code
        return status

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert Counter(threads.map(ask, range(AT_ONCE))) == {303: 3, 429: AT_ONCE - 3}
    for server in servers.all:
        server.wait(lambda server=server: server.chat.turns.unfinished == 0)
    assert servers.used(key).requests == 3 == sum(len(each.requests) for each in servers.engines)
    kept = [servers.all[0].on_loop(lambda chat=chat: store.messages(owner, chat.id)) for chat, _ in chats]
    unchanged = [each for each in kept if [message.state for message in each] == ["done", "stopped"]]
    assert len(unchanged) == AT_ONCE - 3, "the refused requests leave no failed answers behind"


def test_requests_that_wait_are_refused_when_their_user_is_removed(one: Servers) -> None:
    secret, key = one.book.add("ann", tokens_per_day=10 * PROMPT)
    server, owner = one.all[0], owner_of_key(key.id)
    accounts, shown = server.shared.accounts, {"text": "Hi", "key": new_id()}
    held = [MaxTokenUse(PROMPT, 9 * PROMPT)]
    server.on_loop(lambda: accounts.store.reserve(accounts.today(), owner, Quota(0, 10 * PROMPT), held))
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(server.client.post, "/v1/chat/completions", json=BODY, headers=bearer(secret))
        sent = threads.submit(server.client.post, "/chats", data=shown, headers=bearer(secret))
        server.wait(
            lambda: (turn := accounts._turns.get(owner)) is not None and turn._waiters
        )  # both have begun to wait
        server.on_loop(lambda: accounts.forget(owner))
        assert (asked.result().status_code, sent.result().status_code) == (401, 401)
    assert asked.result().json()["error"]["code"] == "invalid_api_key"
    assert not accounts._turns and not one.engines[0].requests


class SlowStore:
    """A store that records usage after `go` is set."""

    def __init__(self) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.rows: list[UsageRow] = []
        self.settled: list[str] = []
        self.closed_after = -1

    async def open(self) -> None: ...

    async def add_usage(self, rows: list[UsageRow], ended: list[Reservation]) -> None:
        self.began.set()
        await self.go.wait()
        self.rows += rows
        self.settled += [each.id for each in ended]

    async def close(self) -> None:
        self.closed_after = len(self.rows)


def test_close_waits_for_pending_usage_write() -> None:
    async def close_while_writing() -> Any:
        store: Any = SlowStore()
        accounts = accounts_module.Accounts(store, LocalCounters())
        await accounts.start()
        accounts.ended("ann", Usage(3, 4), Reservation("r", accounts.today(), "ann", 3, 4))
        await store.began.wait()
        closing = asyncio.create_task(accounts.close())
        asyncio.get_running_loop().call_soon(store.go.set)
        await closing
        return store

    store = asyncio.run(close_while_writing())
    assert (len(store.rows), store.settled, store.closed_after) == (1, ["r"], 1)


def test_usage_write_is_retried_after_thread_failure() -> None:
    class Refusing(SlowStore):
        refusals = 1

        async def add_usage(self, rows: list[UsageRow], ended: list[Reservation]) -> None:
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("can't start new thread")
            self.go.set()
            await super().add_usage(rows, ended)

    async def write_twice() -> Any:
        store: Any = Refusing()
        accounts = accounts_module.Accounts(store, LocalCounters())
        accounts.ended("ann", Usage(3, 4), Reservation("r", accounts.today(), "ann", 3, 4))
        await accounts.flush()
        before = len(store.rows)
        await accounts.flush()
        return before, len(store.rows), store.settled

    assert asyncio.run(write_twice()) == (0, 1, ["r"])


def test_action_goes_on_without_a_thread_for_its_audit_entry(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing:
        async def add_audit(self, *_: Any) -> None:
            raise RuntimeError("can't start new thread")

    store: Any = Refusing()
    accounts = accounts_module.Accounts(store, LocalCounters())
    asyncio.run(accounts.audit("ann", "removed a key", Request({"type": "http"}), by_operator=True))
    assert "the audit log cannot be written: can't start new thread" in caplog.text
