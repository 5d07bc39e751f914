"""Citations on the page: shown only if a document contains the quotation, and removed together with the document."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from documents.made import text_pdf
from scripted_engine import ScriptedEngine, say
from web.chat.test_documents import ask, upload

from notso.documents.citations import QUOTE_FIRST, revision_of
from notso.web.rendering.markdown import render_markdown
from notso.web.store.documents import Citation
from notso.web.store.protocol import StoredMessage
from notso.web.turns.citations import render_citations
from notso.web.values.ids import new_generation_id

ANSWER = (
    "[[1: The stork eats frogs]] It eats frogs. [[1: The stork eats <b>mice</b>]] [[2: no such document]]"
    " They say “the stork flies to the far south” and “The heron stands in the reeds.”"
)


def test_quotations_found_in_documents_become_numbered_citations(start: Callable[..., Any]) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say(ANSWER))
    server = start(engine).ready()
    found = upload(
        server, "birds.pdf", text_pdf(["The heron stands in the reeds."], ["Here. The stork", "eats frogs."])
    )
    asked = ask(server, "What do they eat?", found["id"])
    request = engine.requests[-1]
    assert request.messages[-1].content.endswith(QUOTE_FIRST)
    assert [each.name for each in request.options.sources] == [found["id"]]
    assert "\n" not in request.options.sources[0].text and "The stork eats frogs." in request.options.sources[0].text
    answer = server.stored(asked)
    first, *others = answer.citations
    assert (first.document, first.page, first.name) == (found["id"], 2, "birds.pdf")
    assert [each.document for each in others] == ["", "", ""]
    page = server.client.get(f"/chats/{answer.chat_id}").text
    link = re.search(r'<a class="citation" href="([^"]+)" title="([^"]+)">1</a>', page)
    assert link is not None and link[2] == "“The stork eats frogs” – birds.pdf, page 2"
    assert '“The stork eats &lt;b&gt;mice&lt;/b&gt;” <span class="absent">not in the documents</span>' in page
    assert "Not in the documents: “the stork flies to the far south”" in page and "“The heron stands in" in page
    place = server.client.get(link[1].replace("&amp;", "&").partition("#")[0]).text
    assert '<mark id="quoted" tabindex="-1">The stork\neats frogs</mark>.' in place
    moved = server.client.get(link[1].replace("&amp;", "&").replace(first.revision, "0" * 16)).text
    assert "<mark" not in moved and "The stork" in moved
    exported = server.client.get(f"/chats/{answer.chat_id}/export/md").text
    assert "[^1]: “The stork eats frogs” – birds.pdf, page 2" in exported
    server.client.post(f"/documents/{found['id']}/delete", data={})
    gone = server.client.get(f"/chats/{answer.chat_id}").text
    assert 'class="citation"' not in gone and found["id"] not in str(server.stored(asked).citations)


def test_repeated_quotation_has_its_own_number() -> None:
    content = "[[1: frogs]] and [[1: frogs]] and [[1: grain]]"
    places = [found.span() for found in re.finditer(r"\[\[.*?\]\]", content)]
    citations = tuple(Citation(*place, "document", "0", 0, 5, name="a") for place in places)
    message = StoredMessage("m", "c", "assistant", content, "", "done", 0, citations=citations)
    html = render_citations(render_markdown(content), message)
    assert re.findall(r">(\d)</a>", html) == ["1", "2", "3"]


def test_invalid_citations_are_stored_without_document(start: Callable[..., Any]) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("[[1: The stork eats frogs]]"))).ready()
    found = upload(server, "birds.txt", b"Here. The stork eats frogs. The heron stands.")
    other = upload(server, "other.txt", b"Here. The crane eats grain. The heron stands.")
    asked = server.stored(ask(server, "What?", found["id"]))
    (true,) = asked.citations
    assert (true.start, true.end) == (6, 26)
    planted = [
        replace(true, start=true.start + 1, end=true.end + 1),
        replace(true, end=true.end + 1),
        replace(true, end=10_000),
        replace(true, start=-20, end=0),
        replace(true, to=true.to - 1),
        replace(true, at=true.at + 1),
        replace(true, document=other["id"]),
        replace(true, document=other["id"], revision=revision_of("Here. The crane eats grain. The heron stands.")),
        replace(true, document="unknown"),
        replace(true, revision="0" * 16),
    ]

    def store(*citations: Citation) -> tuple[Citation, ...]:
        async def work() -> Any:
            kept, number = server.shared.store, new_generation_id()
            await kept.resume_message("local", asked.chat_id, asked.id, number)
            await kept.save_message(replace(asked, generation_id=number, citations=citations), "local")
            return await kept.message("local", asked.chat_id, asked.id)

        found: tuple[Citation, ...] = server.on_loop(work).citations
        return found

    for each in planted:
        assert store(each) == (Citation(each.at, each.to),), each
    assert store(replace(true, page=7, name="false")) == (true,)


def test_document_replaced_during_the_answer_is_not_cited(start: Callable[..., Any]) -> None:
    """When the answer ends, its quotation is looked up in the documents stored at that time."""
    documents, replaced = list[str](), list[str]()

    def answer(messages: Any, thinking: bool) -> Any:
        assert "The stork eats frogs" in messages[-1].content
        assert server.on_loop(lambda: server.shared.store.documents.delete("local", documents[0]))
        replaced.append(upload(server, "birds.txt", b"Here. The stork sleeps now. The heron stands.")["id"])
        return say("[[1: The stork eats frogs]] It eats.")

    server = start(ScriptedEngine(answer)).ready()
    documents.append(upload(server, "birds.txt", b"Here. The stork eats frogs. The heron stands.")["id"])
    asked = server.stored(ask(server, "What?", documents[0]))
    assert asked.state == "done" and asked.content == "[[1: The stork eats frogs]] It eats."
    assert [(each.document, each.start, each.end) for each in asked.citations] == [("", 0, 0)]
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert replaced and 'class="citation"' not in page and "not in the documents" in page
