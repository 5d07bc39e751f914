"""Serving below a path prefix: every link stays below it, and only a trusted proxy may set the prefix."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from scripted_engine import ScriptedEngine

from notso.web.edge.request_paths import BasePathExtension
from notso.web.values.errors import SettingsError
from notso.web.values.settings import Settings

BASE = "/tools/chat"
HAPROXY = """
defaults
  mode http
  timeout connect 60s
  timeout client 600s
  timeout server 600s
frontend all
  bind fd@{listener}
  http-request deny deny_status 404 unless {{ path {base} }} or {{ path_beg {base}/ }}
  {removal}
  default_backend server
backend server
  server one {server}
"""
LINK = re.compile(r'\s(?:href|src|action|formaction|hx-get|hx-post|hx-sse:connect|data-copy|data-katex)="([^"#]+)"')
IN_STYLES = re.compile(r"url\(([^)\"']+)\)")


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[Callable[..., str]]:
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if found is None:
        pytest.skip("haproxy is not installed")
    processes: list[subprocess.Popen[bytes]] = []

    def begin(server: str, *, removes: bool) -> str:
        # The listening socket exists before the proxy starts, so early connections wait instead of being refused.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            removal = f"http-request replace-path {BASE}/?(.*) /\\1" if removes else ""
            address = server.removeprefix("http://")
            file = tmp_path / "haproxy.cfg"
            file.write_text(HAPROXY.format(listener=listener.fileno(), base=BASE, removal=removal, server=address))
            command = [found, "-db", "-f", str(file)]
            processes.append(subprocess.Popen(command, pass_fds=[listener.fileno()]))
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("removes", [False, True])
def test_all_links_stay_below_base_path(start: Callable[..., Any], haproxy: Callable[..., str], removes: bool) -> None:
    """Follow every page, style sheet and script reachable from the first page, and a chat with an answer."""
    server = start(ScriptedEngine(), base_path=BASE + "/").ready()
    url = haproxy(server.address, removes=removes)
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post(f"{BASE}/chats", data={"text": "Hello", "key": "0198c2a0-0000-7000-8000-000000000001"})
        assert answer.status_code == 303
        chat = answer.headers["location"]
        assert chat.startswith(f"{BASE}/chats/")
        server.finished(server.last(chat.rpartition("/")[2]))
        seen: dict[str, int] = {}
        wanted = [f"{BASE}/", BASE, chat, f"{chat}/settings", f"{chat}/tools", f"{chat}/share", f"{BASE}/settings"]
        while wanted:
            path = wanted.pop()
            if path in seen:
                continue
            answer = client.get(path)
            seen[path] = answer.status_code
            if "location" in answer.headers:
                wanted.append(urlsplit(urljoin(url + path, answer.headers["location"])).path)
            for cookie in answer.headers.get_list("set-cookie"):
                assert f"path={BASE}/" in cookie.lower()
            kind = answer.headers.get("content-type", "")
            pattern = LINK if "text/html" in kind else IN_STYLES if "text/css" in kind else None
            for link in pattern.findall(answer.text) if pattern else ():
                target = urlsplit(urljoin(url + path, link.replace("&amp;", "&")))
                if target.scheme not in ("http", "https") or target.netloc != urlsplit(url).netloc:
                    continue
                assert target.path == BASE or target.path.startswith(f"{BASE}/"), f"{path} links to {link}"
                if not re.search(r"/(export|events|text|backup|next|feed)\b", target.path):
                    wanted.append(target.path)
        kept = {path: status for path, status in seen.items() if status not in (200, 303, 204)}
        assert set(kept.values()) <= {404, 405, 409}, (
            kept
        )  # addresses that accept only a form, and a receipt, which the scripted engine cannot produce
        assert {f"{BASE}/archive", f"{BASE}/prompts", f"{BASE}/models"} <= {p for p, s in seen.items() if s == 200}
        assert sum("/static/" in path for path in seen) > 20


def test_apis_and_streams_are_served_below_base_path(start: Callable[..., Any], haproxy: Callable[..., str]) -> None:
    server = start(ScriptedEngine(), base_path=BASE).ready()
    url = haproxy(server.address, removes=False)
    asked = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    assert httpx.get(f"{url}/health").status_code == 404  # the proxy publishes nothing outside the prefix
    assert httpx.get(f"{url}{BASE}/health").json()["status"] == "ok"
    with httpx.stream("POST", f"{url}{BASE}/v1/chat/completions", json=asked, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert httpx.get(f"{url}{BASE}/v1/models").json()["data"]


def test_only_trusted_proxy_may_set_forwarded_prefix(start: Callable[..., Any], tmp_path: Path) -> None:
    given = {"X-Forwarded-Prefix": "/chat/"}
    trusting = start(ScriptedEngine(), trusted_proxies=("127.0.0.1",)).ready()
    assert 'href="/chat/archive"' in trusting.client.get("/", headers=given).text
    assert 'href="/archive"' in trusting.client.get("/").text
    for odd in ("//evil.example", "https://evil.example", "/a b", '/"><script>', "/../x", "/" + "a" * 100):
        assert 'href="/archive"' in trusting.client.get("/", headers={"X-Forwarded-Prefix": odd}).text
    wary = start(ScriptedEngine(), data_dir=tmp_path / "other").ready()
    assert 'href="/archive"' in wary.client.get("/", headers=given).text


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket for both IPv6 and IPv4")
@pytest.mark.parametrize("proxy", ["127.0.0.1", "::ffff:127.0.0.1", "::ffff:127.0.0.0/104"])
def test_proxy_is_trusted_on_a_socket_for_both_ip_versions(start: Callable[..., Any], proxy: str) -> None:
    server = start(ScriptedEngine(), host="::", api_key="k" * 24, trusted_proxies=(proxy,)).ready()
    assert 'action="/chat/login"' in server.client.get("/login", headers={"X-Forwarded-Prefix": "/chat"}).text


def test_base_path_is_matched_exactly(start: Callable[..., Any]) -> None:
    server = start(ScriptedEngine(), base_path="/chat").ready()
    assert server.client.get("/chat").status_code == server.client.get("/chat/").status_code == 200
    assert server.client.get("/chat/search/?q=a").headers["location"] == "/chat/search?q=a"
    assert server.client.get("/chatter").status_code == 404
    assert server.raw(b"GET /%63hat/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 404"
    )


@pytest.mark.parametrize("path", ["chat", "//chat", "/a/../b", "/a?b", "https://chat.example.com", "/ä"])
def test_invalid_base_path_is_rejected(path: str) -> None:
    with pytest.raises(SettingsError, match="a path such as /chat"):
        Settings(base_path=path)


def test_template_preprocessor_prefixes_only_root_relative_links() -> None:
    def rooted(source: str) -> str:
        return BasePathExtension.preprocess(None, source, None)  # type: ignore[arg-type]

    assert rooted('<a href="/x">') == '<a href="{{ root() }}/x">'
    assert rooted('<a href="{{ here }}/x">') == '<a href="{{ root() }}{{ here }}/x">'
    for same in ('<a href="#x">', '<a href="//host/x">', '<a href="https://host/">', '<p data-name="/x">', "x href=/x"):
        assert rooted(same) == same
