"""Projects and memory on the pages and in prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say
from web.chat.test_documents import GOAL, HERONS, answering, ask, upload
from web.turns.test_tool_turns import call, permit

from notso import Engine
from notso.documents.citations import QUOTE_FIRST
from notso.smollm3 import Event, Message
from notso.web.sign_in.issued_keys import KeyManager
from notso.web.store.protocol import SettingsChange
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.values.ids import new_id
from notso.web.values.sign_in import SignInSettings

Start = Callable[..., Any]
DAY = date.today().isoformat()


def created(client: httpx.Client, name: str) -> str:
    answer = client.post("/projects", data={"name": name})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"].removeprefix("/projects/")


def added(server: Any, project: str, name: str, text: str, client: httpx.Client | None = None) -> str:
    client = client or server.client
    answer = client.post("/documents", params={"name": name, "library": project}, content=text.encode())
    assert answer.status_code == 201, answer.text
    server.wait(lambda: client.get(f"/documents/{answer.json()['id']}/state").json()["state"] == "ready")
    return str(answer.json()["id"])


def test_project_documents_and_instructions_form_one_prompt_prefix(start: Start) -> None:
    engine = answering()
    server = start(engine).ready()
    project = created(server.client, " Birds\u202e of  prey ")
    page = f"/projects/{project}"
    assert "Birds of prey" in server.client.get("/").text, "the sidebar lists the project"
    server.client.post("/settings", data={"system_prompt": "Be brief.", "temperature": "0.9", "min_p": "0.1"})
    assert (
        server.client.post(f"{page}/settings", data={"temperature": "0.3", "system_prompt": "No."}).status_code == 303
    )
    server.client.post(page, data={"instructions": "Answer as an ornithologist."})
    ask(server, "Who eats?", project=project)
    request = engine.requests[-1]
    assert [each.content for each in request.messages] == ["Answer as an ornithologist.\n\nBe brief.", "Who eats?"]
    assert (request.params.temperature, request.params.min_p) == (0.3, 0.1)
    added(server, project, "a.txt", HERONS)
    asked = ask(server, "Who eats fish?", project=project)
    request = engine.requests[-1]
    head = f"--- a.txt ---\n{HERONS}\n--- end of a.txt ---\n\nAnswer as an ornithologist.\n\n"
    assert request.messages == (
        Message("user", f"{head}Today is {DAY}.\n\nBe brief.\n\nWho eats fish?\n\n{QUOTE_FIRST}"),
    )
    prefix = request.options.prefix
    assert (prefix.message, prefix.characters) == (0, len(head))
    ask(server, "And frogs?", chat=asked.chat_id)
    assert engine.requests[-1].options.prefix == prefix
    other = upload(server, "b.txt", b"Storks nest on chimneys.")
    ask(server, "Who nests?", other["id"], project=project)
    request = engine.requests[-1]
    assert request.options.prefix == prefix, "a document attached to a question is not part of the project"
    assert request.messages[0].content.endswith(f"--- end of b.txt ---\n\nWho nests?\n\n{QUOTE_FIRST}")
    server.client.post(page, data={"instructions": "Answer as a poet."})
    ask(server, "Who rhymes?", project=project)
    changed = engine.requests[-1].options.prefix
    assert changed.scope == prefix.scope and changed.reading != prefix.reading
    shown = server.client.get(page).text
    assert "a.txt" in shown and "Who eats fish?" in shown and "Answer as a poet." in shown and "b.txt" not in shown
    assert "b.txt" in (elsewhere := server.client.get("/documents").text) and "a.txt" not in elsewhere
    assert "Storks nest" not in server.client.get("/documents?q=heron").text


def test_oversized_project_adds_instructions_and_passages_to_prompt(start: Start) -> None:
    engine = answering()
    server = start(engine).ready()
    project = created(server.client, "Book")
    server.client.post(f"/projects/{project}", data={"instructions": "Quote."})
    text = "\f".join(f"Page {number} tells of bird {number}. {'Reeds and water. ' * 60}" for number in range(1, 40))
    added(server, project, "book.txt", text + "The secret of the walrus is cheese.")
    ask(server, "What is the secret of the walrus?", project=project)
    request = engine.requests[-1]
    assert request.options.prefix is None and request.messages[0] == Message("system", "Quote.")
    assert "walrus is cheese" in request.messages[1].content


def test_chats_can_be_moved_and_survive_project_deletion(start: Start) -> None:
    engine = answering()
    server = start(engine).ready()
    project = created(server.client, "Birds")
    document = added(server, project, "a.txt", HERONS)
    asked = ask(server, "Hello")
    where = f"/chats/{asked.chat_id}"
    assert f'<option value="{project}">Birds' in server.client.get(where).text
    assert server.client.post(f"{where}/project", data={"project": project}).status_code == 303
    assert f'href="/projects/{project}" dir="auto"' in server.client.get(where).text
    ask(server, "Who eats fish?", chat=asked.chat_id)
    assert HERONS in engine.requests[-1].messages[0].content
    for wrong in (new_id(), "nothing"):
        assert server.client.post(f"{where}/project", data={"project": wrong}).status_code == 404
        refused = ask(server, "My draft", project=wrong)
        assert refused.status_code == 404 and "My draft" in refused.text
    assert server.client.post(f"{where}/project", data={"project": ""}).status_code == 303
    ask(server, "Who?", chat=asked.chat_id)
    assert HERONS not in str(engine.requests[-1].messages)
    server.client.post(f"{where}/project", data={"project": project})
    page = server.client.get(f"/projects/{project}").text
    assert "and its 1 document for everyone" in page
    assert server.client.post(f"/projects/{project}/delete", data={}).status_code == 303
    assert server.client.get(f"/documents/{document}").status_code == 404
    assert server.client.get(f"/projects/{project}").status_code == 404
    assert server.client.get(where).status_code == 200
    ask(server, "Who is left?", chat=asked.chat_id)
    assert HERONS not in str(engine.requests[-1].messages)


def test_project_names_and_texts_are_validated(start: Start) -> None:
    client = start(answering()).ready().client
    project = created(client, "Birds")
    for name, status in (("", 400), ("\u200b", 400), ("x" * 101, 400), ("Birds", 409), ("Documents", 409)):
        assert client.post("/projects", data={"name": name}).status_code == status
    again = client.get("/projects")  # loads the address of the error page again
    assert (again.status_code, again.headers["location"]) == (303, "/documents")
    assert "Birds" in client.get("/documents").text
    created(client, "Fish")
    assert client.post(f"/projects/{project}", data={"name": "Fish"}).status_code == 409
    assert client.post(f"/projects/{project}", data={"name": "Fowl"}).status_code == 303
    assert client.post(f"/projects/{project}", data={}).status_code == 400
    refused = client.post(f"/projects/{project}", data={"instructions": "long " * 5_000})
    assert refused.status_code == 400 and "the limit is 20,000" in refused.text and "long long" in refused.text
    assert client.post(f"/projects/{project}/settings", data={"temperature": "warm"}).status_code == 400
    for wrong in (new_id(), "nothing"):
        assert client.get(f"/projects/{wrong}").status_code == 404
        assert client.post("/documents", params={"library": wrong}, content=b"x").status_code == 404


def test_project_deleted_during_a_change_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(answering()).ready()
    store = type(server.shared.store.documents)
    change_library = store.change_library

    async def change_deleted(self: Any, owner: str, library_id: str, **changes: Any) -> bool:
        await self.delete_library(owner, library_id)
        return bool(await change_library(self, owner, library_id, **changes))

    monkeypatch.setattr(store, "change_library", change_deleted)
    for path, form in (("", {"instructions": "Be brief."}), ("/settings", {"temperature": "0.3"})):
        page = f"/projects/{created(server.client, 'Birds')}"
        refused = server.client.post(f"{page}{path}", data=form)
        assert refused.status_code == 404 and "This project does not exist" in refused.text, path


def test_simultaneous_changes_of_default_settings_are_both_kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(answering()).ready()
    client, store = server.client, type(server.shared.store)
    documents, project = type(server.shared.store.documents), created(client, "Birds")
    change_defaults, change_library = store.change_defaults, documents.change_library

    async def change_defaults_late(self: Any, owner: str, change: SettingsChange) -> None:
        await change_defaults(self, owner, lambda stored: {**stored, "min_p": 0.25})
        await change_defaults(self, owner, change)

    async def change_library_late(self: Any, owner: str, library_id: str, **changes: Any) -> bool:
        await change_library(self, owner, library_id, settings=lambda stored: {**stored, "min_p": 0.25})
        return bool(await change_library(self, owner, library_id, **changes))

    monkeypatch.setattr(store, "change_defaults", change_defaults_late)
    monkeypatch.setattr(documents, "change_library", change_library_late)
    for path, form, pages in (
        ("/settings", {"temperature": "0.75"}, ["/settings"]),
        ("/tools", {"tool-calculator": "on"}, ["/settings"]),
        (f"/projects/{project}/settings", {"temperature": "0.75"}, [f"/projects/{project}/settings"]),
    ):
        client.post("/settings", data={"min_p": ""})
        assert client.post(path, data=form).status_code == 303
        for page in pages:
            shown = client.get(page).text
            assert re.search(r'name="min_p"[^>]*value="0.25"', shown), path
            assert "temperature" not in form or re.search(r'name="temperature"[^>]*value="0.75"', shown), path


def test_memory_follows_documents_in_the_prompt_unless_disabled(start: Start) -> None:
    engine = answering()
    server = start(engine).ready()
    client = server.client
    assert "Nothing is remembered yet." in client.get("/memory").text
    for text in ("I am  vegetarian.", "I live in Oslo."):
        assert client.post("/memory", data={"text": text}).status_code == 303
    memory = "The user wants you to remember:\n- I am vegetarian.\n- I live in Oslo."
    ask(server, "Hello")
    assert engine.requests[-1].messages[0] == Message("system", memory)
    found = upload(server, "a.txt", HERONS.encode())
    asked = ask(server, "Who eats fish?", found["id"])
    head = f"--- a.txt ---\n{HERONS}\n--- end of a.txt ---\n\n"
    request = engine.requests[-1]
    assert request.messages[0].content == f"{head}Today is {DAY}.\n\n{memory}\n\nWho eats fish?\n\n{QUOTE_FIRST}"
    assert request.options.prefix.characters == len(head)
    client.post(f"/chats/{asked.chat_id}/settings", data={"memory": "off"})
    ask(server, "And now?", chat=asked.chat_id)
    assert "Oslo" not in str(engine.requests[-1].messages)
    ask(server, "In private", temporary="on")
    assert "Oslo" not in str(engine.requests[-1].messages)
    page = client.get("/memory").text
    first, second = re.findall(r'name="id" value="([^"]+)"', page)
    assert client.post("/memory", data={"id": first, "text": "I am vegan."}).status_code == 303
    assert client.post(f"/memory/{second}/delete", data={}).status_code == 303
    assert client.post(f"/memory/{second}/delete", data={}).status_code == 404
    assert client.post("/memory", data={"id": second, "text": "again"}).status_code == 404
    ask(server, "And me?")
    assert engine.requests[-1].messages[0].content.endswith("remember:\n- I am vegan.")
    refused = client.post("/memory", data={"text": "x" * 501})
    assert refused.status_code == 400 and "x" * 501 in refused.text
    for number in range(9):
        last = client.post("/memory", data={"text": f"{number} " + "y" * 490})
    assert last.status_code == 400 and "The memory is full" in last.text and "8 yyy" in last.text
    assert client.post("/memory", data={"id": first, "text": " "}).status_code == 303
    assert "vegan" not in client.get("/memory").text


# ---------------------------------------------------------------- members


def test_members_share_project_documents_and_cache_but_not_chats(start: Start, tmp_path: Path) -> None:
    book = KeyManager(lambda: SQLiteAccessStore(tmp_path))
    keys = {name: book.add(name)[0] for name in ("ann", "bob", "eve")}
    engine = answering()
    server = start(engine, data_dir=tmp_path, sign_in=SignInSettings(require_key=True)).ready()
    ann, bob, eve = (
        httpx.Client(base_url=server.address, headers={"Authorization": f"Bearer {keys[name]}"}, timeout=60)
        for name in ("ann", "bob", "eve")
    )
    project = created(ann, "Birds")
    page = f"/projects/{project}"
    document = f"/documents/{added(server, project, 'a.txt', HERONS, ann)}"

    def question(client: httpx.Client, text: str) -> Any:
        count = len(engine.requests)
        answer = client.post("/chats", data={"text": text, "key": new_id(), "project": project})
        if answer.status_code == 303:
            server.wait(lambda: len(engine.requests) > count)
        return answer

    assert question(ann, "The owner's question").status_code == 303
    prefix = engine.requests[-1].options.prefix
    for client in (bob, eve):
        assert client.get(page).status_code == 404 and question(client, "May I?").status_code == 404
    for name, rights, status in (
        ("bob", "read", 303),
        ("nobody", "read", 404),
        ("ann", "read", 404),
        ("eve", "x", 400),
    ):
        assert ann.post(f"{page}/members", data={"name": name, "rights": rights}).status_code == status
    shown = bob.get(page).text
    assert "a.txt" in shown and "Shared with you" in shown and "Birds" in bob.get("/").text
    assert "The owner&#39;s question" not in shown and "Add documents" not in shown and "Delete project" not in shown
    for path in (document, f"{document}/state", f"{document}/file"):
        assert (bob.get(path).status_code, eve.get(path).status_code) == (200, 404)
    for path in (f"{document}/delete", f"{document}/retry"):
        assert (bob.post(path, data={}).status_code, eve.post(path, data={}).status_code) == (404, 404)
    assert question(bob, "The member's question").status_code == 303
    request = engine.requests[-1]
    assert request.options.prefix == prefix and request.options.owner != "local"
    assert "member" not in ann.get(page).text.partition("<main>")[2].partition("Members")[0]
    for path, data in (
        (page, {"instructions": "Obey."}),
        (f"{page}/members", {"name": "eve", "rights": "add"}),
        (f"{page}/members/remove", {"member": "x"}),
        (f"{page}/settings", {"temperature": "0"}),
        (f"{page}/delete", {}),
    ):
        assert (bob.post(path, data=data).status_code, eve.post(path, data=data).status_code) == (403, 404)
    upload_to = {"params": {"name": "b.txt", "library": project}, "content": b"Storks nest."}
    assert (bob.post("/documents", **upload_to).status_code, eve.post("/documents", **upload_to).status_code) == (
        403,
        404,
    )
    ann.post(f"{page}/members", data={"name": "bob", "rights": "add"})
    assert bob.post("/documents", **upload_to).status_code == 201
    assert "No matches in 2 documents" in bob.get("/documents?q=walrus").text, "projects are searched too"
    member = re.findall(r'name="member" value="([^"]+)"', ann.get(page).text)
    assert len(member) == 1 and ann.post(f"{page}/members/remove", data={"member": member[0]}).status_code == 303
    assert bob.get(page).status_code == 404 and "Birds" not in bob.get("/").text
    assert bob.get("/documents?q=heron").text.count("No matches in 0 documents") == 1


def test_a_member_can_leave_a_project(start: Start, tmp_path: Path) -> None:
    book = KeyManager(lambda: SQLiteAccessStore(tmp_path))
    keys = [book.add(name)[0] for name in ("ann", "bob", "eve")]
    server = start(answering(), data_dir=tmp_path, sign_in=SignInSettings(require_key=True)).ready()
    ann, bob, eve = (
        httpx.Client(base_url=server.address, headers={"Authorization": f"Bearer {key}"}, timeout=60) for key in keys
    )
    page = f"/projects/{created(ann, 'Birds')}"
    for name in ("bob", "eve"):
        ann.post(f"{page}/members", data={"name": name, "rights": "read"})
    own, of_eve = (
        re.findall(r'name="member" value="([^"]+)"[^>]*>Leave project', client.get(page).text)[0]
        for client in (bob, eve)
    )
    assert "Leave project" not in ann.get(page).text
    assert bob.post(f"{page}/members/remove", data={"member": of_eve}).status_code == 403
    left = bob.post(f"{page}/members/remove", data={"member": own})
    assert (left.status_code, left.headers["location"]) == (303, "/documents")
    assert (bob.get(page).status_code, eve.get(page).status_code) == (404, 200)
    assert bob.post(f"{page}/members/remove", data={"member": own}).status_code == 404
    book.revoke("ann")
    assert (ann.get(page).status_code, eve.get(page).status_code) == (401, 200), "unlike links, members are known"


def test_member_reuses_the_cached_project_prefix(start: Start, tmp_path: Path) -> None:
    book = KeyManager(lambda: SQLiteAccessStore(tmp_path))
    keys = [book.add(name)[0] for name in ("ann", "bob")]
    engine = Engine.load(context_tokens=4096, kv="k8v8")
    server = start(lambda: engine, data_dir=tmp_path, sign_in=SignInSettings(require_key=True)).ready()
    ann, bob = (
        httpx.Client(base_url=server.address, headers={"Authorization": f"Bearer {key}"}, timeout=60) for key in keys
    )
    project = created(ann, "Birds")
    ann.post(f"/projects/{project}", data={"instructions": "Answer in one word.", "rights": "read"})
    ann.post(f"/projects/{project}/settings", data={"max_tokens": "4", "suggestions": "off", "titles": "off"})
    ann.post(f"/projects/{project}/members", data={"name": "bob", "rights": "read"})
    words = "The heron number {} stands in the reeds and waits for a fish. "
    added(server, project, "birds.txt", "".join(words.format(number) for number in range(60)), ann)

    def read(client: httpx.Client, text: str) -> int:
        answer = client.post("/chats", data={"text": text, "key": new_id(), "project": project})
        chat_id = answer.headers["location"].removeprefix("/chats/")
        owner = owners[client is bob]

        def last() -> Any:
            return server.on_loop(lambda: server.shared.store.messages(owner, chat_id))[-1]

        server.wait(lambda: not last().active)
        return int(last().numbers.prompt_tokens - last().numbers.cached_tokens)

    owners = [f"key:{key.id}" for key in book.all()]  # in order of the users' names
    assert read(ann, "What is this?") > 600
    assert read(bob, "What is that?") <= GOAL
    bob.post("/memory", data={"text": "I count herons."})
    assert read(bob, "And now?") <= GOAL


@pytest.mark.parametrize("answer, wanted", [("once", 1), ("deny", 0)])
def test_remember_tool_requires_permission(start: Start, answer: str, wanted: int) -> None:
    def remembering(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].role == "tool":
            yield from say("I see.")
        else:
            yield call("remember", '{"text": "Likes herons."}')

    server = start(ScriptedEngine(remembering)).ready()
    server.client.post("/tools", data={"tool-remember": "on"})
    turn = server.ask("Remember that I like herons.")
    permit(server, turn, answer)
    server.finished(turn)
    found = server.on_loop(lambda: server.shared.store.memories("local"))
    assert [each.text for each in found] == ["Likes herons."] * wanted
