"""Projects and memory: creating, filling, asking, moving and deleting; light, dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.conversation import begin, finished
from browser.demo_engine import DemoEngine
from browser.test_accessibility import violations
from browser.test_documents import files
from playwright.sync_api import Page, expect

PHONE = {"width": 390, "height": 800}


def test_project_is_created_filled_used_in_a_chat_and_deleted(
    serve: Callable[..., Any],
    open_page: Callable[..., Page],
    demo: DemoEngine,
    tmp_path: Path,
    picture: Callable[..., None],
) -> None:
    served = serve(demo.load)
    page = open_page(served.url + "documents")
    page.get_by_label("New project").fill("Birds")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Birds")
    page.locator("#upload").set_input_files(
        files(tmp_path, herons_md=b"The heron eats fish.", storks_md=b"Storks nest.")
    )
    expect(page.locator("#documents li[data-state=ready]")).to_have_count(2)
    page.get_by_label("Instructions").fill("Answer in one sentence.")
    page.locator("form:has(#instructions) button").click()
    expect(page.get_by_label("Instructions")).to_have_value("Answer in one sentence.")
    picture(page, "project", dark=True)
    assert violations(page) == []
    page.get_by_role("link", name="New chat in this project").click()
    expect(page.locator(".in-project")).to_have_text("Birds")
    begin(page, "What does it eat?")
    finished(page)
    assert demo.prompts[0].index("end of storks.md") < demo.prompts[0].index("Answer in one sentence.")
    expect(page.locator("#chat-list a[aria-current=page]")).to_have_text("What does it eat?")
    picture(page, "chat", dark=True)
    page.set_viewport_size(PHONE)
    picture(page, "chat-phone")
    page.set_viewport_size({"width": 1100, "height": 760})
    page.get_by_role("button", name="Chat menu").click()
    picture(page, "menu", dark=True)
    assert violations(page) == []
    page.locator("#chat-menu").get_by_label("Project").select_option("None")
    page.locator("#chat-menu").get_by_role("button", name="Move").click()
    expect(page.locator(".in-project")).to_have_count(0)
    page.get_by_role("button", name="Chat menu").click()
    page.locator("#chat-menu").get_by_label("Project").select_option("Birds")
    page.locator("#chat-menu").get_by_role("button", name="Move").click()
    page.locator(".in-project a").click()
    expect(page.locator("#content .rows a", has_text="What does it eat?")).to_be_visible()
    page.set_viewport_size(PHONE)
    picture(page, "phone", dark=True)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= PHONE["width"], "nothing is cut off"
    page.locator(".in-project, #content").first.evaluate("element => element.scrollTop = element.scrollHeight")
    page.get_by_text("Delete project").first.click()
    expect(page.get_by_text("This deletes the project and its 2 documents for everyone")).to_be_visible()
    page.locator("#content").evaluate("element => element.scrollTop = element.scrollHeight")
    picture(page, "delete")
    page.get_by_role("button", name="Delete project").click()
    expect(page.get_by_text("No documents yet.")).to_be_visible()
    picture(page, "documents-phone")


def test_memory_entries_can_be_added_edited_and_deleted(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine, picture: Callable[..., None]
) -> None:
    served = serve(demo.load)
    page = open_page(served.url)
    page.locator("#sidebar [commandfor=settings]").click()
    page.get_by_role("tab", name="Chat", exact=True).click()
    expect(page.get_by_label("Memory")).to_have_value("on")
    picture(page, "settings", dark=True)
    page.locator("#panel-chat").get_by_role("link", name="Memory").click()
    for text in ("I am vegetarian.", "Answer me in metric units."):
        page.get_by_label("New entry").fill(text)
        page.keyboard.press("Enter")
        expect(page.get_by_label("New entry")).to_have_value("")
    page.get_by_label("Entry 1", exact=True).fill("I am vegan.")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Entry 1", exact=True)).to_have_value("I am vegan.")
    picture(page, "memory", dark=True)
    assert violations(page) == []
    page.get_by_role("button", name="Delete entry 2").click()
    expect(page.get_by_label("Entry 2", exact=True)).to_have_count(0)
    page.set_viewport_size(PHONE)
    picture(page, "memory-phone")
    page.goto(served.url)
    begin(page, "What may I eat?")
    finished(page)
    assert "I am vegan." in demo.prompts[0] and "metric" not in demo.prompts[0]
