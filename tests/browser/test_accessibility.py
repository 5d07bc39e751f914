"""axe-core finds no violations in any state of the page: light and dark, on desktop and phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import AXE, begin, finished, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect

from notso.web.values.wording import words

ANSWER = (
    "# A heading\n\nSome $x^2$ and **bold** `code`, [a link](https://example.org).\n\n$$\n\\sum_i x_i\n$$\n\n"
    "|a|b|\n|-|-|\n|1|2|\n\n```python\ndef f(): # comment\n    return 'text', 1\n```\n\n> quoted\n\n1. one\n2. two\n"
)
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
DESKTOP = {"viewport": {"width": 1100, "height": 760}}

COLOURS = ["color-contrast", "link-in-text-block"]
VIOLATIONS = """async (rules) => (
    await axe.run(document, { resultTypes: ["violations"], ...(rules && { runOnly: rules }) })
).violations.map(
    (each) => `${each.id}: ` + each.nodes.map(
        (node) => node.html.slice(0, 160) + " " + node.any.map((reason) => reason.message)
    ).join(" | ")
)"""


def search(page: Page) -> None:
    page.evaluate("document.getElementById('search').showModal()")
    page.locator("#search-text").fill("show")
    expect(page.locator("#search-results mark").first).to_be_visible()


def tab(name: str) -> Callable[[Page], None]:
    return lambda page: show_settings(page, name)


Show = Callable[[Page], Any]
STATES: dict[str, Show] = {
    "chat": lambda page: page.locator("details.reasoning summary").click(),
    "palette": lambda page: page.locator("#text").press_sequentially("/"),
    "status": lambda page: page.locator("#status .badge").click(),
    "meter": lambda page: page.locator("#gauge button").click(),
    "chat menu": lambda page: page.get_by_role("button", name="Chat menu").click(),
    "help": lambda page: page.evaluate("document.getElementById('help').showModal()"),
    "search": search,
    **{f"settings, {name}": tab(name) for name in ("general", "model", "chat", "tools", "data", "shortcuts")},
    "model picker": lambda page: page.locator("[popovertarget=model-picker]").evaluate("button => button.click()"),
    "menu of an answer": lambda page: page.locator("[popovertarget$=-more]").last.evaluate("button => button.click()"),
    "menu of a row": lambda page: page.locator(".row-menu").first.evaluate("button => button.click()"),
    "preview": lambda page: page.evaluate("document.getElementById('preview').showModal()"),
    "edit": lambda page: page.locator("[data-edit]").click(),
}


def violations(page: Page, *, of_colours: bool = False) -> list[str]:
    """Return axe's violations; `of_colours` checks only colors, because nothing else depends on the color scheme."""
    page.evaluate(AXE.read_text("utf-8"))
    page.evaluate(FINISH_TRANSITIONS)
    found: list[str] = page.evaluate(VIOLATIONS, COLOURS if of_colours else None)
    return found


# While colors change, for example to the other color scheme, their contrast is lower.
FINISH_TRANSITIONS = "for (const each of document.getAnimations()) if (each instanceof CSSTransition) each.finish()"
SIZE = "heading => parseFloat(getComputedStyle(heading).fontSize)"
OUTLINE = """() => [...document.querySelectorAll("main :is(h1, h2, h3, h4, h5, h6)")]
    .filter((heading) => heading.checkVisibility()).map((heading) => [heading.tagName, heading.textContent.trim()])"""


def test_headings_in_answers_are_below_the_page_headings(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    levels = ["One", "two", "three", "four", "five", "six"]
    demo.dictate("\n\n".join(f"{'#' * level} {name}" for level, name in enumerate(levels, start=1)) + "\n\nBelow.")
    page = open_page(serve(demo.load).url, permissions=["clipboard-read", "clipboard-write"])
    begin(page, "Show me")
    own = [["H3", "One"], ["H4", "two"], ["H5", "three"], ["H6", "four"], ["H6", "five"], ["H6", "six"]]
    assert page.evaluate(OUTLINE) == [["H1", "Show me"], ["H2", words["you"]], ["H2", words["assistant"]], *own]
    sizes = [float(page.locator(f".answer {level}").first.evaluate(SIZE)) for level in ("h3", "h4", "h5")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2]
    page.locator("article.assistant [data-copy]").click()
    expect(page.locator("#announcer")).to_have_text(words["copied"])
    html = page.evaluate("async () => (await (await navigator.clipboard.read())[0].getType('text/html')).text()")
    assert [html.count(f"<h{level}") for level in range(1, 7)] == [1, 1, 1, 3, 0, 0], "the same levels as in the answer"


@pytest.mark.parametrize("size", ["desktop", pytest.param("phone", marks=pytest.mark.long("page"))])
def test_chat_page_has_no_accessibility_violations_in_any_state(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine, size: str
) -> None:
    demo.dictate(ANSWER, "A thought.\n\n" * 30)
    page = open_page(serve(demo.load).url, reduced_motion="reduce", **(PHONE if size == "phone" else DESKTOP))
    found = {"greeting": violations(page)}
    demo.hold("thinking", 20)
    page.locator("#text").fill("Show me")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#status-label")).to_contain_text("Thinking")
    found["while it thinks"] = violations(page)
    demo.hold("answer", 30)
    expect(page.locator("#status-label")).to_contain_text("Generating")
    found["while it answers"] = violations(page)
    demo.release()
    finished(page)
    expect(page.locator(".katex").first).to_be_visible()
    expect(page.locator("#gauge button")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        for name, show in STATES.items():
            show(page)
            page.wait_for_timeout(150)
            found[f"{name}, {scheme}"] = violations(page, of_colours=scheme == "dark")
            page.keyboard.press("Escape")
            page.locator("#text").fill("")
            if name == "edit":  # Escape has closed the edit form
                expect(page.locator("[data-edit]")).to_have_count(1)
    assert {state: wrong for state, wrong in found.items() if wrong} == {}


def test_other_pages_have_no_accessibility_violations(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url, expected="status of 404", reduced_motion="reduce")
    root, found = page.url.rstrip("/"), {}
    begin(page)
    for path in ("/login", "/settings", "/tools", "/search?q=hello", "/models", "/archive", "/prompts", "/nowhere"):
        page.goto(root + path)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            found[f"{path}, {scheme}"] = violations(page, of_colours=scheme == "dark")
    assert {state: wrong for state, wrong in found.items() if wrong} == {}


def test_axe_detects_injected_violations(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url)
    page.evaluate("const b = document.getElementById('composer-action'); b.textContent = b.title = ''")
    assert [wrong.split(":")[0] for wrong in violations(page)] == ["button-name"]
    page.evaluate("document.getElementById('status-label').style.cssText = 'color: #888; background: #999'")
    assert [wrong.split(":")[0] for wrong in violations(page, of_colours=True)] == ["color-contrast"]


def test_chat_is_usable_by_keyboard_with_visible_focus(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url)
    page.keyboard.type("Is it so?")
    page.keyboard.press("Enter")
    finished(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "text", "the focus stays in the input"
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                    const element = document.activeElement;
                    if (element === document.body) return "";
                    const ring = element.matches(".unseen, .switch input") ? element.parentElement
                        : element.id === "text" ? element.closest("form") : element;
                    const words = element.textContent.trim();
                    const name = element.ariaLabel || element.title || element.name || words || element.id;
                    const seen = getComputedStyle(ring).outlineStyle !== "none" || element.matches(".switch input");
                    return `${name.slice(0, 40)}${seen ? "" : " (unseen)"}`;
                }"""
            )
        )
    for wanted in (
        "Send",
        "thinking",
        "Settings",
        "Help",
        "Models",
        "Search",
        "New chat",
        words["regenerate"],
        "files",
    ):
        assert any(wanted in name for name in reached), (wanted, reached)
    assert not [name for name in reached if "(unseen)" in name]
    page.locator("article.user a[data-edit]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#edit-text")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#text")).to_be_focused()  # the focus must not fall back to the start of the page
