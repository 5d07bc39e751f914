"""The command palette above the input, by keyboard and mouse, and every command in it, with the real engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser.conversation import answers, ask, begin, finished, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Locator, Page, expect

Open = Callable[..., Page]
Picture = Callable[..., None]


@pytest.fixture
def chat(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> Callable[[], Page]:
    """A page with one answer."""

    def open_chat() -> Page:
        demo.dictate("This is an answer.")
        page = open_page(serve(demo.load).url)
        begin(page, "Show me")
        return page

    return open_chat


def option(page: Page, name: str) -> Locator:
    return page.locator(f"#command-{name}")


def test_palette_works_by_keyboard(chat: Callable[..., Page]) -> None:
    page = chat()
    text = page.locator("#text")
    text.press_sequentially("/")
    expect(page.locator("#palette")).to_be_visible()
    expect(page.locator("#palette [role=option]:visible")).to_have_count(13)
    expect(page.locator("#announcer")).to_contain_text("13")
    expect(option(page, "help")).to_have_attribute("aria-selected", "true")
    text.press("ArrowDown")
    expect(option(page, "clear")).to_have_attribute("aria-selected", "true")
    assert text.get_attribute("aria-activedescendant") == "command-clear"
    text.press("ArrowUp")
    text.press("ArrowUp")
    expect(option(page, "settings")).to_have_attribute("aria-selected", "true")
    text.press("Escape")
    expect(page.locator("#palette")).to_be_hidden()
    assert text.input_value() == "/" and text.get_attribute("aria-activedescendant") is None
    text.press_sequentially("th")
    expect(page.locator("#palette [role=option]:visible")).to_have_count(2)
    text.press("Tab")
    assert text.input_value() == "/thinking "
    text.press_sequentially("off")
    text.press("Enter")
    expect(page.get_by_role("switch", name="Thinking", exact=True)).not_to_be_checked()
    assert text.input_value() == ""
    text.fill("/theme dark")
    text.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("article.user").count() == 1, "no command was sent to the model"


def test_every_palette_command_works(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    begin(page, "What is 27 + 48?")
    listed = page.locator("#palette [data-name]").evaluate_all("all => all.map((one) => one.dataset.name)")
    done: list[str] = []

    def run(command: str) -> None:
        done.append(command.split()[0])
        ask(page, f"/{command}")
        expect(page.locator("#text")).to_have_value("")

    page.locator("#text").press_sequentially("/")
    picture(page, dark=True)
    run("help")
    expect(page.locator("#help")).to_be_visible()
    for name in listed:
        expect(page.locator("#help")).to_contain_text(f"/{name}")
    picture(page, "help")
    page.keyboard.press("Escape")
    run("theme dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    run("theme light")
    run("temp 0")
    expect(page.locator("#toasts")).to_contain_text("Temperature 0")
    run("thinking off")
    expect(page.get_by_role("switch", name="Thinking", exact=True)).not_to_be_checked()
    with page.expect_response("**/thinking"):
        run("thinking 256")
    expect(page.get_by_role("switch", name="Thinking", exact=True)).to_be_checked()
    expect(page.locator("#budget")).to_have_value("256")
    run("regenerate")
    expect(answers(page)).to_contain_text("2/2")
    finished(page)
    before = answers(page).locator(".answer").inner_text()
    demo.dictate(" It goes on.")
    run("continue")
    expect(answers(page).locator(".answer")).to_contain_text("It goes on.")
    finished(page)
    assert answers(page).locator(".answer").inner_text().startswith(before)
    with page.expect_download() as download:
        run("export json")
    assert download.value.suggested_filename.endswith(".json")
    run("status")
    expect(page.locator("#status-details")).to_be_visible()
    page.keyboard.press("Escape")
    run("settings")
    expect(page.locator("#settings")).to_be_visible()
    expect(page.locator("#set-temperature")).to_have_value("0")
    page.keyboard.press("Escape")
    run("summarize")
    expect(page.locator("article.summary-card")).to_have_attribute("data-state", "done")
    run("clear")
    expect(answers(page)).to_have_count(0)
    page.locator("#toasts").get_by_role("button", name="Undo").click()
    expect(answers(page)).not_to_have_count(0)
    run("reset")
    expect(answers(page)).to_have_count(0)
    page.reload()
    show_settings(page, "model")
    expect(page.locator("#set-temperature")).to_have_value("")
    page.keyboard.press("Escape")
    done.append("model")
    ask(page, "/model")
    page.wait_for_url("**/models")
    assert set(listed) == set(done) and len(listed) >= 13


def test_unknown_command_is_corrected_and_not_sent(chat: Callable[..., Page], demo: DemoEngine) -> None:
    page = chat()
    text = page.locator("#text")
    text.fill("/temprature 1")
    expect(page.locator("#palette")).to_contain_text("Unknown command")
    text.press("Enter")
    assert text.input_value() == "/temp 1"
    text.fill("/temprature")
    text.press("Enter")
    assert text.input_value() == "/temp "
    page.get_by_role("button", name="Send").click()  # no value follows the command, so the settings open
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    for count, (typed, sent) in enumerate(
        (("//temp is a folder", "/temp is a folder"), ("/usr/bin is one", "/usr/bin is one")), start=2
    ):
        text.fill(typed)
        expect(page.locator("#palette")).to_be_hidden()
        text.press("Enter")
        expect(page.locator("article.user .bubble").last).to_have_text(sent)
        finished(page, count)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        assert any(f"user\n{sent}" in prompt for prompt in demo.prompts)


def test_invalid_command_argument_shows_usage(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    text, problem = page.locator("#text"), page.locator("#composer-problem")
    for typed, told in (
        ("/temp 99", "Usage: /temp [0..2]"),
        ("/thinking banana", "Usage: /thinking [on|off|N]"),
        ("/theme purple", "Usage: /theme [light|dark|system]"),
        ("/help me with this", "/help takes no argument"),
    ):
        text.fill(typed)
        text.press("Enter")
        expect(problem).to_contain_text(told)
        assert text.input_value() == typed, "the typed text is not lost"
    text.fill("/regenerate")
    text.press("Enter")
    expect(problem).to_contain_text("nothing to apply this command to")
    text.fill("/temp 1,5")
    text.press("Enter")
    expect(page.locator("#toasts")).to_contain_text("Default settings: Temperature 1,5")
    expect(problem).to_be_empty()
    text.fill("/theme")
    text.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    expect(page.locator("#set-temperature")).to_have_value("1.5")


def test_palette_works_by_mouse(chat: Callable[..., Page]) -> None:
    page = chat()
    page.locator("#text").press_sequentially("/")
    option(page, "help").click()
    expect(page.locator("#help")).to_be_visible()
    assert page.locator("#text").input_value() == ""


def test_clear_command_without_a_chat_is_rejected(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    page.locator("#text").fill("/clear")
    page.locator("#text").press("Enter")
    expect(page.locator("#composer-problem")).to_contain_text("Start a chat first")


def test_mcp_prompts_and_resources_are_available_as_commands(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    program = str(Path(__file__).parents[1] / "web/tools/mcp_server.py")
    (tmp_path / "mcp.json").write_text(
        json.dumps({"mcpServers": {"notes": {"command": sys.executable, "args": [program]}}})
    )
    page = open_page(serve(demo.load, mcp_config=tmp_path / "mcp.json").url, expected="status of 502")
    page.goto(f"{page.url}tools")  # waits until the servers have started
    page.goto(page.url.removesuffix("tools"))
    text = page.locator("#text")
    text.fill("/notes:")
    expect(page.locator("#palette [role=option]:visible")).to_have_count(4)
    text.fill("/notes:review tone=dry")
    text.press("Enter")
    expect(page.locator("#composer-problem")).to_contain_text("missing: code")
    expect(text).to_have_value("/notes:review tone=dry")
    text.fill("/notes:review tone=dry x = 1")
    text.press("Enter")
    expect(text).to_have_value("Review in a dry tone:\nx = 1")
    text.press("Control+z")
    expect(text).to_have_value("")
    text.fill("/notes:stand-up")
    text.press("Enter")
    expect(text).to_have_value("//usr/bin/true is a path")
    text.fill("/notes:today")
    text.press("Enter")
    expect(page.locator("#attachments .name")).to_have_text("Today's notes")


def test_saved_prompt_name_may_contain_a_hyphen(chat: Callable[..., Page]) -> None:
    page = chat()
    page.request.post(
        f"{page.url.split('/chats')[0]}/prompts", form={"name": "fix-it", "kind": "message", "text": "Fix this:"}
    )
    page.reload()
    text = page.locator("#text")
    text.fill("/fix-it now")
    expect(page.locator("#palette [role=option]:visible")).to_have_count(1)
    text.press("Enter")
    expect(text).to_have_value("Fix this: now")
