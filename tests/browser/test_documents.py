"""The document library: adding, searching, asking and deleting, and messages for unreadable files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.conversation import ask, begin, finished, questions
from browser.demo_engine import DemoEngine
from browser.test_accessibility import violations
from documents.made import text_pdf
from playwright.sync_api import Page, Route, expect

from notso.web.values.wording import words

Serve = Callable[..., Any]
Open = Callable[..., Page]
Picture = Callable[..., None]


def files(folder: Path, **contents: bytes) -> list[Path]:
    paths = []
    for name, content in contents.items():
        paths.append(folder / name.replace("_", "."))
        paths[-1].write_bytes(content)
    return paths


def test_documents_can_be_added_searched_asked_about_and_deleted(
    serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path, picture: Picture
) -> None:
    served = serve(demo.load)
    page = open_page(served.url)
    page.get_by_role("link", name="Documents", exact=True).click()
    expect(page.locator("#documents")).to_contain_text("No documents yet.")
    picture(page, "empty")
    birds = text_pdf(["The heron eats fish."], ["Storks nest on chimneys."])
    page.locator("#upload").set_input_files(files(tmp_path, birds_pdf=birds, scan_pdf=b"%PDF-1.7", notes_md=b"Cranes."))
    row = page.locator("#documents li")
    expect(row).to_have_count(3)
    expect(page.locator("#documents li[data-state=ready]")).to_have_count(2)
    expect(row.filter(has_text="birds.pdf")).to_contain_text("PDF, 2 pages")
    expect(row.filter(has_text="scan.pdf")).to_contain_text("is damaged: it is not a complete PDF")
    expect(page.locator("#documents")).to_have_attribute("hx-trigger", "refresh")
    picture(page, "list")
    page.locator("#document-words").fill("storks")
    page.keyboard.press("Enter")
    expect(page.locator("#content article")).to_contain_text("Storks nest on chimneys.")
    picture(page, "found")
    page.get_by_role("link", name="birds.pdf").click()
    expect(page.locator("#document-text")).to_have_text("Storks nest on chimneys.")
    page.get_by_text("Show the page as an image").click()
    drawn = page.get_by_role("img", name="page 2")
    expect(drawn).to_be_visible()
    expect(drawn).to_have_js_property("complete", True)
    assert drawn.evaluate("image => image.naturalWidth") > 500
    picture(page, "text", dark=True)
    page.get_by_role("link", name="Previous page").click()
    expect(page.locator("#document-text")).to_have_text("The heron eats fish.")
    page.get_by_role("link", name="Documents", exact=True).first.click()
    row.filter(has_text="birds.pdf").locator("input[type=checkbox]").check()
    page.get_by_role("button", name="Ask about the selected documents").click()
    expect(page.locator("#attachments .attached .name")).to_have_text(["birds.pdf"])
    picture(page, "chosen")
    begin(page, "What does it eat?")
    finished(page)
    assert demo.prompts[0].count("--- birds.pdf ---\nThe heron eats fish.\n\nStorks nest on chimneys.\n--- end") == 1
    expect(questions(page)).to_contain_text("What does it eat?")
    expect(page.locator("article.user a[href^='/documents/']")).to_contain_text("birds.pdf")
    expect(page.locator("#attachments")).to_be_empty()
    page.get_by_role("button", name="Show birds.pdf beside the chat").click()
    beside = page.locator("#source")
    expect(beside.locator("#document-text")).to_have_text("The heron eats fish.")
    beside.get_by_role("link", name="Next page").click()
    expect(beside.locator("#document-text")).to_have_text("Storks nest on chimneys.")
    beside.get_by_text("Show the page as an image").click()
    expect(beside.get_by_role("img", name="page 2")).to_be_visible()
    picture(page, "beside", dark=True)
    assert violations(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    picture(page, "beside-phone")
    page.set_viewport_size({"width": 1100, "height": 760})
    page.keyboard.press("Escape")
    expect(beside).to_be_hidden()
    page.get_by_role("link", name="Documents", exact=True).click()
    row.filter(has_text="scan.pdf").get_by_role("button", name="Delete scan.pdf").click()
    expect(row).to_have_count(2)


def test_citation_opens_the_quoted_passage_beside_the_chat(
    serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path, picture: Picture
) -> None:
    quoted = "nest on the chimneys of old houses"
    page = open_page(serve(demo.load).url + "documents")
    page.locator("#upload").set_input_files(
        files(tmp_path, birds_pdf=text_pdf(["The heron eats fish."], [f"Storks {quoted}."]))
    )
    row = page.locator("#documents li[data-state=ready]")
    expect(row).to_have_count(1)
    row.locator("input[type=checkbox]").check()
    page.get_by_role("button", name="Ask about the selected documents").click()
    demo.dictate(f"[[1: {quoted}]] Storks like old houses, and “never sleep in the rain at night”.")
    begin(page, "Where do they nest?")
    finished(page)
    answer = page.locator("article.assistant")
    link = answer.get_by_role("link", name="1", exact=True)
    expect(link).to_have_attribute("title", f"“{quoted}” – birds.pdf, page 2")
    expect(answer).to_contain_text("Not in the documents: “never sleep in the rain at night”")
    picture(page, "citation")
    link.click()
    beside = page.locator("#source")
    expect(beside.locator("mark")).to_have_text(quoted)
    expect(beside.locator("mark")).to_be_focused()
    picture(page, "cited", dark=True)
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.goto(page.evaluate("document.querySelector('a.citation').href"))
    expect(page.locator("#quoted")).to_be_in_viewport()
    expect(page.locator("#quoted")).to_have_text(quoted)


def test_selected_document_can_be_removed_before_sending(
    serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    page = open_page(serve(demo.load).url + "documents")
    page.locator("#upload").set_input_files(files(tmp_path, a_md=b"Herons.", b_md=b"Storks."))
    expect(page.locator("#documents li[data-state=ready]")).to_have_count(2)
    for box in page.locator("#documents input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Ask about the selected documents").click()
    chips = page.locator("#attachments .attached")
    expect(chips).to_have_count(2)
    chips.first.get_by_role("button", name="Remove").click()
    expect(chips).to_have_count(1)
    begin(page, "Who?")
    finished(page)
    assert "--- b.md ---\nStorks.\n" in demo.prompts[0] and "Herons" not in demo.prompts[0]


def test_reload_does_not_attach_sent_documents_again(
    serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    page = open_page(serve(demo.load).url)
    begin(page)
    page.get_by_role("link", name=words["attach_library"]).click()
    page.locator("#upload").set_input_files(files(tmp_path, a_md=b"Herons."))
    page.locator("#documents li[data-state=ready] input").check()
    page.get_by_role("button", name="Ask about the selected documents").click()
    chips = page.locator("#attachments .attached")
    expect(chips).to_have_count(1)
    page.reload()
    expect(chips).to_have_count(1)
    ask(page, "Who?")
    finished(page, 2)
    page.reload()
    expect(questions(page)).to_have_count(2)
    expect(chips).to_have_count(0)


def test_document_of_a_temporary_chat_is_not_stored_in_the_library(
    serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    page = open_page(serve(demo.load).url + "?temporary=on")
    page.locator("#files").set_input_files(files(tmp_path, birds_pdf=text_pdf(["The heron eats fish."])))
    expect(page.locator("#attachments .attached")).to_have_count(1)
    begin(page, "Who?")
    finished(page)
    assert "The heron eats fish." in demo.prompts[0]
    page.get_by_role("link", name="Documents", exact=True).click()
    expect(page.locator("#documents")).to_contain_text("No documents yet.")


def test_question_waits_for_its_documents(serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path) -> None:
    page = open_page(serve(demo.load).url)
    held: list[Route] = []
    page.route("**/documents?*", lambda route: held.append(route))
    page.locator("#files").set_input_files(files(tmp_path, birds_pdf=text_pdf(["The heron eats fish."])))
    expect(page.locator("#attachments [data-reading]")).to_be_visible()
    ask(page, "Who?")
    expect(page.locator("#text")).to_have_value("Who?")
    held[0].continue_()
    page.wait_for_url("**/chats/*")
    finished(page)
    assert "The heron eats fish." in demo.prompts[0]
    page.locator("#files").set_input_files(files(tmp_path, owls_pdf=b"%PDF-1.7 broken"))
    expect(page.locator("#attachments [data-reading]")).to_be_visible()
    ask(page, "And they?")
    held[1].continue_()
    expect(page.locator("#attachments .bad")).to_contain_text("owls.pdf")
    expect(page.locator("#text")).to_have_value("And they?")
    expect(questions(page)).to_have_count(1)
