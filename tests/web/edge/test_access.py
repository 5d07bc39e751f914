"""Access control: hosts, origins and keys, and an explicit access mark on every route."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.routing import APIRoute, iter_route_contexts
from scripted_engine import ScriptedEngine

from notso.web.app import create_app
from notso.web.edge import access
from notso.web.edge.access import (
    COOKIE,
    MAX_SESSIONS_MULTIUSER,
    SESSION_RENEWAL_SECONDS,
    AccessMark,
    Caller,
    KeyRing,
    cookie_name,
    public,
)
from notso.web.edge.security import content_security_policy
from notso.web.replicas.exchange import Body, LocalExchange, Subscriber
from notso.web.values.ids import new_generation_id, new_id
from notso.web.values.settings import Settings

Start = Callable[..., Any]
MESSAGE_ROUTES = (
    *(("GET", "text"), ("GET", "edit"), ("POST", "edit"), ("POST", "regenerate"), ("POST", "continue")),
    *(("POST", "choose"), ("POST", "unsummarize"), ("POST", "branch")),
)
KEY = "correct horse battery staple"


def test_every_route_is_marked_public_or_guarded(tmp_path: Path) -> None:
    declared: dict[str, str] = {}
    for path, dependencies in inventory(create_app(ScriptedEngine, Settings(data_dir=tmp_path))):
        marks = [call for call in dependencies if call is public or isinstance(call, AccessMark)]
        assert len(marks) == 1, f"{path} must be public or guarded"
        declared[path] = "public" if marks[0] is public else "guarded"
    assert {path for path, mark in declared.items() if mark == "public"} == {
        *(
            "GET /health",
            "HEAD /health",
            "GET /v1/health",
            "GET /ping",
            "POST /ping",
            "GET /livez",
            "HEAD /livez",
            "GET /static/{path:path}",
            "GET /login",
            "POST /login",
            "GET /login/oidc",
            "GET /login/oidc/callback",
            "GET /shared/{secret}",
            "GET /diagram",
        )
    }
    assert len(declared) > 100  # All other routes are guarded. SECURITY.md lists the public ones.


def inventory(app: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield every operation of the application with its dependencies."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        assert isinstance(route, APIRoute), f"{route} is not an API route"
        dependant = getattr(context, "dependant", None) or route.dependant
        for method in sorted(route.methods):
            yield f"{method} {context.path}", [each.call for each in dependant.dependencies]


GOOD_HOSTS = [
    "127.0.0.1",
    "localhost",
    "LOCALHOST",
    "127.0.0.1:{port}",
    "localhost:1",
    "[::1]",
    "[::1]:{port}",
    "chat.home.example",
]
BAD_HOSTS = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example:3000",
    "127.0.0.1@evil.example",
]
BAD_HOSTS += [
    "localhost/",
    "localhost?x",
    "localhost#x",
    "",
    "127.0.0.2",
    "0.0.0.0",
    "[::2]",
    "localhost:",
    "localhost:x",
    "local host",
    "[::1",
    "[127.0.0.1]",
    "[127.0.0.1]:3000",
    "[localhost]",
]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    shared = request.getfixturevalue("shared")
    settings = Settings(port=0, data_dir=tmp_path_factory.mktemp("named"), allowed_hosts=("chat.home.example",))
    server = type(shared)(ScriptedEngine, settings).ready()
    yield server
    server.close()


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_allowed_host_is_accepted(named: Any, host: str) -> None:
    host = host.format(port=named.address.rpartition(":")[2])
    assert named.client.get("/livez", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_unknown_host_is_rejected(named: Any, host: str) -> None:
    answer = named.client.get("/livez", headers={"Host": host})
    assert answer.status_code in (421, 400)
    assert (answer.status_code == 421) or host in ("", "local host"), "only malformed hosts may be rejected earlier"
    assert answer.status_code == 400 or "--allow-host" in answer.text
    assert "evil" not in answer.text


def test_missing_or_duplicate_host_is_rejected(named: Any) -> None:
    for hosts in ("Host: localhost\r\nHost: localhost\r\n", "Host: localhost\r\nHost: evil.example\r\n", ""):
        answer = named.raw(f"GET /livez HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
        assert answer.split()[1] in (b"400", b"421")
    assert named.raw(b"GET /livez HTTP/1.0\r\n\r\n").split()[1] == b"421"


def test_absolute_request_target_does_not_override_host(named: Any) -> None:
    answer = named.raw(b"GET http://localhost/livez HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
    assert answer.split()[1] == b"421"


HOST = {"Host": "localhost:3000"}
SITES = [
    ({}, 404),
    ({"Sec-Fetch-Site": "same-origin"}, 404),
    ({"Sec-Fetch-Site": "none"}, 404),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:3000"}, 403),
    ({"Sec-Fetch-Site": ""}, 403),
    ({"Origin": "http://localhost:3000"}, 404),
    ({"Origin": "https://localhost:3000"}, 404),
    ({"Origin": "http://LOCALHOST:3000"}, 404),
    ({"Origin": "http://localhost:3001"}, 403),
    ({"Origin": "http://localhost"}, 403),
    ({"Origin": "http://127.0.0.1:3000"}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://localhost:3000.evil.example"}, 403),
    ({"Origin": "http://x@localhost:3000"}, 403),
    ({"Origin": "http://localhost:3000/"}, 403),
    ({"Origin": "file://localhost:3000"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": ""}, 403),
    ({"Origin": "http://["}, 403),
]


@pytest.mark.parametrize(("headers", "status"), SITES)
def test_state_changes_require_same_origin(shared: Any, headers: dict[str, str], status: int) -> None:
    url = f"/chats/{new_id()}/delete"
    assert shared.client.post(url, headers=HOST | headers).status_code == status
    for method in ("DELETE", "PUT", "PATCH", "FROB"):
        refused = shared.client.request(method, url, headers=HOST | headers).status_code
        assert refused == (403 if status == 403 else 405)
    assert shared.client.get("/livez", headers=HOST | headers).status_code == 200, "reads are always allowed"


@pytest.mark.parametrize("path", ["/", "/livez", "/health", "/nowhere", "/login", "/chats/x", "/static/x"])
def test_every_response_has_security_headers(shared: Any, path: str) -> None:
    answers = [shared.client.get(path) for _ in range(2)]
    policies = [answer.headers["content-security-policy"] for answer in answers]
    assert policies[0] != policies[1], "a nonce must not be reused"
    nonce = policies[0].partition("'nonce-")[2].partition("'")[0]
    assert len(nonce) >= 20
    assert policies[0] == content_security_policy(nonce)
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


def test_content_security_policy_allows_only_own_origin() -> None:
    assert content_security_policy("N") == (
        "default-src 'none'; script-src 'self' 'nonce-N'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


def test_rejections_have_content_security_policy(shared: Any) -> None:
    for answer in (
        shared.client.get("/", headers={"Host": "evil.example"}),
        shared.client.post("/", headers={"Origin": "null"}),
    ):
        assert "content-security-policy" in answer.headers and "text/plain" in answer.headers["content-type"]


def cookie_of(server: Any) -> str:
    """Return the name of the server's session cookie."""
    return f"{COOKIE}_{server.address.rpartition(':')[2]}"


def test_sessions_of_two_servers_on_one_host_are_independent(start: Start, tmp_path: Path) -> None:
    one = start(ScriptedEngine(), api_key=KEY, data_dir=tmp_path / "one").ready()
    two = start(ScriptedEngine(), api_key="another key of the same length", data_dir=tmp_path / "two").ready()
    with httpx.Client(timeout=60) as browser:
        for server, key in ((one, KEY), (two, "another key of the same length")):
            assert browser.post(f"{server.address}/login", data={"api_key": key}).status_code == 303
        assert {cookie.name for cookie in browser.cookies.jar} == {cookie_of(one), cookie_of(two)}
        assert [browser.get(server.address).status_code for server in (one, two)] == [200, 200]
        assert browser.post(f"{two.address}/logout").status_code == 303
        assert [browser.get(server.address).status_code for server in (one, two)] == [200, 401]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:3000", "notso_session_3000"),
        ("[::1]:3000", "notso_session_3000"),
        ("chat.example.org", COOKIE),
        ("[::1]", COOKIE),
        ("", COOKIE),
        ("localhost:x=1;", COOKIE),
    ],
)
def test_session_cookie_name_includes_port(host: str, name: str) -> None:
    assert cookie_name(Request({"type": "http", "headers": [(b"host", host.encode())]})) == name


def test_guarded_routes_require_api_key(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY)
    server.wait(lambda: server.client.get("/health").status_code == 200)
    guarded_paths = ["/", "/status", f"/chats/{new_id()}", f"/generations/{new_generation_id()}/events"]
    for path in guarded_paths:
        assert server.client.get(path).status_code == 401
        assert server.client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert server.client.get(path, headers={"Authorization": f"Basic {KEY}"}).status_code == 401
        assert server.client.get(path, headers={"Cookie": f"{cookie_of(server)}={KEY}"}).status_code == 401
        assert server.client.get(f"{path}?api_key={KEY}").status_code == 401
        assert server.client.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code in (200, 404)
        assert server.client.get(path, headers={"x-api-key": KEY}).status_code in (200, 404)
        assert server.client.get(path, headers={"x-api-key": "wrong"}).status_code == 401
    assert server.client.post("/chats", data={"text": "x", "key": new_id()}).status_code == 401
    assert server.client.get("/", headers={"Accept": "text/html"}).headers["location"] == "/login"


def test_login_exchanges_api_key_for_session_cookie(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY)
    server.wait(lambda: server.client.get("/health").status_code == 200)
    wrong = server.client.post("/login", data={"api_key": "wrong"})
    assert wrong.status_code == 403 and "set-cookie" not in wrong.headers and "Incorrect key" in wrong.text
    right = server.client.post("/login", data={"api_key": f"{KEY} "})
    cookie = right.headers["set-cookie"]
    assert right.status_code == 303
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and KEY not in cookie
    assert server.client.get("/").status_code == 200
    with httpx.Client(base_url=server.address) as stranger:
        assert stranger.get("/").status_code == 401


def test_every_presented_key_must_be_valid(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY).ready()
    held = f"Bearer {KEY}"
    server.client.post("/login", data={"api_key": KEY})  # A valid session cookie does not make up for a wrong key.
    rows: list[tuple[list[tuple[str, str]], int]] = [
        ([("Authorization", held), ("x-api-key", KEY)], 200),
        ([("Authorization", held), ("x-api-key", "wrong")], 401),
        ([("Authorization", "Bearer wrong"), ("x-api-key", KEY)], 401),
        ([("Authorization", held), ("Authorization", "Bearer wrong")], 401),
        ([("x-api-key", KEY), ("x-api-key", "")], 401),
        ([("x-api-key", "wrong")], 401),
        ([], 200),
    ]
    for headers, status in rows:
        assert server.client.get("/v1/models", headers=headers).status_code == status, headers


def test_logout_invalidates_session_cookie(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY).ready()
    server.client.post("/login", data={"api_key": KEY})
    cookie = {"Cookie": f"{cookie_of(server)}={server.client.cookies[cookie_of(server)]}"}
    assert '<form method="post" action="/logout">' in server.client.get("/settings").text
    assert server.client.post("/logout", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    out = server.client.post("/logout")
    assert (out.status_code, out.headers["location"]) == (303, "/login") and not server.client.cookies
    assert server.client.get("/", headers=cookie).status_code == 401, "logout must invalidate copies of the cookie"


@pytest.mark.parametrize(("path", "form"), [("/logout", {}), ("/login", {"api_key": KEY})])
def test_end_of_a_session_ends_its_streams_only(start: Start, path: str, form: dict[str, str]) -> None:
    server = start(ScriptedEngine(), api_key=KEY).ready()
    browser, other = (httpx.Client(base_url=server.address, timeout=60) for _ in range(2))
    for client in (browser, other):
        client.post("/login", data={"api_key": KEY})
    tab = {"tab": new_id()}
    bearer = {"Authorization": f"Bearer {KEY}"}
    with (
        browser.stream("GET", "/feed", params=tab) as feed,
        other.stream("GET", "/feed", params=tab) as second,
        browser.stream("GET", "/feed", params=tab, headers=bearer) as third,
    ):
        assert [each.status_code for each in (feed, second, third)] == [200, 200, 200]
        assert browser.post(path, data=form).status_code == 303, "the response arrives"
        with pytest.raises(httpx.RemoteProtocolError):
            feed.read()
        server.on_loop(lambda: server.chat.feed.announce("local", new_id(), ""))
        for stream in (second, third):
            assert any(b"chats" in each for each in stream.iter_raw()), "the stream of another session or key ended"


def test_short_request_completes_after_the_end_of_its_session(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "SESSION_END_SECONDS", 600.0)
    is_waiting, has_ended, end_session = threading.Event(), asyncio.Event(), KeyRing.end_session

    async def end_in_reverse_order(ring: KeyRing, token: str, request: Any) -> None:
        if not is_waiting.is_set():
            is_waiting.set()
            await has_ended.wait()
        await end_session(ring, token, request)
        has_ended.set()

    server = start(ScriptedEngine(), api_key=KEY).ready()
    server.client.post("/login", data={"api_key": KEY})
    monkeypatch.setattr(KeyRing, "end_session", end_in_reverse_order)
    with ThreadPoolExecutor(1) as pool:
        first_click = pool.submit(httpx.post, f"{server.address}/logout", cookies=server.client.cookies, timeout=60)
        assert is_waiting.wait(60)
        assert server.client.post("/logout").status_code == 303
        assert first_click.result().status_code == 303


def test_logout_redirects_home_without_api_key(shared: Any) -> None:
    assert "/logout" not in shared.client.get("/settings").text
    assert shared.client.post("/logout").headers["location"] == "/"


def test_sessions_expire_after_idle_week_or_one_month(start: Start) -> None:
    server = start(ScriptedEngine(), api_key=KEY).ready()
    now = 0.0
    server.app.state.key_ring = KeyRing(KEY, clock=lambda: now)
    server.client.post("/login", data={"api_key": KEY})
    for days, status in [(6, 200), (6, 200), (7, 401), (0, 401)]:
        now += days * 86_400
        assert server.client.get("/").status_code == status, "a session expires after a week without use"
    server.client.post("/login", data={"api_key": KEY})
    for days, status in [(6, 200), (6, 200), (6, 200), (6, 200), (5.9, 200), (0.2, 401)]:
        now += days * 86_400
        assert server.client.get("/").status_code == status, "a session expires a month after sign-in"


class Storage(LocalExchange):
    """A key-value memory shared by several servers. Messages arrive only if a test delivers them."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self.subscribers: list[Subscriber] = []
        self.messages: list[Body] = []
        self.after_read: Callable[[], Awaitable[None]] | None = None
        self.is_reachable = True
        self.is_unreachable = False  # as noticed by the latest messages

    def send(self, kind: str, **body: Any) -> None:
        self.messages.append(body)

    def subscribe(self, kind: str, subscriber: Subscriber) -> None:
        self.subscribers.append(subscriber)

    def deliver(self) -> None:
        for body in self.messages:
            for subscriber in self.subscribers:
                subscriber(body)
        self.messages.clear()

    async def set_value(self, name: str, value: str, seconds: float) -> None:
        self.values[name] = value

    async def get_value(self, name: str, if_unreachable: str | None = None) -> str | None:
        value = self.values.get(name) if self.is_reachable else if_unreachable
        action, self.after_read = self.after_read, None
        if action is not None:
            await action()
        return value


@pytest.mark.parametrize("is_heard", [True, False], ids=["message arrives", "message is lost"])
@pytest.mark.parametrize("reads", [0, 1, 2])
def test_logout_wins_over_a_replica_that_loads_the_session(reads: int, is_heard: bool) -> None:
    """The user signs out before, during or after the reads with which another replica loads the session."""

    async def scenario() -> None:
        now, storage = 1e9, Storage()
        here, there, third = (KeyRing(KEY, lambda: now, storage=storage) for _ in range(3))
        token = await here.new_session()

        async def sign_out() -> None:
            await here.end_session(token)
            if is_heard:
                storage.deliver()

        async def sign_out_at_next_read() -> None:
            storage.after_read = sign_out

        storage.after_read = (None, sign_out, sign_out_at_next_read)[reads]
        if reads == 0:
            await sign_out()
        await there._resume_session(token)
        now += SESSION_RENEWAL_SECONDS * (not is_heard)
        for ring in (here, there, third, there):
            assert await ring._resume_session(token) is None
        assert not there._sessions and not third._sessions

    asyncio.run(scenario())


def test_concurrent_requests_do_not_revive_a_revoked_session() -> None:
    async def scenario() -> None:
        storage = Storage()
        here, there = KeyRing(KEY, storage=storage), KeyRing(KEY, storage=storage)
        token, seen = await here.new_session(), []
        await here.end_session(token)

        async def ask_again_at_next_read() -> None:
            async def ask_again() -> None:
                seen.append(await there._resume_session(token))

            storage.after_read = ask_again

        storage.after_read = ask_again_at_next_read
        assert await there._resume_session(token) is None and seen == [None]

    asyncio.run(scenario())


def test_storage_that_fails_before_the_check_does_not_revive_a_revoked_session() -> None:
    async def scenario() -> None:
        now, storage = 1e9, Storage()
        here, there = KeyRing(KEY, lambda: now, storage=storage), KeyRing(KEY, lambda: now, storage=storage)
        token, kept = await here.new_session(), await here.new_session()
        await here.end_session(token)

        async def fail() -> None:
            storage.is_reachable = False

        storage.after_read = fail
        for ring in (there, here):
            assert await ring._resume_session(token) is None
            storage.is_reachable, storage.after_read = True, fail
        assert not there._sessions
        now, storage.is_reachable = now + SESSION_RENEWAL_SECONDS, False
        assert await here._resume_session(kept)  # a known session continues

    asyncio.run(scenario())


def test_known_session_does_not_wait_for_unreachable_storage() -> None:
    """The session is checked when the storage is reachable again."""

    async def scenario() -> None:
        now, storage = 1e9, Storage()
        here, there = KeyRing(KEY, lambda: now, storage=storage), KeyRing(KEY, lambda: now, storage=storage)
        token = await here.new_session()
        assert await there._resume_session(token)
        await here.end_session(token)  # the message is lost
        now, storage.is_unreachable = now + SESSION_RENEWAL_SECONDS, True

        async def fail() -> None:
            raise AssertionError

        storage.after_read = fail
        assert await there._resume_session(token)
        storage.is_unreachable, storage.after_read = False, None
        assert await there._resume_session(token) is None

    asyncio.run(scenario())


def test_session_idle_at_one_replica_continues_if_used_at_another() -> None:
    async def scenario() -> None:
        now, storage = 1e9, Storage()
        here, there = KeyRing(KEY, lambda: now, storage=storage), KeyRing(KEY, lambda: now, storage=storage)
        token = await here.new_session()
        for _ in range(8):
            now += 86_400
            assert await there._resume_session(token)
        assert await here._resume_session(token) and await there._resume_session(token)
        now += 29 * 86_400
        assert not await here._resume_session(token) and not await there._resume_session(token)

    asyncio.run(scenario())


def test_renewal_restores_a_session_that_the_shared_storage_lost() -> None:
    async def scenario() -> None:
        now, storage = 1e9, Storage()
        here, there = KeyRing(KEY, lambda: now, storage=storage), KeyRing(KEY, lambda: now, storage=storage)
        token = await here.new_session()
        storage.values.clear()
        now += SESSION_RENEWAL_SECONDS
        assert await here._resume_session(token) and await there._resume_session(token)

    asyncio.run(scenario())


def test_changed_access_rules_invalidate_sessions() -> None:
    """A changed access rule invalidates sessions, so that a removed operator does not keep operator rights."""

    async def known(cookie: str, ring: KeyRing) -> Caller | None:
        headers = [(b"cookie", f"{COOKIE}={cookie}".encode())]
        return await ring.caller(Request({"type": "http", "headers": headers}))

    async def scenario() -> None:
        storage, bob = Storage(), Caller("oidc:bob", "bob", is_operator=True)
        cookie = await KeyRing(KEY, storage=storage, rules="bob may").new_session(bob)
        assert await known(cookie, KeyRing(KEY, storage=storage, rules="bob may")) == bob
        for other in (KeyRing(KEY, storage=storage), KeyRing("another key", storage=storage, rules="bob may")):
            assert await known(cookie, other) is None
        (name, value) = storage.values.popitem()
        storage.values[name] = value.replace("bob", "ann")
        assert await known(cookie, KeyRing(KEY, storage=storage, rules="bob may")) is None

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/backup", "/export", "/search?q=x", "/documents?q=x", "/archive?sort=title&q=%78"])
def test_cross_site_reads_of_costly_pages_are_rejected(shared: Any, path: str) -> None:
    assert shared.client.get(path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert shared.client.get(path, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("kind", ["md", "json", "html"])
def test_cross_site_exports_of_a_chat_are_rejected(shared: Any, kind: str) -> None:
    path = f"/chats/{new_id()}/export/{kind}"
    assert shared.client.get(path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert shared.client.get(path, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 404


@pytest.mark.parametrize("path", ["/documents", "/archive?q=", "/archive?sort=title"])
def test_other_sites_may_link_to_lists(shared: Any, path: str) -> None:
    assert shared.client.get(path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_session_limit_evicts_owner_with_most_sessions() -> None:
    """When there are too many sessions, the oldest session of the owner with the most sessions is removed."""

    async def nobody(request: Any) -> None:
        return None

    async def run() -> None:
        ring, modest = KeyRing(KEY, sign_ins=(nobody,)), Caller("modest", "modest")
        kept = [await ring.new_session(modest) for _ in range(3)]
        greedy = [await ring.new_session(Caller("greedy", "greedy")) for _ in range(MAX_SESSIONS_MULTIUSER + 50)]
        assert [await ring._resume_session(each) for each in kept] == [modest] * 3
        assert [await ring._resume_session(each) is None for each in greedy[52:54]] == [True, False]
        await ring.end_session(kept[0])
        assert await ring._resume_session(kept[0]) is None and await ring._resume_session(kept[1]) == modest

    asyncio.run(run())
