"""Typed text is never lost: arguments of unknown commands, and settings whose dialog is closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser.conversation import begin, finished, imported, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine

from notso.web.values.wording import words

Open = Callable[..., Page]
Picture = Callable[..., None]


@pytest.fixture
def chat(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> Callable[..., Page]:
    """A page with one answer."""

    def open_chat(**options: Any) -> Page:
        page = open_page(serve(demo.load).url, **options)
        begin(page, "What is 27 + 48?")
        return page

    return open_chat


def test_text_after_an_unknown_command_is_kept(chat: Callable[..., Page], demo: DemoEngine) -> None:
    page = chat()
    text, problem = page.locator("#text"), page.locator("#composer-problem")
    typed = "/summarise the following text for me: " + "blah " * 300 + "end"
    text.fill(typed)
    text.press("Enter")
    expect(problem).to_contain_text("Unknown command /summarise. Press Enter again to send it as a message.")
    assert text.input_value() == typed and page.locator("article.user").count() == 1
    page.reload()
    assert text.input_value() == typed, "the draft is kept unchanged"
    text.press("Enter")
    assert text.input_value() == typed
    text.press("Enter")
    expect(page.locator("article.user .bubble").last).to_have_text(typed)
    finished(page, 2)
    text.fill("/thinkin off")
    text.press("Tab")
    assert text.input_value() == "/thinking off", "the text after the name is kept"
    text.fill("/tempp 0.5")
    page.locator("#command-temp").click()
    assert text.input_value() == "/temp 0.5"


@pytest.mark.parametrize("leave", ["Escape", "beside"])
def test_settings_are_saved_when_the_dialog_is_closed(chat: Callable[..., Page], picture: Picture, leave: str) -> None:
    page = chat(expected="status of 400|response:error")
    show_settings(page, "model")
    instructions = "Answer in verse. " * 33
    page.locator("#set-temperature").fill("7")  # an invalid value, which must not prevent the others from being saved
    page.locator("#set-top_p").fill("0.7")
    page.locator("#tab-chat").click()
    page.locator("#set-titles").select_option("on")
    page.locator("#set-system_prompt").fill(instructions)
    with page.expect_response(
        lambda answer: answer.request.method == "POST" and "verse" in str(answer.request.post_data)
    ):
        page.keyboard.press("Escape") if leave == "Escape" else page.mouse.click(5, 5)
    expect(page.locator("#settings")).to_be_hidden()
    show_settings(page, "model")
    expect(page.locator("#set-temperature")).to_have_value("")
    expect(page.locator("#set-system_prompt")).to_have_value(instructions)
    expect(page.locator("#set-top_p")).to_have_value("0.7")
    expect(page.locator("#set-titles")).to_have_value("on")
    page.locator("#tab-model").click()
    page.locator("#set-min_p").fill("0.1")
    page.locator("#set-seed").focus()
    page.keyboard.type("12")
    expect(page.get_by_text("Saved.")).to_be_visible()
    expect(page.locator("#set-seed")).to_have_value("12")
    expect(page.locator("#set-seed")).to_be_focused()
    picture(page, leave)


def attach(page: Page, *names: str) -> None:
    """Attach text files of a few words each."""
    page.locator("#files").set_input_files(
        [{"name": name, "mimeType": "text/plain", "buffer": f"In {name}.".encode()} for name in names]
    )
    expect(page.locator("#attachments .attached .name")).to_have_text([*names])


def test_draft_and_files_survive_reload_and_failed_send(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine
) -> None:
    """This also holds for the first question, which creates the chat."""
    page = open_page(serve(demo.load).url, expected="ERR_FAILED|ERR_INTERNET|Failed to fetch")
    text, files = page.locator("#text"), page.locator("#attachments .attached .name")
    for count in (1, 2):
        text.fill("What do they say?")
        attach(page, "a.md", "b.md")
        page.reload()
        expect(text).to_have_value("What do they say?")
        expect(files).to_have_text(["a.md", "b.md"])
        page.context.set_offline(True)
        text.press("Enter")
        expect(page.locator("#composer-problem")).not_to_be_empty()
        page.context.set_offline(False)
        page.reload()
        expect(text).to_have_value("What do they say?")
        expect(files).to_have_text(["a.md", "b.md"])
        text.press("Enter")
        page.wait_for_url("**/chats/*")
        finished(page, count)
        expect(page.locator(".attachment").last).to_contain_text("In b.md.")
        page.reload()
        expect(text).to_have_value("")
        expect(files).to_have_count(0)
    page.goto("/".join(page.url.split("/")[:3]))
    expect(text).to_have_value("")
    expect(files).to_have_count(0)


def test_edited_text_is_kept_until_sent_or_cancelled(chat: Callable[..., Page]) -> None:
    page = chat()
    edit, box = page.locator("article.user [data-edit]"), page.locator("#edit-text")
    edit.click()
    box.fill("What is 1 + 1?")
    page.reload()
    edit.click()
    expect(box).to_have_value("What is 1 + 1?")
    page.locator(".edit [data-stop]").click()
    edit.click()
    expect(box).to_have_value("What is 27 + 48?")
    box.fill("What is 2 + 2?")
    page.locator(".edit [data-regenerate]").click()
    finished(page)
    edit.click()
    expect(box).to_have_value("What is 2 + 2?")


def test_drafts_are_forgotten_at_sign_out(serve: Callable[..., Any], open_page: Open, tmp_path: Path) -> None:
    page = open_page(serve(ScriptedEngine(), api_key="k" * 24).url)

    def sign_in() -> None:
        page.locator("#api_key").fill("k" * 24)
        page.locator("#api_key").press("Enter")
        expect(page.locator("#text")).to_be_visible()

    sign_in()
    page.locator("#text").fill("A secret")
    (tmp_path / "notes.txt").write_text("Another secret")
    page.locator("#files").set_input_files(tmp_path / "notes.txt")
    page.reload()
    expect(page.locator("#text")).to_have_value("A secret")
    expect(page.locator("#attachments .attached")).to_have_count(1)
    show_settings(page, "data")
    page.get_by_role("button", name=words["logout"]).click()
    sign_in()
    expect(page.locator("#text")).to_have_value("")
    expect(page.locator("#attachments .attached")).to_have_count(0)


def test_two_tabs_of_one_chat_keep_separate_drafts(chat: Callable[..., Page], open_page: Open) -> None:
    page = chat()
    other = open_page(page.url, like=page)
    page.locator("#text").fill("in the one")
    other.locator("#text").fill("in the other")
    for tab, draft in ((page, "in the one"), (other, "in the other")):
        tab.reload()
        expect(tab.locator("#text")).to_have_value(draft)


def test_first_question_is_shown_before_the_server_responds(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url)
    held: list[Any] = []
    page.route("**/chats", lambda route: held.append(route) if route.request.method == "POST" else route.continue_())
    page.locator("#text").fill("Are you there?")
    page.locator("#text").press("Enter")
    expect(page.locator(".turn.pending .bubble")).to_have_text("Are you there?")
    while not held:  # the bubble is shown before the request is intercepted
        page.evaluate("0")
    held[0].continue_()
    page.wait_for_url("**/chats/*")
    finished(page)


def test_text_direction_is_determined_per_text(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    hebrew = "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd."
    imported(page, [{"role": "user", "content": hebrew}, {"role": "assistant", "content": f"- {hebrew}\n\nHello."}])
    direction = "(element) => getComputedStyle(element).direction"
    assert page.locator("article.user .bubble").evaluate(direction) == "rtl"
    assert page.locator(".answer li").evaluate(direction) == "rtl"
    item, list_ = page.locator(".answer li").bounding_box(), page.locator(".answer ul").bounding_box()
    assert item and list_ and item["x"] == list_["x"], "the bullet is on the right"
    left = """(element) => {
        const range = document.createRange();
        range.selectNodeContents(element);
        return range.getBoundingClientRect().left - element.getBoundingClientRect().left;
    }"""
    assert page.locator(".answer p", has_text="Hello").evaluate(left) < 5, "English text still starts on the left"
    page.locator("#text").fill(hebrew)
    assert page.locator("#text").evaluate(direction) == "rtl"


def test_empty_input_has_the_direction_of_the_page(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    page = open_page(serve(demo.load).url, locale="ar")
    direction = "(element) => getComputedStyle(element).direction"
    assert page.locator("#text").evaluate(direction) == "rtl"
    page.locator("#text").fill("Hello")
    assert page.locator("#text").evaluate(direction) == "ltr"
    page.goto(page.url + "settings")
    expect(page.locator("#data-folder")).to_contain_text(f"\u2066{tmp_path}/data\u2069")
