"""The chat list, with the real engine: titles, search, pin, delete, undo, export, import, and tabs in sync."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.conversation import answers, ask, begin, chat_row, finished, last_answer, questions, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, Route, expect

from notso.web.values.wording import words

Serve = Callable[..., Any]
Open = Callable[..., Page]
Picture = Callable[..., None]


def test_chat_title_is_the_first_line_of_the_question(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    text = "\n\nPlease   tell me something about the walrus and where it may be found in winter\nand more"
    page.locator("#text").fill(text)
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/chats/*")
    finished(page)
    title = "Please tell me something about the walrus and where it may be found in winter"
    expect(page.get_by_role("heading", name=title)).to_be_visible()
    expect(page.locator("#chat-list").get_by_role("link", name=title)).to_have_attribute("aria-current", "page")
    expect(page.locator("#chat-list")).to_contain_text("Today")
    expect(page).to_have_title(f"{title} · notso")


def test_forms_work_over_http_on_another_machine(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    key = "k" * 24
    server = serve(demo.load, api_key=key, allowed_hosts=("notso.test",))
    page = open_page(f"http://notso.test:{server.port}/login", expected="Cross-Origin-Opener-Policy")
    page.locator("#api_key").fill(key)
    page.locator("#api_key").press("Enter")
    expect(page.locator("#text")).to_be_focused()
    begin(page, "Apples")
    page.get_by_role("button", name="Chat menu").click()
    page.locator("#chat-menu").get_by_label("Title").fill("Fruit")
    page.locator("#chat-menu").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", name="Fruit")).to_be_visible()


def test_chat_list_is_synchronized_between_tabs(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    server = serve(demo.load)
    first = open_page(server.url)
    second = open_page(server.url, like=first)
    begin(first, "Apples and pears")
    link = second.locator("#chat-list").get_by_role("link", name="Apples and pears")
    expect(link).to_be_visible()
    chat_row(first, "Apples and pears").get_by_role("button", name="Pin", exact=True).click()
    for page in (first, second):
        expect(page.locator("#chat-list")).to_contain_text("Pinned")
    picture(first)
    chat_row(first, "Apples and pears").get_by_role("button", name="Unpin").click()
    for page in (first, second):
        expect(page.locator("#chat-list")).not_to_contain_text("Pinned")
    first.get_by_role("button", name="Chat menu").click()
    first.locator("#chat-menu").get_by_label("Title").fill("Fruit")
    first.locator("#chat-menu").get_by_role("button", name="Rename").click()
    expect(second.locator("#chat-list").get_by_role("link", name="Fruit")).to_be_visible()


def test_deleted_chat_can_be_restored(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    begin(page, "To be deleted")
    said = answers(page).locator(".answer").inner_text()
    chat_row(page, "To be deleted").get_by_role("button", name=words["delete"]).click()
    page.wait_for_url("**/?undo=*")
    expect(page.locator("#toasts")).to_contain_text("Chat deleted.")
    expect(page.locator("#chat-list")).not_to_contain_text("To be deleted")
    page.get_by_role("button", name="Undo").click()
    page.wait_for_url("**/chats/*")
    expect(answers(page).locator(".answer")).to_have_text(said, use_inner_text=True)


def test_deletion_in_another_tab_is_shown_and_can_be_undone(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    server = serve(demo.load)
    page = open_page(server.url, expected="status of 404|response:error")
    demo.hold("thinking")
    ask(page, "Go on")
    page.wait_for_url("**/chats/*")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    other = open_page(server.url, like=page)
    chat_row(other, "Go on").get_by_role("button", name=words["delete"]).click()
    expect(page.locator("#turns")).to_contain_text("Chat not found.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#status-label")).to_have_text("Ready")
    ask(page, "Still here?")
    expect(page.locator("#composer-problem")).to_contain_text("Chat not found.")
    expect(page.locator("#text")).to_have_value("Still here?")
    other.get_by_role("button", name="Undo").click()
    expect(questions(page)).to_contain_text("Go on")


def test_failed_requests_leave_the_page_as_it_is(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, expected="status of 503|response:error")
    begin(page, "Apples")
    page.get_by_role("button", name=words["regenerate"]).click()
    finished(page)
    failed: list[str] = []

    def fail(route: Route) -> None:
        failed.append(route.request.url.rpartition("/")[2].partition("?")[0])
        body = "<title>Error</title><p>No backend</p>"
        route.fulfill(status=503, content_type="text/html", body=body)

    page.route(re.compile("/(chats|delete|choose|edit)([?]|$)"), fail)
    page.get_by_role("button", name=words["version_previous"]).click()
    expect(page.locator("#composer-problem")).to_have_text("No backend")
    for request in ("edit", "chats", "delete"):
        with page.expect_response(re.compile(f"/{request}([?]|$)")):
            if request == "edit":
                page.locator("article.user [data-edit]").evaluate("link => link.click()")
            elif request == "chats":
                page.evaluate("htmx.trigger(document.body, 'chats')")
            else:
                chat_row(page, "Apples").get_by_role("button", name=words["delete"]).click()
    expect(page).to_have_title(re.compile("Apples"))
    page.unroute_all()
    chat_row(page, "Apples").get_by_role("button", name="Pin", exact=True).click()
    expect(page.locator("#chat-list")).to_contain_text("Pinned")
    expect(questions(page)).to_contain_text("Apples")
    expect(answers(page)).to_have_count(1)
    assert set(failed) == {"chats", "choose", "delete", "edit"}
    demo.hold("answer", 1)
    ask(page, "Pears")
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    failed.clear()
    page.route(re.compile("/messages/[^/]+[?]after="), fail, times=1)
    demo.release()
    finished(page, 2)
    assert len(failed) == 1


def test_streams_that_fail_to_open_are_opened_again(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, expected="status of 503|response:error")
    feed = re.compile("/feed[?]chat=[0-9a-f]")
    with page.expect_response(feed):
        begin(page, "Apples")
    for stream in (re.compile("/events[?]"), feed):
        page.route(stream, lambda route: route.fulfill(status=503), times=1)
    with page.expect_response(lambda response: feed.search(response.url) is not None and response.ok):
        ask(page, "Pears")
        finished(page, 2)


def test_cleared_chat_can_be_restored(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    begin(page)
    page.get_by_role("button", name="Chat menu").click()
    page.get_by_role("button", name=words["menu_clear"], exact=True).click()
    expect(answers(page)).to_have_count(0)
    expect(page.locator("#toasts")).to_contain_text("Messages cleared.")
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_have_count(1)


def test_shared_chat_is_wide_and_has_no_buttons(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("Look:\n\n```python\nprint(1)\n```\n")
    begin(page, "Show me code")
    page.goto(f"{page.url}/share")
    page.locator("main button.accent").click()
    page.goto(page.locator("#share-link").input_value())
    picture(page, dark=True)
    expect(page.locator(".answer pre")).to_contain_text("print(1)")
    assert page.locator("button").filter(visible=True).count() == 0
    box = page.locator("main").bounding_box()
    assert box and box["width"] == 48 * 16


def test_search_result_opens_the_matching_branch(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("On a floe, says answer number 1.")
    demo.dictate("On the ice, says answer number 2.")
    begin(page, "Where do walruses live?")
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(page)).to_contain_text("number 2.")
    finished(page)
    page.goto(page.url.partition("/chats")[0] + "/")
    page.keyboard.press("Control+k")
    page.locator("#search-text").fill("number 1")
    hit = page.locator("#search-results a:has(mark)").first
    expect(hit.locator("mark").first).to_be_visible()
    picture(page, dark=True)
    page.keyboard.press("ArrowDown")  # the chat
    page.keyboard.press("ArrowDown")  # its first matching message
    expect(hit).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url("**/chats/*")
    expect(answers(page)).to_contain_text("number 1.")
    page.keyboard.press("Control+k")
    page.locator("#search-text").fill("number 1")
    hit.click()  # the page shows this result already
    expect(page.locator("#search")).to_be_hidden()


def test_chat_can_be_exported_and_imported(serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path) -> None:
    page = open_page(serve(demo.load).url, expected="status of 400")
    begin(page, "What is 27 + 48?")
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(page)).to_contain_text("2/2")
    finished(page)
    said = answers(page).locator(".answer").inner_text()
    files = {}
    for kind, label in (("md", "Markdown"), ("json", "JSON"), ("html", "HTML")):
        page.get_by_role("button", name="Chat menu").click()
        with page.expect_download() as download:
            page.locator("#chat-menu").get_by_role("link", name=label).click()
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
        page.keyboard.press("Escape")
    assert said in files["md"].read_text("utf-8") and files["md"].suffix == ".md"
    assert said in files["html"].read_text("utf-8") and "<script" not in files["html"].read_text("utf-8")
    assert json.loads(files["json"].read_text("utf-8"))
    show_settings(page, "data")
    page.locator("#import").set_input_files(files["json"])
    expect(page.locator("#chat-list .chats > li")).to_have_count(2)
    page.locator("#chat-list").get_by_role("link", name="What is 27 + 48?").first.click()
    expect(answers(page).locator(".answer")).to_have_text(said, use_inner_text=True)
    expect(answers(page)).to_contain_text("2/2")
    (tmp_path / "broken.json").write_text('{"chats": [')
    show_settings(page, "data")
    page.locator("#import").set_input_files(tmp_path / "broken.json")
    expect(page.locator("#import-report")).to_contain_text("not valid JSON")
    with page.expect_download() as download:
        page.get_by_role("link", name=words["export_all"]).click()
    download.value.save_as(tmp_path / "all")
    assert said.splitlines()[0] in (tmp_path / "all").read_text("utf-8")
