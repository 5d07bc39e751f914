"""Tools on the page, with the real engine: the demo model calls the calculator, the user approves, the model
answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from browser.conversation import show_settings
from playwright.sync_api import Page, expect

from notso.smollm3 import Engine
from notso.web.tools import toolbox
from notso.web.tools.calculator import CALCULATOR
from notso.web.tools.chat_tool import ToolContext
from notso.web.tools.elicitation import parse_question

QUESTION = "What is 1234 * 77?"

WATCH_SHIFTS = """
    window.shifts = 0;
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) if (!entry.hadRecentInput) shifts += entry.value;
    }).observe({ type: "layout-shift", buffered: true });
"""


@pytest.fixture
def page(serve: Callable[..., Any], open_page: Callable[..., Page]) -> Page:
    """A new chat with tools enabled through the settings."""
    page = open_page(serve(lambda: Engine.load(context_tokens=2048)).url)
    show_settings(page, "tools")
    page.check("#tool-calculator")
    expect(page.locator("#tool-settings")).to_contain_text("Together they add")
    page.click("#tab-model")
    page.fill("#set-temperature", "0")  # greedy decoding, so that the model copies the digits correctly
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    page.keyboard.press("Escape")
    return page


def ask(page: Page, question: str = QUESTION) -> None:
    page.fill("#text", question)
    page.keyboard.press("Enter")


def test_tool_call_is_approved_by_keyboard_and_shown(page: Page) -> None:
    page.add_init_script(WATCH_SHIFTS)
    ask(page)
    box = page.locator(".permission")
    expect(box).to_contain_text("Allow the model to call calculator")
    expect(box.locator("pre")).to_contain_text('"expression": "1234 * 77"')
    expect(page.locator("#status-label")).to_have_text("Needs your approval")
    expect(page.locator("#announcer")).to_contain_text("wants to use a tool")
    expect(page.locator(".tool-card")).to_contain_text("needs approval")
    expect(page.locator("#text")).to_be_focused()
    card = page.locator(".tool-card > summary")
    expect(card).to_be_hidden()  # the permission request shows the same call
    box.locator("button").first.focus()
    page.keyboard.press("Enter")
    expect(card).to_be_visible()
    card.focus()
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant")
    expect(answer.locator(".numbers")).to_be_visible()
    expect(answer).to_contain_text("1234 * 77 = 95018")
    expect(page.locator(".permission")).to_have_count(0)
    expect(page.locator(".tool-card")).to_have_count(1)
    expect(card).to_contain_text("done")
    expect(page.locator(".tool-card pre").last).to_be_visible()  # an opened card stays open after the answer has ended
    expect(page.locator(".tool-card pre").last).to_have_text("95018")
    page.reload()
    expect(page.locator(".tool-card > summary")).to_contain_text("done")
    expect(page.locator("article.assistant")).to_contain_text("1234 * 77 = 95018")
    assert page.evaluate("window.shifts") < 0.01


def test_answer_is_copied_and_announced_without_details_of_tool_calls(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page)
    page.click(".permission button:has-text('Allow once')")
    answer = page.locator("article.assistant")
    expect(answer.locator(".numbers")).to_be_visible()
    expect(page.locator("#spoken")).to_contain_text("1234 * 77 = 95018")
    expect(page.locator("#spoken")).not_to_contain_text("expression")
    answer.hover()
    copy = answer.locator(".toolbar > [data-copy]")
    copy.click()
    expect(copy).to_have_attribute("data-done", "")
    html = page.evaluate("async () => (await (await navigator.clipboard.read())[0].getType('text/html')).text()")
    assert "1234 * 77 = 95018" in html and "calculator" not in html


def test_pending_approval_survives_reload_and_is_shared_by_tabs(page: Page, open_page: Callable[..., Page]) -> None:
    ask(page)
    expect(page.locator(".permission")).to_be_visible()
    page.reload()
    expect(page.locator(".permission button")).to_have_count(3)
    other = open_page(page.url, like=page)
    expect(other.locator(".permission button")).to_have_count(3)
    other.click(".permission button:has-text('Deny')")
    for each in (page, other):
        expect(each.locator(".permission")).to_have_count(0)
        expect(each.locator(".tool-card")).to_have_count(1)
        expect(each.locator(".tool-state")).to_have_text("denied")
        expect(each.locator("article.assistant .numbers")).to_be_visible()


def test_answer_stopped_during_approval_can_be_continued(page: Page) -> None:
    ask(page)
    expect(page.locator(".permission")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("article.assistant footer")).to_contain_text("Stopped")
    expect(page.locator(".tool-state")).to_have_text("interrupted")
    page.click("[data-continue]")
    page.click(".permission button:has-text('Always allow in this chat')")
    expect(page.locator("article.assistant")).to_contain_text("1234 * 77 = 95018")
    expect(page.locator("article.assistant .numbers")).to_be_visible()
    ask(page, "What is 12 * 12?")
    expect(page.locator("article.assistant").last).to_contain_text("12 * 12 = 144")
    expect(page.locator(".tool-card")).to_have_count(2)


def test_tool_approval_fits_on_a_phone(serve: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    server = serve(lambda: Engine.load(context_tokens=2048))
    page = open_page(server.url + "tools", viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    page.check("#tool-calculator")
    page.click("#tool-settings button")  # a separate page, which works without scripts
    expect(page.locator("#tool-settings")).to_contain_text("Together they add")
    page.goto(server.url)
    page.fill("#text", QUESTION)
    page.click("#composer-action")  # on a touch keyboard, Enter inserts a line break
    expect(page.locator(".permission button").last).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for button in page.locator(".permission button").all():
        box = button.bounding_box()
        assert box is not None and box["height"] >= 44 and box["x"] + box["width"] <= 320


SEATS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "title": "Your name"},
        "people": {"type": "integer", "title": "How many", "minimum": 1, "maximum": 12},
        "outside": {"type": "boolean", "title": "Outside"},
        "day": {"type": "string", "title": "Which day", "enum": ["Saturday", "Sunday"]},
    },
    "required": ["name", "people"],
}


async def seats(arguments: Mapping[str, Any], context: ToolContext) -> str:
    """A tool that asks a question, as an MCP server may."""
    assert context.ask is not None
    reply = await context.ask(parse_question("tables", "A table for whom?", SEATS))
    return json.dumps([reply.action, dict(reply.values)])


def test_tool_question_is_answered_on_the_page(
    serve: Callable[..., Any], open_page: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = replace(CALCULATOR, run=seats, origin="tables")
    monkeypatch.setattr(toolbox, "BUILT_IN_TOOLS", (asking,))
    server = serve(lambda: Engine.load(context_tokens=2048))
    page = open_page(server.url + "tools", expected="status of 400", viewport={"width": 320, "height": 640})
    page.check("#tool-calculator")
    page.click("#tool-settings button")
    expect(page.locator("#tool-settings")).to_contain_text("Together they add")
    page.goto(server.url)
    ask(page)
    page.get_by_role("button", name="Allow once").click()
    box = page.locator(".question")
    expect(box).to_contain_text("tables asks for input (tool calculator):")
    expect(page.locator("#status-label")).to_have_text("Needs your input")
    expect(page.locator("#announcer")).to_contain_text("A tool needs your input")
    page.get_by_label("Your name").fill("Ada")
    box.get_by_role("button", name="Send").click()
    expect(box).to_be_visible()  # the browser's own validation requires a number
    page.get_by_label("How many").fill("13")
    page.get_by_label("Outside").check()
    page.get_by_label("Which day").select_option("Sunday")
    box.get_by_role("button", name="Send").click()
    expect(page.locator("#composer-problem")).to_contain_text(
        "How many is outside the allowed range (minimum: 1, maximum: 12)."
    )
    expect(page.get_by_label("Your name")).to_have_value("Ada")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.get_by_label("How many").fill("4")
    page.get_by_label("How many").press("Enter")
    expect(box).to_have_count(0)
    expect(page.locator("article.assistant .numbers")).to_be_visible()
    page.locator(".tool-card > summary").click()
    told = page.locator(".tool-card pre").last
    expect(told).to_contain_text('"accept", {"name": "Ada", "people": 4, "outside": true, "day": "Sunday"}')
