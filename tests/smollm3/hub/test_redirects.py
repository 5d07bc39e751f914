"""Redirects of downloads: each address is checked before it is requested."""

from __future__ import annotations

import socket
from typing import Any

import httpx2
import pytest

from notso.smollm3.errors import DownloadError
from notso.smollm3.hub import download, registry

HUB = "https://hub.example/file"
ADDRESSES = {
    "hub.example": "151.101.1.1",
    "cdn.example": "151.101.2.2",
    "inside.example": "10.1.2.3",
    "metadata.example": "169.254.169.254",
    "six.example": "fd00::7",
    "mapped.example": "::ffff:127.0.0.1",
    "shared.example": "100.64.0.1",
    "site.example": "fec0::1",
    "nat.example": "64:ff9b::10.0.0.1",
    "localnat.example": "64:ff9b:1::a00:1",
    "tunnel.example": "2002:7f00:1::",
    "compatible.example": "::127.0.0.1",
    "multicast.example": "ff0e::1",
}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        address = ADDRESSES.get(host, host)
        if address.endswith(".example"):
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return real(address, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def follow(chain: dict[str, str], start: str = HUB, **options: Any) -> tuple[str, list[tuple[str, str | None]]]:
    """Return the address of the last response, and every requested address with its Authorization header."""
    asked: list[tuple[str, str | None]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        url = str(request.url)
        asked.append((url, request.headers.get("Authorization")))
        return httpx2.Response(302, headers={"Location": chain[url]}) if url in chain else httpx2.Response(200)

    try:
        with (
            httpx2.Client(transport=httpx2.MockTransport(answer)) as session,
            download.stream_following_redirects(
                session, "GET", start, headers={"Authorization": "Bearer secret"}, timeout=1.0, **options
            ) as response,
        ):
            return str(response.url), asked
    except DownloadError as error:
        assert all("//hub." in url or "//inside." in url for url, _ in asked), "a rejected address was requested"
        assert str(error).isprintable()
        raise


def test_redirect_to_cdn_is_followed_without_the_token() -> None:
    url, asked = follow({HUB: "https://cdn.example/x?signed=1"})
    assert url == "https://cdn.example/x?signed=1"
    assert asked == [(HUB, "Bearer secret"), (url, None)]


def test_token_is_dropped_for_good_when_the_origin_changes() -> None:
    chain = {
        HUB: "/elsewhere",
        "https://hub.example/elsewhere": "https://hub.example:8443/port",
        "https://hub.example:8443/port": "https://hub.example/again",
    }
    _, asked = follow(chain)
    assert [token for _, token in asked] == ["Bearer secret", "Bearer secret", None, None]


@pytest.mark.parametrize(
    "target",
    [
        "http://cdn.example/x",
        "http://hub.example/file",
        "ftp://cdn.example/x",
        "file:///etc/passwd",
        "http://127.0.0.1:8080/x",
        "https://127.0.0.1/x",
        "https://localhost/x",
        "https://[::1]/x",
        "https://[::ffff:10.0.0.1]/x",
        "https://10.0.0.1/x",
        "https://192.168.1.1/x",
        "https://2130706433/x",
        "https://0/x",
        *(f"https://{host}/x" for host in ADDRESSES if host not in ("hub.example", "cdn.example")),
    ],
)
@pytest.mark.parametrize("hops", [1, 2])
def test_redirect_to_insecure_or_local_address_is_refused(target: str, hops: int) -> None:
    chain = {HUB: target} if hops == 1 else {HUB: "/more", "https://hub.example/more": target}
    with pytest.raises(DownloadError, match=r"https only|local network"):
        follow(chain)


def test_redirect_to_a_public_address_behind_nat64_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADDRESSES, "cdn.example", "64:ff9b::151.101.2.2")
    assert follow({HUB: "https://cdn.example/x"})[0] == "https://cdn.example/x"


def test_redirect_to_an_invalid_url_is_refused() -> None:
    with pytest.raises(DownloadError, match="not a URL"):
        follow({HUB: "https://cdn.example:99999/x"})


def test_hub_on_a_local_network_may_redirect_to_local_addresses() -> None:
    url, _ = follow({"https://inside.example/file": "https://six.example/x"}, "https://inside.example/file")
    assert url == "https://six.example/x"
    with pytest.raises(DownloadError, match="https only"):
        follow({"https://inside.example/file": "http://inside.example/x"}, "https://inside.example/file")


def test_unresolvable_redirect_host_is_left_to_the_proxy() -> None:
    assert follow({HUB: "https://unknown.example/x"})[0] == "https://unknown.example/x"


def test_number_of_redirects_is_limited() -> None:
    chain = {f"https://hub.example/{i}": f"/{i + 1}" for i in range(100)}
    start = f"https://hub.example/{100 - download.MAX_REDIRECTS}"
    assert follow(chain, start)[0] == "https://hub.example/100"
    with pytest.raises(DownloadError, match="more than 5 times"):
        follow(chain | {"https://hub.example/100": "/101"}, start)
    with pytest.raises(DownloadError, match="more than 5 times"):
        follow({HUB: HUB})


def test_redirect_to_another_origin_can_be_left_unfollowed() -> None:
    url, asked = follow({HUB: "/there", "https://hub.example/there": "http://10.0.0.1/x"}, leave_origin=False)
    assert url == "https://hub.example/there" and len(asked) == 2


def test_redirect_loop_of_the_hub_is_refused(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.redirect_to = fake_hub.url
    with pytest.raises(DownloadError, match="redirects more than"):
        download.pull(official_file, sleep=lambda _seconds: None)
    assert len(fake_hub.requests) == download.MAX_REDIRECTS + 1


def test_local_hub_redirect_to_a_plain_http_host_is_refused(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.redirect_to = "http://cdn.example"
    with pytest.raises(DownloadError, match="https only"):
        download.pull(official_file, sleep=lambda _seconds: None)
    assert len(fake_hub.gets) == 1
