"""Library documents in chats: upload, states, full text or passages in prompts, and deletion."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from documents.made import docx, paragraph, text_pdf
from scripted_engine import ScriptedEngine, say
from smollm3.engine.test_reread import settle

from notso.documents.citations import QUOTE_FIRST
from notso.documents.pdf import PNG, PageDrawer
from notso.smollm3 import Engine, FixedPrefix, Message, RequestOptions
from notso.smollm3.hub.registry import demo_path
from notso.web.chat import library
from notso.web.chat import library as library_module
from notso.web.chat.library import FolderLibrary, clear_stale_caches
from notso.web.sign_in.issued_keys import KeyManager
from notso.web.store.documents import EVERYONE
from notso.web.store.sql import documents as sql_documents
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.turns.documents import MAX_PASSAGE_TOKENS
from notso.web.values.ids import new_id
from notso.web.values.sign_in import SignInSettings

GOAL = 130  # the most prompt tokens that may be computed when the document is in the cache
HERONS = "The heron stands in the reeds. It eats fish and frogs."


def answering() -> ScriptedEngine:
    return ScriptedEngine(lambda messages, thinking: say("an answer"))


def upload(server: Any, name: str, data: bytes, wanted: str = "ready") -> dict[str, str]:
    """Upload a document and wait until it has been parsed."""
    answer = server.client.post("/documents", params={"name": name}, content=data)
    assert answer.status_code == 201, answer.text
    document_id = answer.json()["id"]

    def state() -> dict[str, str]:
        found: dict[str, str] = server.client.get(f"/documents/{document_id}/state").json()
        return found

    server.wait(lambda: state()["state"] in ("ready", "failed"))
    assert state()["state"] == wanted, state()
    return state()


def ask(server: Any, text: str, *documents: str, chat: str = "", **more: str) -> Any:
    fields = {"text": text, "key": new_id(), **more}
    for number, each in enumerate(documents, start=1):
        fields |= {f"file-{number}-name": "x", f"file-{number}-document": each}
    answer = server.client.post(f"/chats/{chat}/messages" if chat else "/chats", data=fields)
    if answer.status_code != 303:
        return answer
    asked = server.last(answer.headers["location"].removeprefix("/chats/"))
    server.finished(asked)
    return asked


def test_document_is_uploaded_parsed_searched_and_deleted(start: Callable[..., Any]) -> None:
    server = start(answering()).ready()
    pdf = text_pdf(["first page of herons"], ["second page of storks"])
    found = upload(server, "../etc/Birds.pdf", pdf)
    assert (found["name"], found["facts"], found["problem"]) == ("Birds.pdf", "PDF, 2 pages, 43 characters", "")
    assert upload(server, "again.pdf", pdf)["id"] == found["id"]
    upload(server, "scan.pdf", b"%PDF-1.7", wanted="failed")
    page = server.client.get("/documents").text
    assert "Birds.pdf" in page and "is damaged: it is not a complete PDF" in page and 'hx-trigger="refresh"' in page
    shown = server.client.get(f"/documents/{found['id']}?page=2").text
    assert "second page of storks" in shown and "first page of herons" not in shown
    assert "second page" in server.client.get(f"/documents/{found['id']}?at=30").text
    reread = server.client.get(f"/documents/{found['id']}?at=30&end=32&revision=old&page=1").text
    assert "second page" not in reread, "the text to which a citation refers was replaced"
    hits = server.client.get("/documents?q=STORKS").text
    assert "second page of storks" in hits and "page 2" in hits
    nothing = server.client.get("/documents?q=walrus").text
    assert "No matches in 2 documents." in nothing
    file = server.client.get(f"/documents/{found['id']}/file")
    assert file.content == pdf and file.headers["content-disposition"].startswith("attachment")
    assert file.headers["content-type"] == "application/octet-stream"
    failed = next(each for each in page.split("document-") if "is damaged" in each)[:36]
    assert server.client.post(f"/documents/{failed}/retry", data={}).status_code == 303
    server.wait(lambda: server.client.get(f"/documents/{failed}/state").json()["state"] == "failed")
    for each in (failed, found["id"]):
        assert server.client.post(f"/documents/{each}/delete", data={}).status_code == 303
        assert server.client.get(f"/documents/{each}").status_code == 404
        assert server.client.post(f"/documents/{each}/delete", data={}).status_code == 404
    assert "No documents yet." in server.client.get("/documents").text


def test_pdf_page_images_are_rendered_once(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(answering()).ready()
    drawn: list[int] = []

    class Counted(PageDrawer):
        def __init__(self, data: bytes, page: int, unconfined: bool = False) -> None:
            drawn.append(page)
            super().__init__(data, page, unconfined)

    monkeypatch.setattr(library, "PageDrawer", Counted)
    found = upload(server, "birds.pdf", text_pdf(["herons"], ["storks"]))
    here = f"/documents/{found['id']}"
    assert f'src="{here}/pages/2/image" loading="lazy"' in server.client.get(f"{here}?page=2").text
    for _ in range(2):
        image = server.client.get(f"{here}/pages/2/image")
        assert image.status_code == 200 and image.headers["content-type"] == "image/png"
        assert image.content.startswith(PNG) and image.headers["cache-control"] == "no-store"
    assert drawn == [2] and server.client.get(f"{here}/pages/1/image").content != image.content
    for page in (0, 3, -1):
        assert server.client.get(f"{here}/pages/{page}/image").status_code == 404
    note = upload(server, "note.md", b"text")
    assert server.client.get(f"/documents/{note['id']}/pages/1/image").status_code == 404
    assert "pages/1/image" not in server.client.get(f"/documents/{note['id']}").text
    server.client.post(f"{here}/delete", data={})
    assert server.client.get(f"{here}/pages/2/image").status_code == 404 and not server.chat.library._images


def test_invalid_uploads_are_rejected_with_a_reason(start: Callable[..., Any]) -> None:
    client = start(answering()).ready().client
    assert client.post("/documents?name=a.txt").json() == {"problem": "This file is empty."}
    assert client.post("/documents?name=a.txt", content=bytes((16 << 20) + 1)).status_code == 413
    assert client.get(f"/documents/{new_id()}").status_code == 404
    assert client.get("/documents/nothing").status_code == 404
    name = client.post("/documents", params={"name": "a\u202eb/\u0000"}, content=b"x").json()["name"]
    assert name == "document"


def test_documents_of_first_question_form_a_reusable_prompt_prefix(start: Callable[..., Any]) -> None:
    engine = answering()
    server = start(engine).ready()
    first = upload(server, "a.txt", HERONS.encode())
    second = upload(server, "b.txt", b"Storks nest on chimneys.")
    server.client.post("/settings", data={"system_prompt": "Be brief."})
    asked = ask(server, "Who eats fish?", second["id"], first["id"])
    head = f"--- a.txt ---\n{HERONS}\n--- end of a.txt ---\n\n"
    head += "--- b.txt ---\nStorks nest on chimneys.\n--- end of b.txt ---\n\n"
    today = date.today().isoformat()
    request = engine.requests[-1]
    assert request.messages == (
        Message("user", f"{head}Today is {today}.\n\nBe brief.\n\nWho eats fish?\n\n{QUOTE_FIRST}"),
    )
    prefix = request.options.prefix
    assert prefix is not None and (prefix.message, prefix.characters) == (0, len(head))
    ask(server, "And frogs?", chat=asked.chat_id)
    again = engine.requests[-1]
    assert again.messages[0] == request.messages[0] and again.messages[-1] == Message(
        "user", f"And frogs?\n\n{QUOTE_FIRST}"
    )
    assert again.options.prefix == prefix and again.options.date == request.options.date
    ask(server, "Who nests?", first["id"], second["id"])
    assert engine.requests[-1].options.prefix == prefix, "another chat reuses the cached document"
    ask(server, "Who?", first["id"])
    other = engine.requests[-1].options.prefix
    assert isinstance(other, FixedPrefix) and other.scope == prefix.scope and other.reading != prefix.reading
    assert other.characters < prefix.characters and head.startswith(engine.requests[-1].messages[0].content[:50])
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert f'href="/documents/{first["id"]}"' in page


def test_a_document_attached_later_is_part_of_its_question(start: Callable[..., Any]) -> None:
    engine = answering()
    server = start(engine).ready()
    found = upload(server, "a.txt", HERONS.encode())
    asked = ask(server, "Hello")
    ask(server, "Who eats fish?", found["id"], chat=asked.chat_id)
    request = engine.requests[-1]
    assert request.options.prefix is None
    assert (
        request.messages[-1].content
        == f"--- a.txt ---\n{HERONS}\n--- end of a.txt ---\n\nWho eats fish?\n\n{QUOTE_FIRST}"
    )


def test_document_over_context_limit_is_replaced_by_relevant_passages(start: Callable[..., Any]) -> None:
    engine = answering()
    server = start(engine).ready()
    pages = [[f"Page {number} tells of bird number {number}. {'Reeds and water. ' * 60}"] for number in range(1, 40)]
    pages[20][0] += " The secret of the walrus is cheese."
    found = upload(server, "book.pdf", text_pdf(*pages))
    asked = ask(server, "What is the secret of the walrus?", found["id"])
    content = engine.requests[-1].messages[-1].content
    assert engine.requests[-1].options.prefix is None
    assert "[book.pdf, page 21]" in content and "walrus is cheese" in content
    assert (
        content.endswith(f"What is the secret of the walrus?\n\n{QUOTE_FIRST}")
        and len(content) < 5 * MAX_PASSAGE_TOKENS
    )
    places = [int(part.split("]")[0]) for part in content.split("book.pdf, page ")[1:]]
    assert places == sorted(places)
    ask(server, "Xylophone?", chat=asked.chat_id)
    messages = engine.requests[-1].messages
    assert messages[0].content == "What is the secret of the walrus?", "passages appear only with the newest question"
    assert messages[-1].content == "Nothing in the document mentions the words of this question.\n\nXylophone?"


def test_documents_use_the_longer_document_context(start: Callable[..., Any]) -> None:
    engine = answering()
    engine.info = replace(engine.info, context_tokens=8_192, document_tokens=65_536)
    server = start(engine).ready()
    found = upload(server, "long.txt", f"{HERONS} ".encode() * 800)
    asked = ask(server, "Who eats fish?", found["id"])
    request = engine.requests[-1]
    assert request.options.prefix is not None and request.messages[0].content.count("fish") > 800

    gauge = server.client.post(f"/chats/{asked.chat_id}/estimate", data={"text": "x"}, headers={"HX-Request": "true"})
    assert "65,536" in gauge.text and "8,192" not in gauge.text
    plain = ask(server, "Hello")
    gauge = server.client.post(f"/chats/{plain.chat_id}/estimate", data={"text": "x"}, headers={"HX-Request": "true"})
    assert "8,192" in gauge.text
    ask(server, "Who eats fish?", found["id"], chat=plain.chat_id)
    assert engine.requests[-1].options.prefix is None and "Passages of the document" in str(
        engine.requests[-1].messages
    )


def test_question_with_failed_or_unknown_document_is_rejected(start: Callable[..., Any]) -> None:
    engine = answering()
    server = start(engine).ready()
    failed = upload(server, "scan.pdf", b"%PDF-1.7", wanted="failed")
    refused = ask(server, "My draft", failed["id"])
    assert refused.status_code == 400 and "is damaged" in refused.text and "My draft" in refused.text
    for unknown in (new_id(), "nothing"):
        answer = ask(server, "My draft", unknown)
        assert answer.status_code == 400 and "does not exist" in answer.text
    assert not engine.requests
    found = upload(server, "a.txt", HERONS.encode())
    asked = ask(server, "Who?", found["id"])
    server.client.post(f"/documents/{found['id']}/delete", data={})
    ask(server, "And now?", chat=asked.chat_id)
    assert engine.requests[-1].options.prefix is None and "heron" not in str(engine.requests[-1].messages)


def test_document_query_parameter_attaches_documents_without_scripts(start: Callable[..., Any]) -> None:
    server = start(answering()).ready()
    found = upload(server, "a.txt", HERONS.encode())
    asked = ask(server, "Hello")
    for address in ("/", f"/chats/{asked.chat_id}"):
        page = server.client.get(address, params={"document": [found["id"], new_id(), "nothing"]}).text
        assert page.count(f'name="file-1-document" value="{found["id"]}"') == 1 and "file-2-document" not in page
    assert f'action="/chats/{asked.chat_id}"' in server.client.get(f"/documents?chat={asked.chat_id}").text
    assert server.client.get(f"/documents?chat={new_id()}").status_code == 404


def test_deleting_a_document_clears_its_cached_prompts(start: Callable[..., Any]) -> None:
    engine = answering()
    server = start(engine).ready()
    found = upload(server, "a.txt", HERONS.encode())
    asked = ask(server, "Who?", found["id"])
    prefix = engine.requests[-1].options.prefix
    first = server.on_loop(lambda: server.shared.store.messages("local", asked.chat_id))[0]
    server.client.post(f"/documents/{found['id']}/delete", data={})
    for _ in range(2):
        server.on_loop(lambda: clear_stale_caches(server.shared.store, server.shared.engine))
    assert engine.cleared == [("local", first.id)] and engine.forgotten == [(prefix.scope, prefix.reading)]


def test_branches_and_edits_keep_documents_and_exports_omit_them(start: Callable[..., Any]) -> None:
    engine = answering()
    server = start(engine).ready()
    found = upload(server, "a.txt", HERONS.encode())
    asked = ask(server, "Who?", found["id"])
    question = server.on_loop(lambda: server.shared.store.messages("local", asked.chat_id))[0]
    here = f"/chats/{asked.chat_id}/messages/{question.id}"
    server.client.post(f"{here}/edit", data={"text": "Where?", "key": new_id()})
    server.finished(server.last(asked.chat_id))
    assert engine.requests[-1].options.prefix == engine.requests[-2].options.prefix is not None
    branched = server.client.post(f"{here}/branch", data={}).headers["location"].removeprefix("/chats/")
    ask(server, "And how?", chat=branched)
    assert HERONS in engine.requests[-1].messages[0].content
    for kind in ("md", "html"):
        exported = server.client.get(f"/chats/{asked.chat_id}/export/{kind}").text
        assert (
            "a.txt" in exported and HERONS not in exported and "/documents/" not in exported and "```" not in exported
        )
    exported = server.client.get(f"/chats/{asked.chat_id}/export/json").content
    chat = server.client.post("/import", content=exported, headers={"Content-Type": "application/json"})
    assert chat.status_code in (200, 303)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\n\u202eb.csv", "a b.csv"),
        ("x" * 196 + ".csv", "x" * 196 + ".csv"),
        ("x" * 300 + ".csv", "x" * 196 + ".csv"),
        ("x" * 300, "x" * 200),
        ("." + "x" * 300, "." + "x" * 199),
        ("a." + "x" * 300, "a." + "x" * 198),
        ("", "document"),
    ],
)
def test_long_names_keep_their_extension(name: str, shown: str) -> None:
    assert library.display_name(name) == shown


# ---------------------------------------------------------------- synchronized folder


def test_folder_sync_tracks_files_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = tmp_path / "folder", list[str]()
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("herons")
    (folder / "sub" / "b.md").write_text("storks")
    (folder / "copy of a.txt").write_text("herons")
    for ignored in (".hidden.txt", "movie.mp4", "empty.txt"):
        (folder / ignored).write_text("" if ignored == "empty.txt" else "x")
    (folder / "link.txt").symlink_to("/etc/passwd")
    hash_of = library_module.hashlib.sha256
    monkeypatch.setattr(library_module.hashlib, "sha256", lambda data: read.append(data) or hash_of(data))

    async def work() -> None:
        store = SQLiteStore(tmp_path / "data")
        await store.open()
        library = FolderLibrary(store.documents, folder)

        async def names() -> list[str]:
            return sorted(each.name for each in await store.documents.documents("anyone"))

        assert await library.sync() and await names() == ["a.txt", "sub/b.md"]
        read.clear()
        assert not await library.sync() and not read, "unchanged files are not read again"
        before = {each.sha256: each.id for each in await store.documents.documents("anyone")}
        (folder / "sub" / "b.md").rename(folder / "moved.md")
        (folder / "a.txt").unlink()
        assert not await library.sync()
        assert {each.sha256: each.id for each in await store.documents.documents("anyone")} == before
        (folder / "moved.md").write_text("storks and cranes")
        (folder / "copy of a.txt").unlink()
        assert await library.sync() and await names() == ["moved.md"]
        folder.rename(tmp_path / "away")
        with pytest.raises(OSError):
            await library.sync()
        assert await names() == ["moved.md"], "an unmounted folder must not count as empty"
        assert not await FolderLibrary(store.documents, None).sync() and await names() == []
        assert await store.documents.documents(EVERYONE) == []
        await store.close()

    asyncio.run(work())


def test_parser_searches_an_unshared_store_only_after_documents_were_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "CHECK_SECONDS", 0.0)
    searches: list[int] = []

    async def claim(now_ms: int) -> None:
        searches.append(now_ms)

    async def work() -> None:
        store = SQLiteStore(tmp_path)
        await store.open()
        library = await store.documents.library("me", "mine")
        await store.documents.add("me", library.id, "a.txt", b"herons")
        monkeypatch.setattr(store.documents, "claim", claim)
        parser = asyncio.create_task(library_module.LibraryWorker(store).run_parser())
        for expected in (1, 2, 3, 4):
            while len(searches) < expected:
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(searches) == expected
            match expected:
                case 1:
                    await store.documents.add("me", library.id, "b.txt", b"storks")
                case 2:
                    await store.documents.retry("me", new_id())
                case 3:
                    await store.documents.reread([new_id()])
        parser.cancel()
        await store.close()

    asyncio.run(work())


def test_folder_sync_keeps_documents_that_cannot_be_read_at_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    long = "/".join("x" * 99 for _ in range(3))
    (folder / long).mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt", "subtitle.txt", f"{long}/d.txt"):
        (folder / name).write_text(name)

    def denied(path: Path, *rest: object) -> Any:
        raise PermissionError(13, "denied", str(path))

    async def work() -> None:
        store = SQLiteStore(tmp_path / "data")
        await store.open()
        library = FolderLibrary(store.documents, folder)

        async def names() -> list[str]:
            return sorted(each.name for each in await store.documents.documents("anyone"))

        assert await library.sync()
        (folder / "b.txt").write_text("changed")
        (folder / "subtitle.txt").unlink()
        scan, read = os.scandir, library_module.read_regular
        with monkeypatch.context() as patched:
            closed = {folder / "sub", folder / long}
            patched.setattr(os, "scandir", lambda path: denied(path) if Path(path) in closed else scan(path))
            patched.setattr(
                *(library_module, "read_regular"),
                lambda path, limit: denied(path) if path.name == "b.txt" else read(path, limit),
            )
            assert not await library.sync() and not await library.sync()
            assert sorted(each.getMessage() for each in caplog.records) == [
                f"{name} in the document folder cannot be read at present"
                for name in ("b.txt", "sub", library_module.display_name(long))
            ]
            patched.setattr(os, "scandir", denied)
            with pytest.raises(PermissionError):
                await library.sync()
        shown = library_module.display_name(f"{long}/d.txt")
        assert await names() == ["a.txt", "b.txt", "sub/c.txt", shown]
        (folder / "sub" / "c.txt").unlink()
        assert await library.sync() and await names() == ["a.txt", "b.txt", shown]
        await store.close()

    asyncio.run(work())


def test_folder_sync_tries_a_file_without_space_again_after_a_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sql_documents, "MAX_DOCUMENTS_OF_OWNER", 1)
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "folder" / name).write_text(name)

    async def work() -> None:
        store = SQLiteStore(tmp_path / "data")
        await store.open()
        library = FolderLibrary(store.documents, tmp_path / "folder")
        assert [await library.sync() for _ in range(3)] == [True, False, False]
        (tmp_path / "folder" / "c.txt").write_text("c.txt")
        assert not await library.sync(), "a file without space is not added"
        (tmp_path / "folder" / "c.txt").unlink()
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "b.txt was not added to the library",
            "c.txt was not added to the library",
        ]
        (tmp_path / "folder" / "a.txt").unlink()
        assert await library.sync()
        assert [each.name for each in await store.documents.documents("anyone")] == ["b.txt"]
        await store.close()

    asyncio.run(work())


def test_file_replaced_by_a_fifo_during_sync_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    find = library.find_document_files

    def replace_found(root: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
        for path in find(root, on_error):
            path.unlink()
            os.mkfifo(path)
            yield path

    async def work() -> None:
        store = SQLiteStore(tmp_path / "data")
        await store.open()
        with monkeypatch.context() as patch:
            patch.setattr(library, "find_document_files", replace_found)
            assert not await FolderLibrary(store.documents, folder).sync()
        await store.close()

    asyncio.run(work())
    assert [each.getMessage() for each in caplog.records] == ["a.txt in the document folder cannot be read at present"]


def test_folder_documents_are_usable_but_cannot_be_deleted(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "birds.docx").write_bytes(docx(paragraph(HERONS)))
    engine = answering()
    server = start(engine, documents=tmp_path / "folder").ready()
    found: list[Any] = []

    def is_ready() -> bool:
        found[:] = server.on_loop(lambda: server.shared.store.documents.documents("local"))
        return bool(found) and found[0].state == "ready"

    server.wait(is_ready)
    page = server.client.get("/documents").text
    assert "birds.docx" in page and "/delete" not in page.split('id="documents"')[1].split("</ul>")[0]
    assert server.client.post(f"/documents/{found[0].id}/delete", data={}).status_code == 404
    ask(server, "Who?", found[0].id)
    assert HERONS in engine.requests[-1].messages[0].content


# ---------------------------------------------------------------- real engine


def test_document_cached_by_one_chat_is_reused_by_others(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(context_tokens=4096, kv="k8v8")
    server = start(lambda: engine).ready()
    words = "The heron number {} stands in the reeds and waits for a fish. "
    found = upload(server, "birds.txt", "".join(words.format(number) for number in range(60)).encode())
    server.client.post("/settings", data={"max_tokens": "4", "suggestions": "off", "titles": "off"})

    def read(text: str, **more: str) -> int:
        numbers = server.stored(ask(server, text, found["id"], **more)).numbers
        return int(numbers.prompt_tokens - numbers.cached_tokens)

    assert read("What is this?") > 600
    assert read("Who wrote it?") <= GOAL
    server.client.post("/settings", data={"system_prompt": "Be brief."})
    assert read("Who has it?") <= GOAL, "other instructions must not invalidate the cached document"
    real = date.today()

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date.fromordinal(real.toordinal() + 1)

    monkeypatch.setattr("notso.web.chat.submit.date", Tomorrow)
    assert read("Who wrote that?") <= GOAL, "another date must not invalidate the cached document"
    assert read("Who thinks?", thinking="on") > 600
    assert read("Who thought?", thinking="on") <= GOAL, "each thinking mode caches the document once"
    assert server.client.post(f"/documents/{found['id']}/delete", data={}).status_code == 303
    server.on_loop(lambda: clear_stale_caches(server.shared.store, server.shared.engine))
    messages = [Message("user", f"--- birds.txt ---\n{words.format(0)}")]
    assert engine.estimate(messages, RequestOptions(thinking=False, owner="local")).cached_tokens == 0


def test_small_context_fits_passages_and_every_part_answers(start: Callable[..., Any]) -> None:
    """The estimate of tokens must leave a margin: the demo model needs more tokens per word than estimated."""
    engine = Engine.load(context_tokens=2048, kv="k8v8")
    server = start(lambda: engine).ready()
    pages = [[f"Page {number} of the heron's xylophone zymurgy quixotic jukebox. " * 20] for number in range(1, 12)]
    found = upload(server, "book.pdf", text_pdf(*pages))
    server.client.post("/settings", data={"max_tokens": "4", "suggestions": "off", "titles": "off"})
    asked = server.stored(ask(server, "Which page of the heron?", found["id"]))
    assert asked.state == "done" and 500 < asked.numbers.prompt_tokens < 1600
    every = server.stored(ask(server, "Which page?", found["id"], every="on"))
    assert every.state == "done" and every.content.count("**book.pdf, page") >= 3, every.note
    assert every.numbers.cached_tokens < 0.2 * every.numbers.prompt_tokens > 600
    again = server.stored(ask(server, "Which page is it?", found["id"], every="on"))
    assert again.numbers.cached_tokens > 0.5 * again.numbers.prompt_tokens


def test_document_cache_is_reused_across_members_and_restarts(start: Callable[..., Any], tmp_path: Path) -> None:
    folder, data = tmp_path / "folder", tmp_path / "data"
    folder.mkdir()
    words = "".join(f"The heron number {number} stands in the reeds and waits for a fish. " for number in range(60))
    (folder / "birds.txt").write_text(words)
    book = KeyManager(lambda: SQLiteAccessStore(data))
    keys = [book.add(name)[0] for name in ("ann", "bob")]
    model = tmp_path / "model.gguf"
    model.write_bytes(demo_path().read_bytes())

    def serve(path: Path) -> tuple[Any, Engine]:
        engine = Engine.load(path, context_tokens=4096, kv="k8v8", cache_dir=tmp_path / "kv")
        assert engine._identity is not None
        engine._identity.wait(60)
        settings = {"documents": folder, "sign_in": SignInSettings(require_key=True)}
        return start(lambda: engine, **settings).ready(), engine

    def read(server: Any, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        documents = server.shared.store.documents
        server.wait(
            lambda: any(each.state == "ready" for each in server.on_loop(lambda: documents.documents(EVERYONE)))
        )
        (found,) = server.on_loop(lambda: documents.documents(EVERYONE))
        fields = {"text": f"Who? {new_id()[:8]}", "key": new_id(), "file-1-name": "x", "file-1-document": found.id}
        server.client.post("/settings", data={"max_tokens": "4", "suggestions": "off"}, headers=headers)
        chat_id = server.client.post("/chats", data=fields, headers=headers).headers["location"].rpartition("/")[2]
        owner = f"key:{next(each.id for each in book.all() if each.name == ('ann' if key == keys[0] else 'bob'))}"

        def last() -> Any:
            return server.on_loop(lambda: server.shared.store.messages(owner, chat_id))[-1]

        server.wait(lambda: not last().active)
        return int(last().numbers.prompt_tokens - last().numbers.cached_tokens)

    server, engine = serve(model)
    assert read(server, keys[0]) > 600
    assert read(server, keys[1]) <= GOAL, "another member of the group reuses the cached document"
    settle(engine)
    server.close()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    server, engine = serve(copy)
    assert read(server, keys[1]) <= GOAL, "a copied model file reuses the cache after a restart"


def test_question_about_a_deleted_document_can_be_edited(start: Callable[..., Any]) -> None:
    server = start(answering()).ready()
    gone, kept = (upload(server, f"{name}.txt", f"all about {name}".encode()) for name in ("herons", "storks"))
    asked = ask(server, "What do they say?", gone["id"], kept["id"])
    assert server.client.post(f"/documents/{gone['id']}/delete").status_code in (204, 303)
    question = server.stored(asked).parent_id
    fields = {"text": "And now?", "key": new_id()}
    assert server.client.post(f"/chats/{asked.chat_id}/messages/{question}/edit", data=fields).status_code == 303
    edited = server.last(asked.chat_id)
    stored = server.stored(replace(edited, message_id=server.stored(edited).parent_id))
    assert stored.content == "And now?" and [each.document for each in stored.attachments] == [kept["id"]]
    unknown = ask(server, "And this?", gone["id"])
    assert unknown.status_code == 400, "a new question must not name a deleted document"
