"""axe-core finds nothing wrong: every state of the page, light and dark, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from notso.web.scripted_engine import ScriptedEngine, say

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text("utf-8")
ANSWER = (
    "# A heading\n\nSome $x^2$ and **bold** `code`, [a link](https://example.org).\n\n$$\n\\sum_i x_i\n$$\n\n"
    "|a|b|\n|-|-|\n|1|2|\n\n```python\ndef f(): # comment\n    return 'text', 1\n```\n\n> quoted\n\n1. one\n2. two\n"
)
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
DESKTOP = {"viewport": {"width": 1100, "height": 760}}

VIOLATIONS = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
    (each) => `${each.id}: ` + each.nodes.map(
        (node) => node.html.slice(0, 160) + " " + node.any.map((reason) => reason.message)
    ).join(" | ")
)"""

Show = Callable[[Page], Any]
STATES: dict[str, Show] = {
    "chat": lambda page: page.locator("details.reasoning summary").click(),
    "palette": lambda page: page.locator("#text").press_sequentially("/"),
    "status": lambda page: page.locator("#status .pill").click(),
    "meter": lambda page: page.locator("#meter button").click(),
    "chat menu": lambda page: page.get_by_role("button", name="Chat menu").click(),
    "help": lambda page: page.evaluate("document.getElementById('help').showPopover()"),
    "search": lambda page: page.evaluate("document.getElementById('search').showPopover()"),
    "settings": lambda page: page.evaluate("document.getElementById('settings').showPopover()"),
    "edit": lambda page: page.locator("[data-edit]").click(),
}


def violations(page: Page) -> list[str]:
    page.evaluate(AXE)
    found: list[str] = page.evaluate(VIOLATIONS)
    return found


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_is_out_of_reach(serve: Callable[..., Any], open_page: Callable[..., Page], size: str) -> None:
    engine = ScriptedEngine(lambda m, t: say(ANSWER, "A thought.\n\n" * 30 if t else "", piece=60))
    page = open_page(serve(engine).url, reduced_motion="reduce", **(PHONE if size == "phone" else DESKTOP))
    found = {"greeting": violations(page)}
    page.locator("#text").fill("Show me")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
    expect(page.locator(".katex").first).to_be_visible()
    expect(page.locator("#meter button")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        for name, show in STATES.items():
            show(page)
            page.wait_for_timeout(150)
            found[f"{name}, {scheme}"] = violations(page)
            page.keyboard.press("Escape")
            page.locator("#text").fill("")
            if name == "edit":  # which Escape has left
                expect(page.locator("[data-edit]")).to_have_count(1)
    assert {state: wrong for state, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("path", ["/login", "/settings", "/search?q=x", "/models", "/nowhere"])
def test_the_other_pages_neither(serve: Callable[..., Any], open_page: Callable[..., Page], path: str) -> None:
    page = open_page(serve(ScriptedEngine()).url, expected="status of 404", reduced_motion="reduce")
    page.goto(page.url.rstrip("/") + path)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        assert violations(page) == []


def test_axe_would_find_something(serve: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    page.evaluate("document.getElementById('composer-action').textContent = ''")
    assert [wrong.split(":")[0] for wrong in violations(page)] == ["button-name"]


def test_a_whole_chat_by_keyboard_alone(serve: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    page = open_page(serve(ScriptedEngine(lambda m, t: say("Yes.", "Hm." if t else ""))).url)
    page.keyboard.type("Is it so?")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                    const element = document.activeElement;
                    if (element === document.body) return "";
                    const ring = element.matches(".unseen, .switch input") ? element.parentElement : element;
                    const words = element.textContent.trim();
                    const name = element.ariaLabel || element.title || element.name || words || element.id;
                    const seen = getComputedStyle(ring).outlineStyle !== "none" || element.matches(".switch input");
                    return `${name.slice(0, 40)}${seen ? "" : " (unseen)"}`;
                }"""
            )
        )
    for wanted in ("Send", "thinking", "Settings", "Help", "Models", "Search", "New chat", "Answer again", "files"):
        assert any(wanted in name for name in reached), (wanted, reached)
    assert not [name for name in reached if "(unseen)" in name]
