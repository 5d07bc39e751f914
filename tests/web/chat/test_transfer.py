"""Exporting and importing chats: an export can be imported again, and no imported file can do harm."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.web.chat.files.imports import read_chats
from notso.web.chat.routes import transfer
from notso.web.chat.submit import derive_title
from notso.web.values.errors import Problem
from notso.web.values.ids import new_id

Start = Callable[..., Any]

ANSWER = "Some **bold** text.\n\n```python\nx = 1\n```\n"


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine(lambda messages, thinking: say(ANSWER, "hm"))).ready()


@pytest.fixture
def chat_id(server: Any) -> str:
    asked = server.ask("What <is> it?")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    server.client.post(f"{url}/messages/{asked.message_id}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    server.client.post(f"{url}/settings", data={"temperature": "0.3", "seed": "7"})
    server.client.post(f"{url}/title", data={"title": "Übung: a/b"})
    return str(asked.chat_id)


def chats(server: Any) -> list[Any]:
    found: list[Any] = server.on_loop(lambda: server.shared.store.chats("local"))
    return found


def send(server: Any, data: Any) -> Any:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return server.client.post("/import", content=body, headers={"Content-Type": "application/json"})


def test_json_export_and_import_preserve_the_message_tree(server: Any, chat_id: str) -> None:
    answer = server.client.get(f"/chats/{chat_id}/export/json")
    assert answer.headers["content-disposition"] == 'attachment; filename="bung-a-b.json"'
    data = answer.json()
    assert (data["format"], data["version"], len(data["chats"][0]["messages"])) == ("notso-chats", 3, 3)
    back = send(server, data)
    assert back.status_code == 303
    other = back.headers["location"].removeprefix("/chats/")
    assert other != chat_id and len(chats(server)) == 2
    again = server.client.get(f"/chats/{other}/export/json").json()

    def without_ids(export: Any) -> Any:
        names = {each["id"]: number for number, each in enumerate(export["chats"][0]["messages"])}
        text = json.dumps(export)
        for name, number in names.items():
            text = text.replace(name, str(number))
        return json.loads(text)

    assert without_ids(again) == without_ids(data)
    page = server.client.get(f"/chats/{other}").text
    assert "2/2" in page and "<strong>bold</strong>" in page
    assert server.finished(server.ask("And then?", other)).state == "done", "the imported chat can be continued"


def test_all_chats_can_be_exported_and_imported(server: Any, chat_id: str) -> None:
    server.finished(server.ask("Another"))
    data = server.client.get("/export").json()
    assert len(data["chats"]) == 2
    assert send(server, data).status_code == 303 and len(chats(server)) == 4


def test_repeated_import_does_not_change_a_branch_copy(server: Any, chat_id: str) -> None:
    data = server.client.get(f"/chats/{chat_id}/export/json").json()
    imported = send(server, data).headers["location"]
    last = server.last(imported.removeprefix("/chats/")).message_id
    copy = server.client.post(f"{imported}/messages/{last}/branch").headers["location"]
    before = server.client.get(f"{copy}/export/json").json()
    server.client.post(f"{imported}/delete")
    again = send(server, data).headers["location"]
    assert again not in (imported, copy) and len(chats(server)) == 3
    assert server.client.get(f"{copy}/export/json").json() == before


def test_markdown_export_contains_titles_and_messages(server: Any, chat_id: str) -> None:
    text = server.client.get(f"/chats/{chat_id}/export/md").text
    assert text == f"# Übung: a/b\n\n## You\n\nWhat <is> it?\n\n## Assistant\n\n{ANSWER}\n"


def test_html_export_is_static(server: Any, chat_id: str) -> None:
    answer = server.client.get(f"/chats/{chat_id}/export/html")
    assert answer.headers["content-disposition"].startswith("attachment")
    page = answer.text
    assert "What &lt;is&gt; it?" in page and "<strong>bold</strong>" in page
    assert "<script" not in page and "hx-" not in page and "http://" not in page and 'src="' not in page
    assert server.client.get(f"/chats/{chat_id}/export/pdf").status_code == 400


def test_openai_message_list_is_imported(server: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there\nfriend"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "polite"},
        {"role": "user", "content": "And?"},
    ]
    for data in (messages, {"messages": messages, "model": "x"}):
        chat = chats(server)[0] if send(server, data).status_code == 303 else None
        assert chat is not None
        assert (chat.title, chat.settings) == ("Hello there", {"system_prompt": "Be brief."})
        stored = server.on_loop(lambda chat=chat: server.shared.store.messages("local", chat.id))
        assert [(each.role, each.content, each.reasoning) for each in stored] == [
            *(("user", "Hello there\nfriend", ""), ("assistant", "Hi.", "polite"), ("user", "And?", ""))
        ]
    server.finished(server.ask("More", chat.id))
    roles = [message.role for message in server.shared.engine.engine.requests[-1].messages]
    assert roles == ["system", "user", "assistant", "user", "user"]


def test_tool_calls_are_imported_with_their_results(server: Any) -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = [
        {"role": "user", "content": "What time is it, and what is 6 * 7?"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [call("clock", "{}"), call("sum", '{"a": 6}')],
        },
        {"role": "tool", "tool_call_id": "sum", "content": "42"},
        {"role": "tool", "tool_call_id": "clock", "content": "noon"},
        {"role": "assistant", "content": "Noon.", "tool_calls": [call("clock", "{}")]},
        {"role": "tool", "tool_call_id": "clock", "content": "later"},
        {"role": "assistant", "content": "And 42."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "", "tool_calls": [call("clock", "{}")]},
    ]
    assert send(server, messages).status_code == 303
    chat = chats(server)[0]
    stored = server.on_loop(lambda: server.shared.store.messages("local", chat.id))
    assert [(each.role, each.content) for each in stored] == [
        *(("user", messages[0]["content"]), ("assistant", "Noon.\n\nAnd 42.")),
        *(("user", "Thanks"), ("assistant", "")),
    ]
    uses = [(use.name, use.result, use.state, use.round, use.content_at) for use in stored[1].tool_uses]
    assert uses == [("clock", "noon", "done", 0, 0), ("sum", "42", "done", 0, 0), ("clock", "later", "done", 1, 5)]
    assert [use.state for use in stored[3].tool_uses] == ["interrupted"]
    page = server.client.get(f"/chats/{chat.id}").text
    assert page.count('<details class="tool-card"') == 4 and page.index("noon") < page.index("Noon.") < page.index(
        "And 42."
    )
    server.finished(server.ask("More", chat.id))
    read = server.shared.engine.engine.requests[-1].messages
    assert [(each.role, each.content) for each in read[:6]] == [
        *(("user", messages[0]["content"]), ("assistant", ""), ("tool", "noon"), ("tool", "42")),
        *(("assistant", "Noon."), ("tool", "later")),
    ]
    again = server.client.get(f"/chats/{chat.id}/export/json").json()
    assert send(server, again).status_code == 303, "an import can be exported and imported again"


def test_imported_answer_is_continued_only_after_tool_calls() -> None:
    call = {"id": "a", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        *({"role": "assistant", "content": content, "reasoning_content": "r"} for content in ("", None, "y")),
    ]
    [(_, stored)] = read_chats(json.dumps(messages).encode(), derive_title)
    assert [(each.content, each.reasoning) for each in stored] == [("x", "r"), ("", "r"), ("y", "r")]


def test_import_accepts_a_form_field(server: Any) -> None:
    text = json.dumps([{"role": "user", "content": "Hello"}])
    assert server.client.post("/import", data={"json": text}).status_code == 303


def test_files_of_one_owner_are_parsed_one_at_a_time(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parsed file takes several times its size in memory."""
    parse, parsing, gate = transfer.parse_in_child, list[bytes](), asyncio.Event()

    async def held(body: bytes) -> Any:
        parsing.append(body)
        await gate.wait()
        return await parse(body)

    monkeypatch.setattr(transfer, "parse_in_child", held)
    with ThreadPoolExecutor(3) as threads:
        posts = [threads.submit(send, server, [{"role": "user", "content": str(at)}]) for at in range(3)]
        server.wait(lambda: len(parsing) + server.chat.importing.waiting == 3)
        at_once = len(parsing)
        server.on_loop(gate.set)
        assert at_once == 1 and [post.result().status_code for post in posts] == [303] * 3


def message(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "parent_id": None, "role": "user", "content": "x"} | changes


def chat(**changes: Any) -> dict[str, Any]:
    return {"title": "T", "prompt_date": "2025-07-08", "messages": [message()]} | changes


def file(**changes: Any) -> dict[str, Any]:
    return {"format": "notso-chats", "version": 1, "chats": [chat()]} | changes


BROKEN: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe",
    b"nonsense",
    b"[" * 100_000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b'[{"role": "user", "role": "user", "content": "x"}]',
    b'{"format": "notso-chats", "version": NaN, "chats": []}',
    b"9" * 5000,
    {},
    [],
    [{}],
    ["x"],
    {"messages": []},
    [{"role": "tool", "content": "x"}],
    [{"role": "system", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": "x"}, {"role": "critic", "content": "x"}],
    [{"role": "user", "content": "x"}, "x"],
    file(version=4),
    file(chats=[]),
    file(extra=1),
    file(chats=[chat(title="")]),
    file(chats=[chat(prompt_date="2025-13-08")]),
    file(chats=[chat(file_version="1")]),
    file(chats=[chat(settings={"temperature": 9})]),
    file(chats=[chat(messages=[message(role="system")])]),
    file(chats=[chat(messages=[message(), message()])]),
    file(chats=[chat(messages=[message(parent_id="b"), message(id="b")])]),
    file(chats=[chat(messages=[message(parent_id="a")])]),
    file(chats=[chat(messages=[message(created_ms=-1)])]),
    file(chats=[chat(messages=[message(edited=1)])]),
    file(chats=[chat(messages=[message(numbers={"prompt_ms": 1e300})])]),
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_broken_exports_are_rejected(data: Any) -> None:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    try:
        assert read_chats(body, derive_title) == []
    except Problem as refused:
        assert refused.status == 400


@pytest.fixture(scope="module")
def empty(shared: Any) -> Any:
    return shared


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_invalid_import_returns_400_and_adds_no_chats(empty: Any, data: Any) -> None:
    answer = send(empty, data)
    assert answer.status_code == 400, answer.text
    assert "Traceback" not in answer.text and len(answer.text) < 4000
    assert chats(empty) == []


@pytest.mark.parametrize("unit", [b'\\"', b'"', b"[]", b'{"a":', b'"\\', b"\\"])
def test_invalid_json_is_rejected_in_linear_time(unit: bytes) -> None:
    def seconds(length: int) -> float:
        began = time.thread_time()
        with pytest.raises(Problem):
            read_chats(b'"' + unit * (length // len(unit)), derive_title)
        return time.thread_time() - began

    seconds(1000)
    assert seconds(1_000_000) < 8, "restarting the scan at each quotation mark would take hours"


def test_imported_running_answer_is_interrupted_and_markup_is_escaped(server: Any) -> None:
    answer = {"role": "assistant", "state": "running", "content": "<script>1</script> **x**"}
    data = file(chats=[chat(title="<b>", messages=[message(), message(id="b", parent_id="a", **answer)])])
    page = server.client.get(send(server, data).headers["location"]).text
    assert "Interrupted." in page and "<script>1" not in page and "<b>" not in page.partition("<title>")[2]


def test_import_has_a_larger_body_limit_than_other_routes(server: Any) -> None:
    big = json.dumps([{"role": "user", "content": "x" * 600_000}] * 4).encode()
    assert len(big) > 2_000_000
    assert send(server, big).status_code == 303
    other = server.client.post("/chats", content=big, headers={"Content-Type": "application/json"})
    assert other.status_code == 413
    assert send(server, b" " * (16 * 1024 * 1024 + 1)).status_code == 413
    kind = {"Content-Type": "text/plain"}
    assert server.client.post("/import", content=b"[]", headers=kind).status_code == 415


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "at character 1"),
        (b"\xff", "it is not UTF-8 text"),
        (b"9" * 5000, "too long"),
        (b'{"a": 1, "a": 2}', "a key is duplicated"),
    ],
)
def test_json_errors_are_explained_without_exception_names(empty: Any, data: bytes, reason: str) -> None:
    answer = send(empty, data)
    assert answer.status_code == 400 and reason in answer.text and "Error" not in answer.text


def test_imported_future_timestamps_are_limited_to_now(server: Any) -> None:
    assert send(server, file(chats=[chat(created_ms=1 << 60, updated_ms=1 << 60)])).status_code == 303
    # a time out of range would break every page, so it is not imported
    assert server.client.get("/").status_code == 200
    assert chats(server)[0].updated_ms <= 1000 * time.time()


def test_import_does_not_enable_tools(server: Any) -> None:
    assert send(server, file(chats=[chat(settings={"tools": "calculator", "seed": "7"})])).status_code == 303
    assert "tools" not in chats(server)[0].settings and chats(server)[0].settings["seed"] == 7


def test_only_one_waiting_backup_replaces_a_stalled_one(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    dropped: list[str] = []
    server.chat.backup_reader = SimpleNamespace(unread_since=-1e9, drop=lambda: dropped.append("reader"))
    server.on_loop(server.chat.backing_up.acquire)
    statuses: list[int] = []

    def back_up() -> None:
        statuses.append(server.client.get("/backup").status_code)

    threads = [threading.Thread(target=back_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.wait(lambda: len(statuses) == 2)
    assert (statuses, dropped) == ([429, 429], ["reader"])
    server.on_loop(server.chat.backing_up.release)
    for thread in threads:
        thread.join(60)
    assert statuses == [429, 429, 200]


def test_copy_is_deleted_before_another_backup_may_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine()).ready()
    lock, folder = server.chat.backing_up, server.chat.shared.settings.directory
    release, left = lock.release, list[list[Path]]()
    monkeypatch.setattr(lock, "release", lambda: (left.append(list(folder.glob("backup-*"))), release()))
    assert server.client.get("/backup").content[:15] == b"SQLite format 3"
    server.wait(lambda: not lock.locked())
    assert left == [[]]
