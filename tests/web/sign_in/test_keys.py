"""API keys: the access they give, their limits, and their immediate revocation."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Progress
from notso.web.chat import submit
from notso.web.edge import connections
from notso.web.edge.access import mark_of
from notso.web.sign_in.issued_keys import CACHE_SECONDS, KeyManager, digest_of, is_name, new_key, owner_of_key
from notso.web.store.access import UsageTotals
from notso.web.store.protocol import Memory
from notso.web.store.sqlite.access import ACCESS_FILE, SQLiteAccessStore
from notso.web.values.errors import SettingsError, StorageError
from notso.web.values.ids import new_id
from notso.web.values.sign_in import SignInSettings

Start = Callable[..., Any]
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
SERVER_KEY = "correct horse battery staple"
MANY = SignInSettings(require_key=True)


@pytest.fixture
def book(tmp_path: Path) -> KeyManager:
    """Return the key book of the server's data directory."""
    return KeyManager(lambda: SQLiteAccessStore(tmp_path / "data"))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked(server: Any, key: str) -> httpx.Response:
    response: httpx.Response = server.client.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    return response


def test_key_is_long_and_stored_as_a_hash(book: KeyManager, tmp_path: Path) -> None:
    secret, key = book.add("ann", tokens_per_day=5)
    assert len(secret) > 40 and secret.startswith("notso-") and new_key("x")[0] != new_key("x")[0]
    content = (tmp_path / "data" / ACCESS_FILE).read_bytes()
    assert digest_of(secret) in content and secret.encode() not in content and secret[6:].encode() not in content
    assert book.all() == [key] and key.tokens_per_day == 5


def test_invalid_duplicate_or_unknown_key_name_is_rejected(book: KeyManager) -> None:
    book.add("ann")
    for name in ("ann", "", " x", "a\nb", "x" * 65, "proxy:ann", "oidc:ann", "key:1", "plugin:ann", ":"):
        with pytest.raises(SettingsError):
            book.add(name)
    with pytest.raises(SettingsError, match="no active key named bob"):
        book.revoke("bob")
    assert is_name("ann's laptop") and [key.name for key in book.all()] == ["ann"]


def test_each_key_has_its_own_chats(start: Start, book: KeyManager) -> None:
    ann, bob = book.add("ann")[0], book.add("bob")[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    assert server.client.get("/v1/models").status_code == 401 and asked(server, "notso-wrong").status_code == 401
    assert asked(server, ann).status_code == 200
    made = server.client.post("/chats", data={"text": "Mine", "key": new_id()}, headers=bearer(ann))
    assert made.status_code == 303
    where = made.headers["location"]
    assert server.client.get(where, headers=bearer(ann)).status_code == 200
    assert server.client.get(where, headers=bearer(bob)).status_code == 404
    both = [("Authorization", f"Bearer {ann}"), ("x-api-key", bob)]
    assert server.client.get("/v1/models", headers=both).status_code == 401
    assert (
        server.client.get("/v1/models", headers=[("x-api-key", ann), ("Authorization", f"Bearer {ann}")]).status_code
        == 200
    )


def test_revoked_key_is_rejected_at_the_next_request(start: Start, book: KeyManager) -> None:
    secret, _ = book.add("ann")
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    client = httpx.Client(base_url=server.address, timeout=60)
    assert client.post("/login", data={"api_key": secret}).status_code == 303
    assert client.get("/").status_code == 200 and asked(server, secret).status_code == 200
    book.revoke("ann")
    assert asked(server, secret).status_code == 401 and client.get("/").status_code == 401
    assert client.post("/login", data={"api_key": secret}).status_code == 403
    again, _ = book.add("ann")  # added while the server runs
    assert asked(server, again).status_code == 200


def test_shared_links_end_when_the_key_of_their_owner_is_revoked(start: Start, book: KeyManager) -> None:
    keys = {name: book.add(name)[0] for name in ("ann", "bob")}
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    links = {}
    for name, key in keys.items():
        chat = server.client.post("/chats", data={"text": "x", "key": new_id()}, headers=bearer(key)).headers[
            "location"
        ]
        page = server.client.post(f"{chat}/share", data={"days": "7"}, headers=bearer(key)).text
        links[name] = re.findall(r'value="[^"]*(/shared/[\w-]{32})"', page)[0]
    assert [server.client.get(each).status_code for each in links.values()] == [200, 200]
    book.revoke("ann")
    book.add("ann")
    assert [server.client.get(each).status_code for each in links.values()] == [404, 200]


def test_streams_of_a_revoked_key_end(start: Start, book: KeyManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEY_CHECK_SECONDS", 0.01)
    ann, bob = book.add("ann")[0], book.add("bob")[0]
    engine = ScriptedEngine(slots=3)
    server = start(engine, sign_in=MANY).ready()
    engine.gate.clear()  # no answer ends
    browser = httpx.Client(base_url=server.address, timeout=60)
    browser.post("/login", data={"api_key": ann})
    body = BODY | {"stream": True}
    with (
        browser.stream("GET", "/feed", params={"tab": new_id()}) as feed,
        server.client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(ann)) as first,
        server.client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(bob)) as second,
    ):
        assert [each.status_code for each in (feed, first, second)] == [200, 200, 200]
        book.revoke("ann")
        for stream in (feed, first):
            with pytest.raises(httpx.RemoteProtocolError):
                stream.read()
        engine.gate.set()
        assert second.read().endswith(b"data: [DONE]\n\n"), "the stream of another key ended"
    assert asked(server, bob).status_code == 200


@pytest.mark.parametrize("error", [StorageError("away"), MemoryError()])
def test_keys_of_running_requests_are_looked_up_together_and_again_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Otherwise, a database that does not respond would be waited for once per key."""
    monkeypatch.setattr(connections, "KEY_CHECK_SECONDS", 0)
    monkeypatch.setattr(connections, "connection_of", lambda scope: scope["connection"])
    calls: list[list[str]] = []

    class Connection:
        def __init__(self) -> None:
            self.cycle, self.closed = object(), asyncio.Event()

        def is_answering(self, cycle: object) -> bool:
            return not self.closed.is_set()

        def close_during(self, cycle: object) -> None:
            self.closed.set()

    async def run() -> None:
        failed = asyncio.Event()

        async def valid_ids(key_ids: Collection[str]) -> set[str]:
            calls.append(sorted(key_ids))
            if len(calls) == 1:
                failed.set()
                raise error
            return {"bob"}

        watch, opened = connections.KeyWatch(valid_ids), {name: Connection() for name in ("ann", "bob", "carol")}
        for name, connection in opened.items():
            watch.add({"connection": connection}, name)
        await failed.wait()
        assert not any(each.closed.is_set() for each in opened.values())
        watch.add({"connection": opened["ann"]}, "ann")
        for name in ("ann", "carol"):
            await opened[name].closed.wait()
        assert not opened["bob"].closed.is_set()
        opened["bob"].closed.set()

    asyncio.run(run())
    assert calls[:2] == [["ann", "bob", "carol"]] * 2


def test_server_key_is_valid_beside_user_keys_and_is_operator(start: Start, book: KeyManager) -> None:
    secret, _ = book.add("ann")
    server = start(ScriptedEngine(), api_key=SERVER_KEY).ready()
    assert [asked(server, key).status_code for key in (SERVER_KEY, secret, "x")] == [200, 200, 401]
    assert server.client.get("/operator", headers=bearer(secret)).status_code == 403
    assert server.client.get("/operator", headers=bearer(SERVER_KEY)).status_code == 200


def test_server_without_keys_requires_no_authentication(start: Start, tmp_path: Path) -> None:
    server = start(ScriptedEngine()).ready()
    assert asked(server, "anything").status_code == asked(server, "notso-anything").status_code == 200
    assert server.client.get("/").status_code == 200
    assert not (tmp_path / "data" / ACCESS_FILE).exists() and server.shared.accounts is None
    told = server.client.get("/operator")
    assert told.status_code == 404 and "notso keys add" in told.text


def test_loopback_server_accepts_but_does_not_require_keys(start: Start, book: KeyManager) -> None:
    secret, key = book.add("ann")
    server = start(ScriptedEngine()).ready()
    assert [asked(server, each).status_code for each in ("anything", secret, "notso-wrong")] == [200, 200, 401]
    server.on_loop(server.shared.accounts.flush)
    used = {row.owner: row.used.requests for row in server.on_loop(lambda: all_usage(server))}
    assert used == {"local": 1, owner_of_key(key.id): 1}


def test_browser_can_sign_in_to_a_loopback_server_with_a_key(start: Start, book: KeyManager) -> None:
    secret, _ = book.add("ann")
    server = start(ScriptedEngine()).ready()
    anonymous, ann = (httpx.Client(base_url=server.address, timeout=60) for _ in range(2))
    assert ann.post("/login", data={"api_key": "notso-wrong"}).status_code == 403
    assert ann.post("/login", data={"api_key": secret}).status_code == 303
    where = ann.post("/chats", data={"text": "Mine", "key": new_id()}).headers["location"]
    assert (ann.get(where).status_code, anonymous.get(where).status_code) == (200, 404)
    assert "/logout" in ann.get("/settings").text and "/logout" not in anonymous.get("/settings").text
    assert ann.get("/operator").status_code == 403 and anonymous.get("/operator").status_code == 200
    assert ann.post("/logout").headers["location"] == "/" and ann.get(where).status_code == 404
    ann.post("/login", data={"api_key": secret})
    book.revoke("ann")
    assert [ann.get(path).status_code for path in (where, "/", "/operator", "/login")] == [401, 401, 401, 200]
    assert ann.get("/", headers={"Accept": "text/html"}).headers["location"] == "/login"
    bob, _ = book.add("bob")
    assert ann.post("/login", data={"api_key": bob}).status_code == 303
    assert (ann.get("/").status_code, ann.get("/operator").status_code) == (200, 403)
    assert [client.get("/login").text.count("Sign out") for client in (ann, anonymous)] == [0, 0]
    book.revoke("bob")
    assert ann.get("/login").text.count("Sign out") == 1, "the browser could not return to the local user"
    assert ann.post("/login").headers["location"] == "/" and ann.get("/operator").status_code == 200


async def all_usage(server: Any) -> Any:
    today = server.shared.accounts.today()
    return await server.shared.accounts.store.usage(today, today)


def test_requests_per_minute_are_limited_per_key(start: Start, book: KeyManager) -> None:
    ann, bob = book.add("ann", requests_per_minute=3)[0], book.add("bob")[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    answers = [asked(server, ann) for _ in range(5)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429, 429]
    refused = answers[-1]
    assert (
        1 <= int(refused.headers["retry-after"]) <= 60 and "3 requests per minute" in refused.json()["error"]["message"]
    )
    # reading does not count toward the limit
    assert server.client.get("/v1/models", headers=bearer(ann)).status_code == 200
    page = server.client.post("/chats", data={"text": "Hi", "key": new_id()}, headers=bearer(ann))
    assert page.status_code == 429
    assert asked(server, bob).status_code == 200


def test_page_routes_that_run_the_model_count_toward_the_limits(start: Start) -> None:
    runs_model = {"alternatives"} | {
        name for name, each in vars(submit).items() if getattr(each, "__annotations__", {}).get("return") == "Submitted"
    }
    assert {"submit_question", "continue_answer", "fork"} < runs_model
    server = start(ScriptedEngine()).ready()
    marked, running = set(), set()
    for context in iter_route_contexts(server.app.routes):
        route = context.original_route
        endpoint = getattr(route, "endpoint", None)
        if not getattr(endpoint, "__module__", "").startswith("notso.web.chat.routes"):
            continue
        if mark_of(route).uses_model:
            marked.add(endpoint.__name__)
        if runs_model & set(endpoint.__code__.co_names):
            running.add(endpoint.__name__)
    assert marked == running and {"fork_message", "show_tokens", "begin_chat"} <= marked


def test_tokens_per_day_are_limited_and_reset_at_midnight(start: Start, book: KeyManager) -> None:
    secret, key = book.add("ann", tokens_per_day=25)
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    accounts = server.shared.accounts
    assert asked(server, secret).status_code == 200
    refused = asked(server, secret)
    assert refused.status_code == 429 and "of 25)" in refused.json()["error"]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    server.on_loop(accounts.flush)
    assert asked(server, secret).status_code == 429
    owner = owner_of_key(key.id)
    used = server.on_loop(lambda: accounts.used_today(owner))
    assert used.requests == 1 and used.prompt_tokens > 0 and used.completion_tokens > 0
    tomorrow = accounts._clock() + 86_400
    accounts._clock = lambda: tomorrow
    assert server.on_loop(lambda: accounts.used_today(owner)) == UsageTotals()
    assert asked(server, secret).status_code == 200


def test_requests_per_day_are_limited_and_reset_at_midnight(start: Start, book: KeyManager) -> None:
    secret = book.add("ann", requests_per_day=2, tokens_per_day=1_000_000)[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    accounts = server.shared.accounts
    assert [asked(server, secret).status_code for _ in range(2)] == [200, 200]
    refused = asked(server, secret)
    assert refused.status_code == 429 and "(2 of 2)" in refused.json()["error"]["message"]
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    assert server.client.get("/v1/models", headers=bearer(secret)).status_code == 200
    tomorrow = accounts._clock() + 86_400
    accounts._clock = lambda: tomorrow
    assert asked(server, secret).status_code == 200


def test_store_failure_keeps_known_keys_valid_and_loses_no_usage(
    start: Start, book: KeyManager, monkeypatch: pytest.MonkeyPatch
) -> None:

    (secret, key), (other, _), (limited, _) = book.add("ann"), book.add("bob"), book.add("cid", tokens_per_day=1_000)
    server = start(ScriptedEngine(), sign_in=MANY, api_key=SERVER_KEY).ready()
    assert asked(server, secret).status_code == asked(server, limited).status_code == 200
    server.on_loop(server.shared.accounts.flush)
    store, known = server.shared.accounts.store, server.app.state.key_ring._keys

    async def fail(*_: Any) -> Any:
        raise StorageError("the disk is not available")

    with monkeypatch.context() as broken:
        for name in ("key", "add_usage", "add_audit", "used_on"):
            broken.setattr(store, name, fail)
        assert asked(server, secret).status_code == 200 and asked(server, SERVER_KEY).status_code == 200
        for unknown in (other, "notso-wrong", limited):  # for the key with a limit, the usage cannot be read
            refused = asked(server, unknown)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert server.client.post("/login", data={"api_key": other}).status_code == 503
        server.on_loop(server.shared.accounts.flush)
        broken.setattr(known, "_clock", lambda: time.monotonic() + CACHE_SECONDS + 1)
        assert asked(server, secret).status_code == 503
        assert server.client.get("/backup", headers=bearer(SERVER_KEY)).status_code == 200
    server.on_loop(server.shared.accounts.flush)
    used = {row.owner: row.used.requests for row in server.on_loop(lambda: all_usage(server))}
    assert used["local"] == 1 and used[owner_of_key(key.id)] == 2 and len(used) == 3


def test_server_wide_routes_require_operator_access(start: Start, book: KeyManager) -> None:
    """Routes that expose or change data of all users, such as a backup, are only for operators."""
    ann, operator = book.add("ann")[0], book.add("olga", is_operator=True)[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    routes = {f"{method} {context.path}" for context in contexts(server) for method in context.original_route.methods}
    operators = {
        f"{method} {context.path}"
        for context in contexts(server)
        if mark_of(context.original_route).operators
        for method in context.original_route.methods
    }
    assert operators >= {"GET /backup", "GET /metrics", "POST /models/switch"}
    assert {each for each in routes if each.startswith("POST /models/") or "lora" in each} <= operators
    for each in operators:
        method, path = each.replace("{name}", "kind").split()
        refused = server.client.request(method, path, headers=bearer(ann))
        assert refused.status_code == 403 and "Administrator access required" in refused.text, each
        if path.startswith("/v1/"):
            assert refused.json()["error"]["code"] == "forbidden", each
        if method == "GET":
            assert server.client.request(method, path, headers=bearer(operator)).status_code == 200, each
    for path in ("/", "/settings", "/export", "/v1/models", "/models"):
        assert server.client.get(path, headers=bearer(ann)).status_code == 200, path
    for path, offered in (
        ("/", "Download SmolLM3-3B"),
        ("/settings", 'href="/backup"'),
        ("/models", "/models/download"),
    ):
        pages = [server.client.get(path, headers=bearer(key) | {"Accept": "text/html"}) for key in (ann, operator)]
        shown = [offered in page.text for page in pages]
        assert shown == [False, True], path


def test_only_operators_can_set_keep_alive(start: Start, book: KeyManager) -> None:
    ann, operator = book.add("ann")[0], book.add("olga", is_operator=True)[0]
    engine = ScriptedEngine()
    server = start(engine, sign_in=MANY).ready()

    def kept(key: str, **body: Any) -> httpx.Response:
        answer: httpx.Response = server.client.post("/api/chat", json=body | {"stream": False}, headers=bearer(key))
        return answer

    refused = kept(ann, keep_alive=0)
    assert refused.status_code == 403 and "Administrator access required" in refused.json()["error"]
    for body in (BODY | {"keep_alive": 0}, BODY | {"keep_alive": "1ms"}, {"keep_alive": "1ms"}, {"keep_alive": -1}):
        answer = kept(ann, **body)
        assert answer.status_code == 200 and answer.headers["x-notso-ignored"] == "keep_alive", body
        assert server.shared.engine.default.keep_alive_s is None and not engine.closed
    assert kept(operator, keep_alive=0).json()["done_reason"] == "unload"
    server.wait(lambda: engine.closed)


def contexts(server: Any) -> Any:
    return iter_route_contexts(server.app.routes)


def test_operator_page_and_audit_log_contain_no_chat_content(start: Start, book: KeyManager) -> None:
    operator, ann = (
        book.add("olga", is_operator=True)[0],
        book.add("ann", tokens_per_day=1_000, requests_per_day=7_777)[0],
    )
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    word = "heliotrope"
    body = {"messages": [{"role": "user", "content": word}]}
    server.client.post("/v1/chat/completions", json=body, headers=bearer(ann))
    made = server.client.post("/chats", data={"text": word, "key": new_id()}, headers=bearer(ann))
    server.client.get("/export", headers=bearer(ann))
    server.client.post("/login", data={"api_key": "notso-wrong"})
    server.client.post("/login", data={"api_key": ann})
    assert server.client.get("/operator", headers=bearer(ann)).status_code == 403
    page = server.client.get("/operator", headers=bearer(operator))
    assert page.status_code == 200
    for told in (
        "ann",
        "olga",
        "1,000",
        "7,777",
        "exported all chats",
        "used a wrong key",
        "signed in",
        "added the key",
    ):
        assert told in page.text, told
    assert word not in page.text and made.headers["location"].rpartition("/")[2] not in page.text
    assert ann not in page.text and "127.0.0.1" in page.text
    flood = [server.client.post("/login", data={"api_key": "x"}).status_code for _ in range(30)]
    assert set(flood) == {403}
    log = server.on_loop(lambda: server.shared.accounts.store.audit(1000))
    assert sum(entry.action == "used a wrong key" for entry in log) <= 20


def test_operator_page_creates_and_revokes_keys(start: Start, book: KeyManager) -> None:
    operator, ann = book.add("olga", is_operator=True)[0], book.add("ann")[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    pages = {key: server.client.get("/", headers=bearer(key)).text for key in (operator, ann)}
    assert 'href="/operator"' in pages[operator] and 'href="/operator"' not in pages[ann]

    def create(**fields: str) -> httpx.Response:
        response: httpx.Response = server.client.post("/operator/keys", data=fields, headers=bearer(operator))
        return response

    made = create(name="bob", tokens_per_day="5000", requests_per_minute="")
    assert made.status_code == 200 and made.headers["cache-control"] == "no-store"
    secret = re.search(r"<code>(notso-[\w-]+)</code>", made.text)
    assert secret and "5,000" in made.text and asked(server, secret[1]).status_code == 200
    assert secret[1] not in server.client.get("/operator", headers=bearer(operator)).text, "shown only once"
    refused = [create(name=name) for name in ("bob", "", "x" * 65)] + [create(name="eve", tokens_per_day="many")]
    assert {each.status_code for each in refused} == {400}
    assert "without a colon" in create(name="proxy:ann").text
    assert {key.name for key in book.all()} == {"olga", "ann", "bob"}
    headers = bearer(operator)
    revoked = server.client.post("/operator/keys/revoke", data={"name": "bob"}, headers=headers, follow_redirects=False)
    assert revoked.status_code == 303 and asked(server, secret[1]).status_code == 401
    assert server.client.post("/operator/keys/revoke", data={"name": "bob"}, headers=headers).status_code == 404
    log = [entry.action for entry in server.on_loop(lambda: server.shared.accounts.store.audit(20))]
    (key,) = (key for key in book.all() if key.name == "bob")
    assert f"added the key {key.id}" in log and f"revoked the key {key.id}" in log


def test_operator_page_removes_a_user_with_all_data(start: Start, book: KeyManager) -> None:
    operator, ann = book.add("olga", is_operator=True)[0], book.add("ann")[0]
    release = threading.Event()

    def held(messages: Any, thinking: bool) -> Iterator[Event]:
        yield from say("held")
        while not release.wait(0.05):
            yield Event("progress", progress=Progress(1, 1, 0))

    server = start(ScriptedEngine(held), sign_in=MANY).ready()
    owner = owner_of_key(next(key.id for key in book.all() if key.name == "ann"))
    answer = server.client.post("/chats", data={"text": "A secret", "key": new_id()}, headers=bearer(ann))
    assert answer.status_code == 303
    server.client.post("/memory", data={"text": "Private."}, headers=bearer(ann))

    def remove(name: str) -> httpx.Response:
        where = "/operator/users/remove"
        response: httpx.Response = server.client.post(where, data={"name": name}, headers=bearer(operator))
        return response

    for name, reason in (("olga", "cannot remove yourself"), ("eve", "no key named eve"), ("", "no key named")):
        refused = remove(name)
        assert refused.status_code == 400 and reason in refused.text
    assert remove("ann").status_code == 303, "the running answer is stopped before the removal"
    assert server.client.get("/", headers=bearer(ann)).status_code == 401
    assert {key.name for key in book.all()} == {"olga"}
    store, accounts = server.shared.store, server.shared.accounts
    assert server.on_loop(lambda: store.chats(owner)) == [] == server.on_loop(lambda: store.memories(owner))
    server.on_loop(accounts.flush)
    rows = server.on_loop(lambda: accounts.store.usage(accounts.today(), accounts.today()))
    assert [row for row in rows if row.owner == owner] == []
    page = server.client.get("/operator", headers=bearer(operator)).text
    assert '<th scope="row">ann' not in page and "with all data" in page
    release.set()
    server.on_loop(accounts.flush)
    misspelled = remove("proxy:ann")
    assert misspelled.status_code == 400 and "no data is stored for proxy:ann" in misspelled.text
    server.on_loop(lambda: store.save_memory("proxy:ann", Memory(new_id(), "Private.", 1)))
    assert remove("proxy:ann").status_code == 303, "a user without a key can be removed too"
    assert server.on_loop(lambda: store.memories("proxy:ann")) == []


def test_removal_can_be_repeated_by_name_after_a_failure(
    start: Start, book: KeyManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, ann = book.add("olga", is_operator=True)[0], book.add("ann")[0]
    owner = owner_of_key(next(key.id for key in book.all() if key.name == "ann"))
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    server.client.post("/memory", data={"text": "Private."}, headers=bearer(ann))
    store, form = server.shared.store, {"name": "ann"}

    async def fail(owner: str) -> None:
        raise StorageError("the disk failed")

    with monkeypatch.context() as broken:
        broken.setattr(store, "remove_owner", fail)
        refused = server.client.post("/operator/users/remove", data=form, headers=bearer(operator))
    assert refused.status_code == 503 and asked(server, ann).status_code == 401
    assert server.client.post("/operator/users/remove", data=form, headers=bearer(operator)).status_code == 303
    assert server.on_loop(lambda: store.memories(owner)) == [] and {key.name for key in book.all()} == {"olga"}


def test_removal_of_a_revoked_key_keeps_the_new_key_of_its_name(start: Start, book: KeyManager) -> None:
    operator = book.add("olga", is_operator=True)[0]
    _, revoked = book.add("ann")
    book.revoke("ann")
    ann = book.add("ann")[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    form = {"name": revoked.id}
    assert server.client.post("/operator/users/remove", data=form, headers=bearer(operator)).status_code == 303
    assert asked(server, ann).status_code == 200


def test_many_keys_in_one_request_cause_at_most_two_lookups(
    start: Start, book: KeyManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, _ = book.add("ann")
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    store, looked_up = server.shared.accounts.store, []
    key = store.key

    async def noting(by: str | bytes) -> Any:
        looked_up.append(by)
        return await key(by)

    monkeypatch.setattr(store, "key", noting)
    wrong = [f"notso-{number:x}" for number in range(600)]
    for keys, status, most in (
        (wrong, 401, 1),
        ([secret, *wrong], 401, 2),
        ([secret] * 200, 200, 1),
        ([wrong[0]] * 600, 401, 1),
    ):
        looked_up.clear()
        answer = server.client.get("/v1/models", headers=[("x-api-key", key) for key in keys])
        assert answer.status_code == status and len(looked_up) == most


def test_repeated_audit_entries_are_merged_except_for_operators(start: Start, book: KeyManager) -> None:
    operator, ann = book.add("olga", is_operator=True)[0], book.add("ann")[0]
    server = start(ScriptedEngine(), sign_in=MANY).ready()
    accounts = server.shared.accounts
    for _ in range(5):
        assert server.client.get("/export", headers=bearer(ann)).status_code == 200
        assert server.client.get("/export", headers=bearer(operator)).status_code == 200
    log = server.on_loop(lambda: accounts.store.audit(1000))
    exports = [each for each in log if each.action == "exported all chats"]
    assert sorted((each.by_operator, each.count) for each in exports) == [(False, 1), *[(True, 1)] * 5]
    server.on_loop(lambda: accounts._write_audit(all_of_it=True))
    page = server.client.get("/operator", headers=bearer(operator)).text
    assert "exported all chats (×4)" in page
