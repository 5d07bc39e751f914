"""What was typed is never thrown away: text behind a command nobody knows, and settings when their sheet is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import begin, finished
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect

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


def test_text_behind_an_unknown_command_is_never_lost(chat: Callable[..., Page], demo: DemoEngine) -> None:
    page = chat()
    text, problem = page.locator("#text"), page.locator("#composer-problem")
    typed = "/summarise the following text for me: " + "blah " * 300 + "end"
    text.fill(typed)
    text.press("Enter")
    expect(problem).to_contain_text("There is no command /summarise. Send it once more to send it as a message.")
    assert text.input_value() == typed and page.locator("article.user").count() == 1
    page.reload()
    assert text.input_value() == typed, "the draft is kept whole"
    text.press("Enter")
    assert text.input_value() == typed
    text.press("Enter")
    expect(page.locator("article.user .bubble").last).to_have_text(typed)
    finished(page, 2)
    text.fill("/thinkin off")
    text.press("Tab")
    assert text.input_value() == "/thinking off", "what follows the name is kept"
    text.fill("/tempp 0.5")
    page.locator("#command-temp").click()
    assert text.input_value() == "/temp 0.5"


@pytest.mark.parametrize("leave", ["Escape", "beside"])
def test_settings_are_kept_when_the_sheet_is_left(chat: Callable[..., Page], picture: Picture, leave: str) -> None:
    page = chat(expected="status of 400|response:error")
    page.get_by_role("button", name="Settings").click()
    instructions = "Answer in verse. " * 33
    page.locator("#set-temperature").fill("7")  # cannot be, and keeps nothing else from being kept
    page.locator("#set-top_p").fill("0.7")
    page.locator("#set-titles").select_option("on")
    page.locator("#set-system_prompt").fill(instructions)
    with page.expect_response(
        lambda answer: answer.request.method == "POST" and "verse" in str(answer.request.post_data)
    ):
        page.keyboard.press("Escape") if leave == "Escape" else page.mouse.click(5, 5)
    expect(page.locator("#settings")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("#set-temperature")).to_have_value("")
    expect(page.locator("#set-system_prompt")).to_have_value(instructions)
    expect(page.locator("#set-top_p")).to_have_value("0.7")
    expect(page.locator("#set-titles")).to_have_value("on")
    page.locator("#set-min_p").fill("0.1")
    page.locator("#set-seed").focus()
    page.keyboard.type("12")
    expect(page.get_by_text("Saved.")).to_be_visible()
    expect(page.locator("#set-seed")).to_have_value("12")
    expect(page.locator("#set-seed")).to_be_focused()
    picture(page, leave)
