"""The fetch tool: asks every time, connects only to public addresses, and limits size, time and redirects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from notso.system.processes import is_public_address
from notso.web.tools import fetch
from notso.web.tools.fetch import FETCH, MAX_BYTES, parse_url, resolve_public_address
from notso.web.tools.page_text import extract_text
from notso.web.values.errors import ToolError

PAGE = b"<title>T &amp; U</title><script>bad()</script><nav>menu</nav><h1>Head</h1><p>One <b>two</b><br>three"


class Site(BaseHTTPRequestHandler):
    hosts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        status, kind, body, headers = {
            "/page": (200, "text/html; charset=utf-8", PAGE, {}),
            "/plain": (200, "text/plain", "Grüße".encode("latin-1"), {}),
            "/latin": (200, "text/plain; charset=latin-1", "Grüße".encode("latin-1"), {}),
            "/punycode": (200, "text/plain; charset=Punycode", b"Gre-xma4o", {}),
            "/idna": (200, "text/plain; charset=idna", "Grüße".encode(), {}),
            "/picture": (200, "image/png", b"x", {}),
            "/large": (200, "text/plain", b"x" * (MAX_BYTES + 1), {}),
            "/here": (302, "text/plain", b"", {"Location": "/page"}),
            "/away": (302, "text/plain", b"", {"Location": "http://169.254.169.254/latest"}),
            "/round": (302, "text/plain", b"", {"Location": "/round"}),
            "/nowhere": (302, "text/plain", b"", {"Location": "http://[::1"}),
            "/packed": (200, "text/html", b"\x1f\x8b", {"Content-Encoding": "gzip"}),
        }.get(self.path, (404, "text/plain", b"", {}))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def site(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve a page under a name that resolves to loopback, as if that address were public."""

    async def resolved(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(fetch, "PORTS", {"http": port, "https": 443})
    monkeypatch.setattr(fetch, "resolve_public_address", resolved)
    for limit in ("SECONDS", "CONNECT_SECONDS"):  # slowness of a busy machine is not a failure
        monkeypatch.setattr(fetch, limit, 3600.0)
    return f"http://example.org:{port}"


def run(url: str) -> str:
    return asyncio.run(FETCH.run({"url": url}, None))  # type: ignore[arg-type]


def test_html_page_is_converted_to_text(site: str) -> None:
    Site.hosts.clear()
    assert run(f"{site}/page") == "T & U\n\nHead\n\nOne two\nthree"
    assert Site.hosts == [site.removeprefix("http://")], "the host is the name, connected at the checked address"
    assert run(f"{site}/latin") == "Grüße" and run(f"{site}/plain") == "Gr��e"
    assert run(f"{site}/idna") == "Grüße", "not every codec can decode text"
    assert run(f"{site}/punycode") == "Gre-xma4o", "the time of some codecs is not linear"
    assert run(f"{site}/here").startswith("T & U")


def test_international_and_numeric_hosts_are_sent_as_in_urls(site: str) -> None:
    port = site.rpartition(":")[2]
    for host, sent in (
        ("münchen.example", "xn--mnchen-3ya.example"),
        ("xn--mnchen-3ya.example", "xn--mnchen-3ya.example"),
        ("[2606:4700::1111]", "[2606:4700::1111]"),
    ):
        Site.hosts.clear()
        assert run(f"http://{host}:{port}/latin") == "Grüße"
        assert Site.hosts == [f"{sent}:{port}"]


REFUSED = [
    ("/picture", "the page is not text but image/png"),
    ("/large", "more than 1,048,576 bytes"),
    ("/round", "redirects too often"),
    ("/nowhere", "cannot be fetched: InvalidURL"),
    ("/packed", "compressed"),
    ("/missing", "status 404"),
]


@pytest.mark.parametrize(("path", "reason"), REFUSED)
def test_unsupported_response_is_rejected(site: str, path: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        run(site + path)


def test_a_redirect_to_another_host_is_reported_and_not_followed(site: str) -> None:
    assert "redirects to http://169.254.169.254/latest" in run(f"{site}/away")


@pytest.mark.parametrize(
    "url",
    ["ftp://example.org", "file:///etc/passwd", "http://", "nonsense", "http://user:key@example.org", "http://a:22/"],
)
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ToolError):
        parse_url(url)


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
    *("2002:7f00:1::", "255.255.255.255", "192.0.2.1", "2001:db8::1", "fec0::1", "64:ff9b:1::a00:1", "::127.0.0.1"),
    *("::ffff:0:10.0.0.1", "2001:0:7f00:1::", "64:ff9b::10.0.0.1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public_address(address)


def test_public_addresses_are_public() -> None:
    assert all(
        map(
            is_public_address,
            ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"],
        )
    )


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0x7f.1", "[::1]".strip("[]"), "2130706433"])
def test_private_host_is_rejected(host: str) -> None:
    with pytest.raises(ToolError, match=r"not a public address|cannot be found"):
        asyncio.run(resolve_public_address(host, 80))


def test_malformed_html_is_converted_to_text() -> None:
    assert extract_text("<p>a<script>x</p>") == "a"
    assert extract_text("a<b <c>d</c> &lt;tag&gt;").endswith("<tag>")
    assert extract_text("<div>" * 5000 + "deep") == "deep"
    assert extract_text("<head><title>T</title><meta name=a>\n<body><p>Hello</p></body>") == "T\n\nHello"
    assert extract_text("<head><title>T</title><style>s</style><title>U</title>Hello") == "T\n\nHello"
    assert extract_text("<nav>a<nav>b</nav>c</nav>d<svg><svg></svg><text>e</text></svg>f") == "df"
    assert FETCH.always_asks
