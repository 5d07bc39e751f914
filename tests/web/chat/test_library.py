"""Many chats and reusable items: earlier messages, bookmarks, archive, branches, temporary chats, prompts, previews."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.system.confinement import ConfinedWorkError
from notso.web.chat.chat_view import NEWEST_MESSAGES
from notso.web.chat.routes import preview
from notso.web.chat.routes import prompts as prompt_routes
from notso.web.chat.submit import new_chat
from notso.web.store.sql import store as store_module
from notso.web.values.ids import new_id
from notso.web.values.wording import words

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine(lambda messages, thinking: say("an answer"))).ready()


def imported(server: Any, count: int) -> str:
    """Import a chat of `count` messages, different each time; return its id."""
    messages = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": f"message {at} of {count}"} for at in range(count)
    ]
    messages[0]["content"] += f" {new_id()}"  # a repeated import of the same messages would be ignored
    answer = server.client.post("/import", json={"messages": messages}, headers=FRAGMENT)
    return str(answer.headers["hx-redirect"].removeprefix("/chats/"))


def texts(html: str) -> list[int]:
    """Return the numbers of the imported messages on the page, in order."""
    return [int(at) for at in re.findall(r"message (\d+) of \d+", html.partition('id="turns"')[2] or html)]


def chats(server: Any) -> list[Any]:
    found: list[Any] = server.on_loop(lambda: server.shared.store.chats("local"))
    return found


def test_page_shows_newest_messages_and_loads_earlier_ones_on_request(server: Any) -> None:
    count = 3 * NEWEST_MESSAGES + 2
    chat_id = imported(server, count)
    page = server.client.get(f"/chats/{chat_id}").text
    shown = texts(page)
    assert shown == list(range(count - NEWEST_MESSAGES, count))
    while "earlier?before=" in page:
        before = re.findall(r"earlier\?before=([0-9a-f-]+)", page)
        assert len(before) == 1 and f"{shown[0]} earlier messages" in page
        page = server.client.get(f"/chats/{chat_id}/earlier?before={before[0]}", headers=FRAGMENT).text
        assert len(texts(page)) <= NEWEST_MESSAGES
        shown = texts(page) + shown
    assert shown == list(range(count)), "each message appears once, in order"
    assert texts(server.client.get(f"/chats/{chat_id}?all=on").text) == list(range(count))


def test_refreshed_turns_start_at_the_first_shown_message(server: Any) -> None:
    count = NEWEST_MESSAGES + 20
    chat_id = imported(server, count)
    messages = server.on_loop(lambda: server.shared.store.messages("local", chat_id))
    first = {"X-From": messages[4].id}
    html = server.client.get(f"/chats/{chat_id}/turns", headers=FRAGMENT | first).text
    assert texts(html) == list(range(4, count)) and "Show 4 earlier messages" in html
    assert texts(server.client.get(f"/chats/{chat_id}/turns", headers=FRAGMENT | {"X-From": new_id()}).text) == list(
        range(20, count)
    )
    found = server.client.get(f"/chats/{chat_id}?at={messages[7].id}").text
    assert texts(found) == list(range(6, count)), "the page starts at the turn that contains the hit"


def test_earlier_messages_before_unknown_id_return_404(server: Any) -> None:
    chat_id = imported(server, 4)
    for before in ("", "x", new_id()):
        assert server.client.get(f"/chats/{chat_id}/earlier?before={before}", headers=FRAGMENT).status_code == 404


def test_chat_is_marked_while_answering_and_unread_until_opened(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("an answer"))
    server = start(engine).ready()
    engine.gate.clear()
    asked = server.ask("Hello")
    listed = server.client.get("/chats", headers=FRAGMENT).text
    assert re.search(r'class="mark (waiting|working)"', listed)
    here = server.client.get(f"/chats?current={asked.chat_id}", headers=FRAGMENT).text
    assert re.search(r'hx-target="title" hx-swap="textContent">… Hello', here)
    engine.gate.set()
    server.finished(asked)
    server.wait(lambda: chats(server)[0].unread)
    listed = server.client.get("/chats", headers=FRAGMENT).text
    assert 'class="mark unread"' in listed and ">(1) " in listed
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert 'class="mark' not in page and "(1)" not in page
    assert not chats(server)[0].unread
    assert 'class="mark' not in server.client.get("/chats", headers=FRAGMENT).text


def test_streamed_answer_is_not_marked_unread(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("an answer"))
    server = start(engine).ready()
    engine.gate.clear()
    asked = server.ask("Hello")

    def released(event: Any) -> bool:
        engine.gate.set()
        return False

    server.stream(asked, until=released)
    server.finished(asked)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert not chats(server)[0].unread


def test_archived_chats_leave_the_list_but_stay_searchable(server: Any) -> None:
    kept, put = imported(server, 2), imported(server, 4)
    assert server.client.post(f"/chats/{put}/archive").headers["location"] == "/"
    listed = server.client.get("/chats", headers=FRAGMENT).text
    assert kept in listed and put not in listed
    assert put in server.client.get("/archive").text
    assert put in server.client.get("/search?q=message", headers=FRAGMENT).text
    assert put in server.client.get(f"/chats/{put}").text
    done = server.client.post("/archive", data={"action": "unarchive", f"chat-{put}": "on"})
    assert done.status_code == 303, "a redirect, so that going back does not offer to resend the form"
    assert "1 chat unarchived." in server.client.get(done.headers["location"]).text
    assert put in server.client.get("/chats", headers=FRAGMENT).text


def test_bulk_delete_of_chats_can_be_undone(server: Any) -> None:
    ids = [imported(server, 2) for _ in range(5)]
    chosen = {f"chat-{each}": "on" for each in ids[:3]}
    done = server.client.post("/archive", data={"action": "delete", "filter": "a b", "sort": "title"} | chosen)
    assert done.status_code == 303 and done.headers["location"].startswith("/archive?q=a+b&sort=title&")
    shown = server.client.get(done.headers["location"]).text
    assert "3 chats deleted." in shown
    assert {each.id for each in chats(server)} == set(ids[3:])
    [undo] = re.findall(r'action="(/archive/undo/[0-9a-f]+)"', shown)
    assert server.client.post(undo).headers["location"] == "/archive"
    assert {each.id for each in chats(server)} == set(ids)
    assert server.client.post(undo).status_code == 404


@pytest.mark.parametrize("fields", [{"action": "burn"}, {"action": "delete", "chat-x": "on"}, {}])
def test_invalid_archive_action_returns_400(server: Any, fields: dict[str, str]) -> None:
    assert server.client.post("/archive", data=fields).status_code == 400


def test_archive_action_without_selected_chats_is_rejected(server: Any) -> None:
    imported(server, 2)
    refused = server.client.post("/archive", data={"action": "delete"})
    assert refused.status_code == 400 and "Select some chats first." in refused.text
    assert len(chats(server)) == 1


def test_branch_copies_messages_into_a_new_chat(server: Any) -> None:
    chat_id = imported(server, 6)
    before = server.on_loop(lambda: server.shared.store.messages("local", chat_id))
    to = server.client.post(f"/chats/{chat_id}/messages/{before[3].id}/branch").headers["location"]
    branch = to.removeprefix("/chats/")
    copied = server.on_loop(lambda: server.shared.store.messages("local", branch))
    assert [each.content for each in copied] == [each.content for each in before[:4]]
    assert not {each.id for each in copied} & {each.id for each in before}
    assert [each.parent_id for each in copied] == [None, *(each.id for each in copied[:3])]
    server.finished(server.ask("and on", branch))
    assert server.on_loop(lambda: server.shared.store.messages("local", chat_id)) == before, "the original is unchanged"
    assert any("(branch)" in each.title for each in chats(server))


def test_branching_at_a_running_answer_returns_409(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    engine.gate.clear()
    asked = server.ask("Hello")
    where = f"/chats/{asked.chat_id}/messages/{asked.message_id}/branch"
    assert server.client.post(where, headers=FRAGMENT).status_code == 409
    engine.gate.set()
    server.finished(asked)


def test_temporary_chat_is_hidden_until_kept(server: Any) -> None:
    assert 'name="temporary"' in server.client.get("/?temporary=on").text
    assert 'name="temporary"' not in server.client.get("/").text
    fields = {"text": "a secret word", "key": new_id(), "temporary": "on"}
    chat_id = server.client.post("/chats", data=fields).headers["location"].removeprefix("/chats/")
    server.finished(server.last(chat_id))

    def places() -> list[bool]:
        found = (
            server.client.get("/chats", headers=FRAGMENT),
            server.client.get("/search?q=secret", headers=FRAGMENT),
            server.client.get("/archive"),
            server.client.get("/export"),
        )
        return [chat_id in each.text or "a secret word" in each.text for each in found]

    assert places() == [False] * 4
    assert "deleted one hour after last use" in server.client.get(f"/chats/{chat_id}").text
    assert server.client.post(f"/chats/{chat_id}/keep").status_code == 303
    assert places() == [True] * 4


EXAMPLE = re.compile(r'<form method="post" action="/chats">(.*?)</form>', re.DOTALL)


@pytest.mark.parametrize("kind", ["temporary", "project"])
def test_examples_stay_in_the_kind_of_chat_that_the_page_shows(start: Start, kind: str) -> None:
    server = start(ScriptedEngine()).ready()
    project = server.client.post("/projects", data={"name": "Tides"}).headers["location"].removeprefix("/projects/")
    value = {"temporary": "on", "project": project}[kind]
    page = server.client.get(f"/?{kind}={value}").text
    examples = EXAMPLE.findall(page)
    assert len(examples) == 3
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', examples[0]))
    location = server.client.post("/chats", data=fields).headers["location"]
    chat = server.on_loop(lambda: server.shared.store.chat("local", location.removeprefix("/chats/")))
    assert (chat.temporary, chat.project) == ((True, "") if kind == "temporary" else (False, project))
    server.client.post(f"{location}/clear")
    examples = EXAMPLE.findall(server.client.get(location).text)
    assert len(examples) == 3 and all(f'name="{kind}" value="{value}"' in each for each in examples)


def test_starters_stay_in_a_temporary_chat(start: Start) -> None:
    server = start(ScriptedEngine(is_demo=False)).ready()
    starters = re.findall(r'href="(/\?start=[^"]*)" data-start', server.client.get("/?temporary=on").text)
    assert starters
    for each in starters:
        assert 'name="temporary" value="on"' in server.client.get(unescape(each)).text


def test_only_temporary_chats_last_used_before_the_cutoff_lapse(server: Any) -> None:
    fields = {"text": "for a while", "key": new_id()}
    kept = server.client.post("/chats", data=fields).headers["location"].removeprefix("/chats/")
    fields |= {"temporary": "on", "key": new_id()}
    chat_id = server.client.post("/chats", data=fields).headers["location"].removeprefix("/chats/")
    chat = next(each for each in chats(server) if each.id == chat_id)

    def expired_temporary_chats(at_ms: int) -> Any:
        return server.on_loop(lambda: server.shared.store.expired_temporary_chats(at_ms))

    assert expired_temporary_chats(chat.updated_ms) == [] and expired_temporary_chats(chat.updated_ms + 1) == [
        ("local", chat_id)
    ]
    server.on_loop(lambda: server.shared.store.update_chat("local", chat_id, temporary=False))
    assert expired_temporary_chats(chat.updated_ms + 10**9) == [] and kept in {each.id for each in chats(server)}


def test_prompts_are_saved_renamed_and_deleted(server: Any) -> None:
    def save(**fields: str) -> Any:
        return server.client.post("/prompts", data={"name": "poem", "kind": "message", "text": "A poem on "} | fields)

    assert save().status_code == 303
    taken = save(text="A short poem on ")
    assert taken.status_code == 400 and "already exists" in taken.text and "A short poem on" in taken.text
    assert save(text="A short poem on ", was="poem").status_code == 303
    page = server.client.get("/").text
    assert 'data-name="poem"' in page and 'data-text="A short poem on "' in page and "A poem on" not in page
    assert save(name="verse", was="poem").status_code == 303
    assert [each.name for each in prompts(server)] == ["verse"]
    assert save(name="strict", kind="instructions", text="Answer in <b>one</b> word.").status_code == 303
    page = server.client.get("/").text
    assert 'data-act="carry" data-text="Answer in &lt;b&gt;one&lt;/b&gt; word."' in page, "only for the new chat"
    chat = server.client.get(f"/chats/{imported(server, 2)}").text
    assert 'name="system_prompt" value="Answer in &lt;b&gt;one&lt;/b&gt; word."' in chat
    assert server.client.post("/prompts/verse/delete").status_code == 303
    assert server.client.post("/prompts/verse/delete").status_code == 404
    assert [each.name for each in prompts(server)] == ["strict"]


@pytest.mark.parametrize("name", ["", "Poem", "a b", "help", "x" * 33, "ä", "../x"])
def test_invalid_prompt_name_is_rejected(server: Any, name: str) -> None:
    refused = server.client.post("/prompts", data={"name": name, "kind": "message", "text": "long words I typed"})
    assert refused.status_code == 400 and "is not a valid name: use 1 to 32" in refused.text
    assert "long words I typed" in refused.text, "the typed text is returned"
    assert prompts(server) == []


def test_number_and_length_of_prompts_are_limited(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_routes, "MAX_PROMPTS", 1)
    monkeypatch.setattr(prompt_routes, "MAX_PROMPT_CHARACTERS", 10)

    def status(name: str, text: str) -> int:
        answer = server.client.post("/prompts", data={"name": name, "kind": "message", "text": text})
        return int(answer.status_code)

    assert [status("a", "x" * 11), status("a", " "), status("a", "x"), status("b", "x")] == [400, 400, 303, 400]


def prompts(server: Any) -> list[Any]:
    found: list[Any] = server.on_loop(lambda: server.shared.store.prompts("local"))
    return found


def test_html_preview_removes_scripts_and_external_resources(server: Any) -> None:
    hostile = (
        "<h1 onclick='x()' style='color: red'>Hi</h1><script>alert(1)</script><style>h1 { margin: 0 }</style>"
        "<link rel=preconnect href=https://evil.example><meta http-equiv=refresh content='0;url=https://evil.example'>"
        "<img src=https://evil.example/x.png><a href='https://evil.example'>out</a><iframe src=//evil.example></iframe>"
        "<form action=https://evil.example><input name=a></form><base href=https://evil.example>"
        '<svg viewBox="0 0 9 9"><linearGradient id="g"></linearGradient><circle r="4" fill="url(#g)"/></svg>'
    )
    answer = server.client.post("/preview", data={"text": hostile})
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none';") and "allow" not in policy and "http" not in policy
    assert "evil.example" not in answer.text and "script" not in answer.text and "onclick" not in answer.text
    assert 'style="color: red"' in answer.text and "<style>h1 { margin: 0 }</style>" in answer.text
    assert "<linearGradient" in answer.text and 'viewBox="0 0 9 9"' in answer.text


def test_each_owner_runs_one_preview_at_a_time(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    gates: dict[str, asyncio.Event] = {}

    async def held(text: str) -> str:
        asked.append(text)
        gates[text] = asyncio.Event()
        await gates[text].wait()
        return text

    monkeypatch.setattr(preview, "preview_html", held)
    with ThreadPoolExecutor(8) as threads:
        posts = [threads.submit(server.client.post, "/preview", data={"text": f"{n}"}) for n in range(6)]
        server.wait(lambda: sum(post.done() for post in posts) == 1)  # One runs, four wait and one is refused.
        (refused,) = (post.result() for post in posts if post.done())
        assert refused.status_code == 429 and len(asked) == 1
        chat = threads.submit(server.ask, "beside them")
        assert chat.result(60).chat_id and len(asked) == 1, "a held preview must not block questions"
        for number in range(5):
            server.wait(lambda number=number: len(asked) == number + 1)
            server.on_loop(gates[asked[-1]].set)
        assert sorted(post.result().status_code for post in posts) == [200] * 5 + [429]


def test_too_expensive_preview_returns_413(server: Any) -> None:
    # all elements stay open, which takes quadratic time
    many = "".join(f"<b id=x{number}>" for number in range(20_000))
    answer = server.client.post("/preview", data={"text": many})
    assert answer.status_code == 413 and words["error_preview"] in answer.text
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert "<b>ok</b>" in server.client.post("/preview", data={"text": "<b>ok</b>"}).text


def test_preview_reports_failed_child(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failed(text: str) -> str:
        raise ConfinedWorkError("it took too long")

    monkeypatch.setattr(preview, "preview_html", failed)
    answer = server.client.post("/preview", data={"text": "<b>ok</b>"})
    assert answer.status_code == 413 and words["error_preview"] in answer.text
    assert answer.headers["content-security-policy"].startswith("sandbox")


def test_search_results_show_plain_text_and_link_to_the_match(server: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "**bold** and `needle` & more"}]
    server.client.post("/import", json={"messages": messages}, headers=FRAGMENT)
    html = server.client.get("/search?q=needle", headers=FRAGMENT).text
    assert ":~:text=needle" in html and "<mark>needle</mark>" in html
    assert "**" not in html and "`" not in html, "the link preview shows plain text without Markdown marks"


def test_chat_lists_read_only_shown_chats(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(450):
        server.on_loop(
            lambda number=number: server.shared.store.add_chat("local", new_chat(f"{number}", thinking=True), [])
        )
    read: list[int] = []
    plain = store_module.chat_from_row
    monkeypatch.setattr(store_module, "chat_from_row", lambda row: (read.append(1), plain(row))[1])

    def listed(address: str, **headers: str) -> tuple[int, int]:
        """Return the number of chats on the page and the number read from the store."""
        read.clear()
        html = server.client.get(address, headers=headers).text
        return len(re.findall(r'href="/chats/[0-9a-f-]{36}"', html)), len(read)

    assert listed("/") == (100, 100)
    assert 'hx-get="/chats?count=200&amp;current="' in server.client.get("/").text
    assert listed("/chats?count=200", **FRAGMENT) == (200, 200)
    assert listed("/chats?count=99999999", **FRAGMENT) == (450, 450)
    # The sidebar beside the table adds 100 chats.
    pages = [listed(f"/archive?page={page}") for page in (0, 1, 2, 3)]
    assert pages == [(300, 300), (300, 300), (150, 150), (100, 100)]
    assert "page=2" in server.client.get("/archive?page=1").text
