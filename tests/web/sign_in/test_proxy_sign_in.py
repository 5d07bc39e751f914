"""Sign-in by a proxy that names the user in a header, accepted only from the proxy's own address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from starlette.requests import Request

from notso.web.edge.access import Caller
from notso.web.sign_in.methods import ProxyHeader
from notso.web.sign_in.users import owner_named
from notso.web.values.settings import Settings
from notso.web.values.sign_in import OidcSettings, ProxySignIn, SignInSettings

LOOKS_LIKE_ANN = (
    "ann\u00a0",
    "\u00a0ann",
    "ann\u2003",
    "a\u200bnn",
    "ann\u202e",
    "ann\ufe0f",
    "ann\x85",
    "ann\U000e0061",
)


def named(address: str | None, *values: str, addresses: tuple[str, ...] = ("10.0.0.0/8", "::1")) -> Caller | None:
    headers = [(b"x-user", value.encode()) for value in values]
    client = (address, 5) if address is not None else None
    scope: dict[str, Any] = {"type": "http", "headers": headers, "client": client}
    way = ProxyHeader(ProxySignIn(header="X-User", addresses=addresses), ("ann",))
    return asyncio.run(way(Request(scope)))


def test_user_header_is_accepted_only_from_trusted_proxy() -> None:
    assert named("10.1.2.3", "ann") == Caller("proxy:ann", "ann", is_operator=True)
    assert named("::ffff:10.1.2.3", "jürgen") == Caller("proxy:jürgen", "jürgen")
    assert named("::1", " bob ") == Caller("proxy:bob", "bob")
    mapped = ("::ffff:10.0.0.0/104", "::ffff:192.0.2.1")  # as a socket for IPv6 shows IPv4 addresses
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "192.0.2.1"):
        assert named(address, "ann", addresses=mapped) is not None
    assert named("192.0.2.2", "ann", addresses=mapped) is None
    for address in ("11.0.0.1", "127.0.0.1", "::2", "testclient", "", None):
        assert named(address, "ann") is None
    for values in ((), ("",), (" ",), ("ann", "bob"), ("a\tb",), ("x" * 129,), *((name,) for name in LOOKS_LIKE_ANN)):
        assert named("10.1.2.3", *values) is None


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 200), ("192.0.2.1", 401)])
def test_only_trusted_proxy_requests_with_one_user_header_are_accepted(
    start: Callable[..., Any], address: str, status: int
) -> None:
    proxy = ProxySignIn(header="X-Forwarded-User", addresses=(address,))
    server = start(ScriptedEngine(), sign_in=SignInSettings(proxy=proxy, operators=("ann",))).ready()
    for path in ("/", "/v1/models", "/operator"):
        assert server.client.get(path, headers={"X-Forwarded-User": "ann"}).status_code == status
        assert server.client.get(path).status_code == 401
        two = [("X-Forwarded-User", "ann"), ("X-Forwarded-User", "bob")]
        assert server.client.get(path, headers=two).status_code == 401
    passed_on = {"X-Forwarded-User": "ann", "Authorization": "Basic YW5uOnNlY3JldA=="}
    assert server.client.get("/", headers=passed_on).status_code == status
    assert server.client.get("/", headers=passed_on | {"Authorization": "Bearer x"}).status_code == 401
    assert server.client.get("/operator", headers={"X-Forwarded-User": "bob"}).status_code == (
        403 if status == 200 else 401
    )


def test_case_of_an_operators_domain_is_ignored(start: Callable[..., Any]) -> None:
    proxy = ProxySignIn(header="X-User", addresses=("127.0.0.1",))
    server = start(ScriptedEngine(), sign_in=SignInSettings(proxy=proxy, operators=("ann@example.org",))).ready()
    for name, status in (("ann@Example.ORG", 200), ("Ann@example.org", 403), ("ann@example.or", 403)):
        assert server.client.get("/operator", headers={"X-User": name}).status_code == status


def test_proxy_trust_uses_connection_address_not_x_forwarded_for(start: Callable[..., Any]) -> None:
    """The address of the connection counts, not the one in X-Forwarded-For."""
    for trusted, status in (("127.0.0.1", 200), ("192.0.2.1", 401)):
        proxy = ProxySignIn(header="X-User", addresses=(trusted,))
        server = start(ScriptedEngine(), sign_in=SignInSettings(proxy=proxy), trusted_proxies=("127.0.0.1",)).ready()
        headers = {"X-User": "ann", "X-Forwarded-For": "192.0.2.1"}
        assert server.client.get("/v1/models", headers=headers).status_code == status
        server.close()


def test_users_of_each_sign_in_method_can_be_named() -> None:
    proxy = ProxySignIn(header="X-User", addresses=("10.0.0.1",))
    oidc = OidcSettings(issuer="https://a.b", client_id="x", public_url="https://c.d")

    def owner(name: str, **methods: Any) -> str | None:
        return asyncio.run(owner_named(Settings(sign_in=SignInSettings(**methods)), None, name))

    both = {"proxy": proxy, "oidc": oidc}
    assert [owner(name, **both) for name in ("ann", "proxy:ann", "oidc:ann", "x:ann", "oidc:")] == [
        *("proxy:ann", "proxy:ann", "oidc:ann", "proxy:x:ann", None)
    ]
    assert [owner(name, oidc=oidc) for name in ("ann", "oidc:ann", "proxy:ann")] == [
        *("oidc:ann", "oidc:ann", "oidc:proxy:ann")
    ]
    assert owner("ann") is owner("oidc:ann") is None
    assert owner("Ann@Example.ORG", oidc=replace(oidc, claim="email")) == "oidc:Ann@example.org"
    assert owner("Ann@Example.ORG", oidc=oidc) == "oidc:Ann@Example.ORG"
