"""Invalid input gets a 4xx response with an explanation, without a traceback, and without losing the typed text."""

from __future__ import annotations

import time
from typing import Any

import pytest

from notso.web.values.ids import new_id

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
KEY = "0198f0a0-0000-7000-8000-000000000000"

BODIES: list[tuple[str, bytes, int]] = [
    ("nothing", b"", 400),
    ("no text", b"key=" + KEY.encode(), 400),
    ("empty text", b"text=&key=" + KEY.encode(), 400),
    ("blank text", b"text=+%0A%09&key=" + KEY.encode(), 400),
    ("NUL", b"text=a%00b&key=" + KEY.encode(), 400),
    ("lone surrogate", b"text=%ED%A0%80&key=" + KEY.encode(), 400),
    ("low surrogate", b"text=x%ED%B0%80y&key=" + KEY.encode(), 400),
    ("paired surrogates", b"text=%ED%A0%BD%ED%B8%80&key=" + KEY.encode(), 400),
    ("broken UTF-8", b"text=%FF%FE&key=" + KEY.encode(), 400),
    ("cut UTF-8", b"text=%E2%82&key=" + KEY.encode(), 400),
    ("overlong slash", b"text=%C0%AF&key=" + KEY.encode(), 400),
    ("raw bytes", "text=é&key=".encode() + KEY.encode(), 400),
    ("no key", b"text=x", 400),
    ("odd key", b"text=x&key=1", 400),
    ("upper-case key", b"text=x&key=" + KEY.upper().encode(), 400),
    ("key with a newline", b"text=x&key=" + KEY.encode() + b"%0A", 400),
    ("text twice", b"text=x&text=y&key=" + KEY.encode(), 400),
    ("many fields", b"&".join(b"f%d=1" % n for n in range(5000)), 400),
    ("a long text", b"text=" + b"x" * 200_001 + b"&key=" + KEY.encode(), 400),
    ("JSON", b'{"text": "x"}', 400),
]


@pytest.mark.parametrize("htmx", [True, False], ids=["htmx", "plain"])
@pytest.mark.parametrize(("body", "status"), [each[1:] for each in BODIES], ids=[each[0] for each in BODIES])
def test_invalid_form_returns_400_with_an_explanation(
    shared: Any, chat_id: str, body: bytes, status: int, htmx: bool
) -> None:
    headers = FORM | ({"HX-Request": "true"} if htmx else {})
    for path in ("/chats", f"/chats/{chat_id}/messages"):
        began = time.monotonic()
        answer = shared.client.post(path, content=body, headers=headers)
        assert answer.status_code == status
        assert time.monotonic() - began < 20
        assert ("<html" not in answer.text) == htmx
        assert "⚠" in answer.text and "Traceback" not in answer.text


@pytest.fixture(scope="module")
def chat_id(shared: Any) -> str:
    asked = shared.ask("Hello")
    shared.finished(asked)
    found: str = asked.chat_id
    return found


@pytest.mark.parametrize(
    "kind",
    ["application/json", "multipart/form-data; boundary=x", "text/plain", "", "application/x-www-form-urlencodedx"],
)
def test_unsupported_content_type_returns_415(shared: Any, chat_id: str, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    body = f"text=x&key={new_id()}".encode()
    assert shared.client.post(f"/chats/{chat_id}/messages", content=body, headers=headers).status_code == 415


def test_message_length_limit_is_exact(shared: Any, chat_id: str) -> None:
    shared.finished(shared.ask("é" * 174_000, chat_id))  # a form of 1,044,000 bytes, just below the limit for a body
    shared.finished(shared.ask("x" * 200_000, chat_id))
    answer = shared.client.post(f"/chats/{chat_id}/messages", data={"text": "x" * 200_001, "key": new_id()})
    assert answer.status_code == 400
    assert "200,001" in answer.text and "200,000" in answer.text
    assert "x" * 200_001 in answer.text, "the typed text is returned"


def test_oversized_or_invalid_content_length_is_rejected(shared: Any) -> None:
    def claimless() -> Any:
        for _ in range(40):
            yield b"x" * 32_768

    assert shared.client.post("/chats", content=b"x" * 1_048_577, headers=FORM).status_code == 413
    assert shared.client.post("/chats", content=claimless(), headers=FORM).status_code == 413
    assert shared.client.post("/chats", content=b"x" * 1_048_576, headers=FORM).status_code == 400
    for claim in (b"99999999999999999999", b"1048577", b"1e3", b"-1", b"0x10", b"+5", b"5, 6"):
        request = (
            b"POST /chats HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + claim + b"\r\nConnection: close\r\n\r\nx"
        )
        assert shared.raw(request).split()[1] in (b"400", b"413"), claim


def test_compressed_bodies_and_oversized_headers_are_rejected(shared: Any) -> None:
    assert shared.client.post("/chats", content=b"x", headers=FORM | {"Content-Encoding": "gzip"}).status_code == 415
    assert shared.client.get("/livez", headers={"X-Large": "x" * 15_000}).status_code == 200
    assert shared.client.get("/livez", headers={"X-Large": "x" * 17_000}).status_code == 431


PATHS = [
    *(
        "/chats/x",
        "/chats/..%2f..%2fetc",
        "/chats/%00",
        "/chats/" + "a" * 2000,
        "/chats/' OR 1=1 --",
        "/nowhere",
        "/static/../app.py",
    ),
    *(
        "/static/0000000000000000/page.css",
        "/static/%2e%2e/app.py",
        "/generations/x/events",
        "/chats/%ED%A0%80",
        "/chats/\u0661",
    ),
    *(f"/chats/{KEY}", f"/chats/{KEY}/messages/{KEY}", f"/chats/{KEY.upper()}", "/generations/" + "0" * 32 + "/events"),
]


@pytest.mark.parametrize("path", PATHS)
def test_unknown_path_returns_404(shared: Any, path: str) -> None:
    answer = shared.client.get(path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text and "etc" not in answer.text


@pytest.mark.parametrize("title", ["", " \t ", "x" * 121])
def test_invalid_chat_title_returns_400(shared: Any, chat_id: str, title: str) -> None:
    assert shared.client.post(f"/chats/{chat_id}/title", data={"title": title}).status_code == 400


@pytest.mark.parametrize("query", ["?x=" + "a" * 5000, "?x=%FF", "?" + "&".join("a" for _ in range(1000))])
def test_unknown_query_parameters_are_ignored(shared: Any, query: str) -> None:
    assert shared.client.get("/" + query).status_code == 200
