"""Sign-in at an OpenID provider that the test runs: verified users get access, and forged responses do not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from scripted_engine import ScriptedEngine
from web.sign_in.oidc_provider import CLIENT, SECRET, Provider, rsa_key, running_provider

from notso.web.sign_in import oidc as oidc_module
from notso.web.values.errors import SettingsError, SignInError
from notso.web.values.ids import new_id
from notso.web.values.sign_in import OidcSettings, SignInSettings

Start = Callable[..., Any]


@pytest.fixture
def provider() -> Iterator[Provider]:
    with running_provider() as running:
        yield running


@pytest.fixture
def serve(start: Start, provider: Provider) -> Callable[..., Any]:
    """Return a function that starts a server with OpenID sign-in. The redirect address is corrected once the port is
    known."""

    def begin(operators: tuple[str, ...] = (), base_path: str = "", **chosen: Any) -> Any:
        given = {
            "issuer": provider.issuer,
            "client_id": CLIENT,
            "client_secret": SECRET,
            "public_url": "http://127.0.0.1",
        }
        oidc = OidcSettings(**(given | chosen))
        sign_in = SignInSettings(oidc=oidc, operators=operators)
        server = start(ScriptedEngine(), sign_in=sign_in, base_path=base_path)
        server.app.state.oidc._redirect = server.address + base_path + oidc_module.CALLBACK
        return server

    return begin


def browser(server: Any) -> httpx.Client:
    return httpx.Client(base_url=server.address, timeout=60)


def sent_back(client: httpx.Client, base_path: str = "") -> httpx.Response:
    """Follow the redirects to the provider and back; return the server's response."""
    there = client.get(f"{base_path}/login/oidc")
    assert there.status_code == 303, there.text
    consented = httpx.get(there.headers["location"])
    return client.get(consented.headers["location"])


def test_provider_user_can_sign_in_and_out(serve: Callable[..., Any], provider: Provider) -> None:
    server = serve(claim="email", operators=("ann@Example.org",))
    client = browser(server)
    assert client.get("/", headers={"Accept": "text/html"}).headers["location"] == "/login"
    assert 'href="/login/oidc"' in client.get("/login").text
    back = sent_back(client)
    assert back.status_code == 200 and 'content="0;url=/"' in back.text
    assert "samesite=strict" in back.headers["set-cookie"].lower() and "httponly" in back.headers["set-cookie"].lower()
    assert client.get("/").status_code == 200
    assert client.post("/chats", data={"text": "Hello", "key": new_id()}).status_code == 303
    assert len(server.on_loop(lambda: server.shared.store.chats("oidc:ann@example.org"))) == 1
    page = client.get("/operator")
    assert page.status_code == 200 and "signed in" in page.text and "oidc:ann@example.org" in page.text
    assert client.post("/logout").status_code == 303 and client.get("/").status_code == 401
    assert "signed out" in str(server.on_loop(lambda: server.shared.accounts.store.audit(10)))


def test_secret_is_sent_in_the_form_to_a_provider_that_accepts_only_that(
    serve: Callable[..., Any], provider: Provider
) -> None:
    provider.secret_in_header = False
    assert sent_back(browser(serve())).status_code == 200


def test_sign_in_below_a_base_path_ends_there(serve: Callable[..., Any], provider: Provider) -> None:
    back = sent_back(browser(serve(base_path="/notso")), "/notso")
    assert back.status_code == 200 and 'content="0;url=/notso/"' in back.text


def test_users_cannot_open_each_others_chats(serve: Callable[..., Any], provider: Provider) -> None:
    server = serve()
    clients = []
    for name in ("ann", "bob"):
        provider.claims["sub"] = name
        clients.append(browser(server))
        assert sent_back(clients[-1]).status_code == 200
    made = clients[0].post("/chats", data={"text": "Mine", "key": new_id()})
    assert made.status_code == 303
    where = made.headers["location"]
    assert [client.get(where).status_code for client in clients] == [200, 404]
    assert [client.get("/operator").status_code for client in clients] == [403, 403]


def test_concurrent_sign_ins_share_a_slow_request_and_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for one timeout after the other."""
    issuer = "https://example.org"
    facts = {"issuer": issuer, "authorization_endpoint": issuer, "token_endpoint": issuer, "jwks_uri": f"{issuer}/keys"}
    keys = {"keys": [rsa_key("one").as_dict(private=False)]}

    async def scenario() -> None:
        provider = oidc_module.OidcProvider(OidcSettings(issuer=issuer, client_id="x", public_url=issuer), ())
        asked, answers = list[str](), dict[str, Any]()
        go = asyncio.Event()

        async def fetch(address: str) -> Any:
            asked.append(address)
            await go.wait()
            if not answers:
                raise SignInError("too slow")
            return answers["keys" if address.endswith("keys") else "facts"]

        async def all_of(what: Callable[[], Any]) -> list[Any]:
            """Return the results of three calls, of which one is canceled."""
            asked.clear()
            go.clear()
            tasks = [asyncio.ensure_future(what()) for _ in range(3)]
            while not asked:
                await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.sleep(0)
            go.set()
            return (await asyncio.gather(*tasks, return_exceptions=True))[1:]

        monkeypatch.setattr(provider, "_fetch_json", fetch)
        failed = await all_of(lambda: provider.begin("browser"))
        assert [str(each) for each in failed] == ["too slow"] * 2 and len(asked) == 1
        answers.update(facts=facts, keys=keys)
        assert all(each.startswith(issuer) for each in await all_of(lambda: provider.begin("browser")))
        assert len(asked) == 1
        key_sets = await all_of(provider._key_set)
        assert len(asked) == 1 and key_sets[0] is key_sets[1] is not None

    asyncio.run(scenario())


def test_email_domain_identifies_the_user_in_any_case(serve: Callable[..., Any], provider: Provider) -> None:
    server, chats = serve(claim="email"), []
    for email in ("ann@example.org", "ann@Example.ORG", "Ann@example.org"):
        provider.claims["email"] = email
        client = browser(server)
        sent_back(client)
        chats.append(client.post("/chats", data={"text": "Mine", "key": new_id()}).headers["location"])
    assert [client.get(where).status_code for where in chats] == [404, 404, 200]
    assert len(server.on_loop(lambda: server.shared.store.chats("oidc:ann@example.org"))) == 2


WRONG = [
    "nonce",
    "audience",
    "audiences",
    "expired",
    "no expiry",
    "token issuer",
    "unsigned",
    "public key as secret",
    "key",
    "long token",
]


def test_each_fault_of_an_id_token_returns_403(
    serve: Callable[..., Any], provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_module, "KEYS_REFRESH_SECONDS", 0.0)
    client, statuses = browser(serve()), {}
    for wrong in WRONG:
        provider.wrong = wrong
        statuses[wrong] = sent_back(client).status_code
    assert set(statuses.values()) == {403}, statuses


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_id_token_is_rejected(
    serve: Callable[..., Any], provider: Provider, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(oidc_module, "KEYS_REFRESH_SECONDS", 0.0)
    server = serve()
    client = browser(server)
    provider.wrong = wrong
    refused = sent_back(client)
    assert refused.status_code == 403 and "notso_session" not in refused.headers.get("set-cookie", "")
    assert client.get("/").status_code == 401
    server.on_loop(server.shared.accounts.flush)
    assert "could not sign in" in str(server.on_loop(lambda: server.shared.accounts.store.audit(10)))
    provider.wrong = ""
    assert sent_back(client).status_code == 200


@pytest.mark.parametrize("wrong", ["issuer", "silent", "much", "compressed"])
def test_unavailable_or_invalid_provider_returns_502(serve: Callable[..., Any], provider: Provider, wrong: str) -> None:
    server = serve()
    provider.wrong = wrong
    told = browser(server).get("/login/oidc")
    assert told.status_code == 502 and "the provider" in told.text
    provider.wrong = ""
    assert sent_back(browser(server)).status_code == 200


def test_callback_is_valid_once_and_only_in_the_same_browser(serve: Callable[..., Any], provider: Provider) -> None:
    server = serve()
    client, other = browser(server), browser(server)
    there = client.get("/login/oidc").headers["location"]
    back = httpx.get(there).headers["location"]
    assert other.get(back).status_code == 403  # in another browser, which would be login CSRF
    assert other.get("/login/oidc").status_code == 303 and other.get(back).status_code == 403
    assert client.get(back).status_code == 200 and client.get(back).status_code == 403
    state = parse_qs(urlsplit(there).query)["state"][0]
    for query in ("", "state=x&code=y", f"state={state}", "error=access_denied"):
        assert client.get(f"/login/oidc/callback?{query}").status_code == 403


def test_pending_sign_in_survives_many_others(serve: Callable[..., Any], provider: Provider) -> None:
    server = serve()
    client = browser(server)
    back = httpx.get(client.get("/login/oidc").headers["location"]).headers["location"]

    async def begin_many() -> None:
        for number in range(2_000):
            await server.app.state.oidc.begin(str(number))

    server.on_loop(begin_many)
    assert client.get(back).status_code == 200


def test_cookie_is_secure_if_public_url_is_https(serve: Callable[..., Any], provider: Provider) -> None:
    """The cookie is secure even if the proxy in front uses plain HTTP and is not trusted."""
    for address, is_secure in (("https://notso.example", True), ("http://127.0.0.1", False)):
        server = serve(public_url=address)
        assert ("secure" in browser(server).get("/login/oidc").headers["set-cookie"].lower()) is is_secure
        server.close()


def test_expired_or_malformed_sign_in_state_returns_403(
    serve: Callable[..., Any], provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    client = browser(server)
    back = httpx.get(client.get("/login/oidc").headers["location"]).headers["location"]
    monkeypatch.setattr(oidc_module, "FLOW_SECONDS", -1.0)
    assert client.get(back).status_code == 403
    client.get("/login/oidc")
    for state in ("", ".", "nan." + "0" * 64, "é.ü", "1"):
        assert client.get("/login/oidc/callback", params={"state": state, "code": "x"}).status_code == 403


def test_rotated_provider_keys_are_fetched_again(
    serve: Callable[..., Any], provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_module, "KEYS_REFRESH_SECONDS", 0.0)
    server = serve()
    assert sent_back(browser(server)).status_code == 200
    provider.key = rsa_key("two")
    assert sent_back(browser(server)).status_code == 200
    assert provider.asked.count("/keys") == 2


@pytest.mark.parametrize(
    "other",
    [
        {"kty": "EC", "crv": "P-999", "x": "AA", "y": "AA", "kid": "new"},
        {"kty": "OKP", "crv": "Ed999", "x": "AA", "kid": "new"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "not on the curve"},
        {"kty": "RSA", "n": "!", "e": "AQAB", "kid": "not base64"},
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA", "kid": "new"},
        {"kid": "no type"},
        "no key",
    ],
    ids=str,
)
def test_unsupported_provider_keys_are_ignored(serve: Callable[..., Any], provider: Provider, other: Any) -> None:
    provider.other_keys = [other]
    assert sent_back(browser(serve())).status_code == 200
    assert len(oidc_module._import_keys({"keys": [other, rsa_key("one").as_dict(private=False)]}).keys) == 1
    for keys in ([other], [], None, {"kty": "RSA"}):
        with pytest.raises(SignInError, match="keys cannot be read"):
            oidc_module._import_keys({"keys": keys})


def test_only_allowed_verified_emails_can_sign_in(serve: Callable[..., Any], provider: Provider) -> None:
    server = serve(claim="email", allowed=("bob@example.org", "*@example.com"))
    for email, status in (
        ("ann@example.org", 403),
        ("bob@example.org", 200),
        ("x@example.com", 200),
        ("x@sub.example.com", 403),
        ("", 403),
        (7, 403),
        ("a\nb@example.com", 403),
    ):
        provider.claims["email"] = email
        assert sent_back(browser(server)).status_code == status, email
    for verified in (False, "false"):  # Some providers send this flag as a string.
        provider.claims |= {"email": "bob@example.org", "email_verified": verified}
        assert sent_back(browser(server)).status_code == 403


@pytest.mark.parametrize("assumed", [False, True])
def test_email_without_verified_claim_follows_the_setting(
    serve: Callable[..., Any], provider: Provider, assumed: bool
) -> None:
    server = serve(claim="email", assume_email_verified=assumed)
    provider.claims.pop("email_verified")
    assert sent_back(browser(server)).status_code == (200 if assumed else 403)
    for said, status in ((True, 200), ("true", 200), (False, 403), ("false", 403), (None, 403), (1.5, 403)):
        provider.claims["email_verified"] = said
        assert sent_back(browser(server)).status_code == status, said


def test_repeated_sign_in_failures_are_batched_in_the_audit_log(serve: Callable[..., Any]) -> None:
    server = serve()
    accounts, written = server.shared.accounts, []
    write = accounts.store.write

    async def noting(work: Any) -> Any:
        written.append(work)
        return await write(work)

    accounts.store.write = noting
    told = {server.client.get("/login/oidc/callback?state=x&code=y").status_code for _ in range(50)}
    told |= {server.client.post("/login", data={"api_key": "notso-wrong"}).status_code for _ in range(50)}
    assert told == {403} and len(written) <= 2, "repeated failures are written to the log only now and then"
    server.on_loop(lambda: accounts._write_audit(all_of_it=True))
    log = server.on_loop(lambda: accounts.store.audit(1000))
    assert len(log) <= 6 and sum(each.count for each in log) == 100


def test_oidc_routes_return_404_without_provider(start: Start) -> None:
    server = start(ScriptedEngine())
    assert server.client.get("/login/oidc").status_code == server.client.get("/login/oidc/callback").status_code == 404
    assert "/login/oidc" not in server.client.get("/login").text


def test_missing_oidc_extra_raises_settings_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "notso.web.sign_in.oidc", None)
    oidc = OidcSettings(issuer="https://example.org", client_id="x", public_url="https://example.org")
    with pytest.raises(SettingsError, match="extra oidc is not installed"):
        start(ScriptedEngine(), sign_in=SignInSettings(oidc=oidc))
