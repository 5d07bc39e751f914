"""Sizes, themes, contrast and roles, as the browser computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import ask, finished, last_answer, show_settings, until
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine

from notso.web.values.wording import words

ANSWER = (
    "A table:\n\n"
    + "|a|b|c|\n|-|-|-|\n"
    + "|1|2|3|\n" * 3
    + "\n```python\n"
    + "x = 1  # long "
    + "y" * 200
    + "\n```\n\n"
    + "w" * 300
    + "\n"
)

CONTRAST = """() => {
    const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const under = (element) => { // washes let through what is behind them
        if (!element) return [255, 255, 255];
        const [r, g, b, share = 1] = parts(getComputedStyle(element).backgroundColor);
        if (share === 1) return [r, g, b];
        const behind = under(element.parentElement);
        return [r, g, b].map((value, at) => share * value + (1 - share) * behind[at]);
    };
    const low = [];
    for (const element of document.querySelectorAll("body *")) {
        const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.nodeValue.trim());
        const seen = element.checkVisibility({ opacityProperty: true }) && !element.closest("noscript, [aria-hidden]");
        if (!text || !seen) continue;
        const a = light(parts(getComputedStyle(element).color)), b = light(under(element));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push([element.outerHTML.slice(0, 80), ratio]);
    }
    return low;
}"""

AT_END = """() => {
    const scroller = document.getElementById("scroller");
    return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
}"""


@pytest.fixture
def chat(serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine) -> Callable[..., Page]:
    def open_chat(**options: Any) -> Page:
        demo.dictate(ANSWER, "Thoughts.")
        page = open_page(serve(demo.load).url, **options)
        page.locator("#text").fill("Show me")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
        return page

    return open_chat


def test_page_fits_every_viewport_width(chat: Callable[..., Page]) -> None:
    page = chat()
    for width in (320, 390, 768, 1440):
        page.set_viewport_size({"width": width, "height": 700})
        assert_fits(page, width)


def assert_fits(page: Page, width: int) -> None:
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.evaluate(
        "document.getElementById('scroller').scrollWidth <= document.getElementById('scroller').clientWidth"
    )
    box = page.locator("#composer").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 700


BESIDE_SEND = """() => {
    const send = document.getElementById("composer-action").getBoundingClientRect();
    const others = [...document.querySelectorAll(".composer-row :is(label, a.icon, button.icon, .budget)")]
        .map((each) => each.getBoundingClientRect()).filter(({ width }) => width > 1);
    return [others.some(({ bottom }) => Math.abs(bottom - send.bottom) < 8),
        others.some((box) => box.right > send.left && box.bottom > send.top)];
}"""
"""Whether a control is in the row of the Send button, and whether one overlaps it."""

CUT = """() => {
    const budget = document.getElementById("budget"), style = getComputedStyle(budget);
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.font = style.font;
    const room = budget.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return canvas.measureText(budget.selectedOptions[0].text).width > room + 1;
}"""
"""Whether the selected thinking budget is cut."""


TOO_SMALL = """() => {
    const fields = "input, select, textarea";
    const targets = [...document.querySelectorAll(`a, button, summary.icon, .switch, ${fields}`)].filter((each) =>
        each.checkVisibility({ checkOpacity: true }) && !each.matches(".unseen, .skip")
        && !each.closest("label:not(.switch), .prose"));
    return targets.map((each) => [each, each.getBoundingClientRect(), parseFloat(getComputedStyle(each).fontSize)])
        .filter(([each, box, size]) => Math.min(box.width, box.height) < 44 || (each.matches(fields) && size < 16))
        .map(([each, { width, height }, size]) => [each.outerHTML.slice(0, 60), width, height, size]);
}"""
"""Targets smaller than 44 pixels, and fields with text smaller than 16 pixels, on which phones zoom in."""


def test_phone_layout_has_a_drawer_and_large_touch_targets(chat: Callable[..., Page]) -> None:
    page = chat(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    expect(page.locator("#sidebar")).to_be_hidden()
    page.locator("header").get_by_role("button", name=words["menu"]).tap()
    expect(page.locator("#sidebar").get_by_role("link", name="Show me")).to_be_visible()
    page.get_by_role("button", name="Close").tap()
    expect(page.locator("#sidebar")).to_be_hidden()
    page.locator("#text").fill("a")
    page.locator("#text").press("Enter")
    assert page.locator("#text").input_value() == "a\n", "on a touch keyboard, Enter inserts a line break"
    assert page.evaluate("parseFloat(getComputedStyle(document.getElementById('text')).fontSize)") >= 16
    assert page.evaluate(TOO_SMALL) == []
    for address in ("", "models", "documents", "memory", "prompts", "archive", "search?q=me", "settings", "tools"):
        page.goto("/".join(page.url.split("/")[:3]) + "/" + address)
        assert page.evaluate(TOO_SMALL) == [], address


def test_thinking_budget_wraps_before_the_send_button(
    serve: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve(ScriptedEngine()).url, locale="de", has_touch=True, is_mobile=True)
    for width in (320, 360, 390, 768):
        page.set_viewport_size({"width": width, "height": 800})
        for hears in (False, True):  # whether the dictation button is shown
            page.evaluate("(hears) => document.documentElement.toggleAttribute('data-hears', hears)", hears)
            assert page.evaluate(BESIDE_SEND) == [True, False], width
            assert not page.evaluate(CUT), width


def test_adjacent_links_do_not_cover_each_other_on_touch_screens(
    serve: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve(ScriptedEngine()).url + "settings", has_touch=True, is_mobile=True)
    hit = page.evaluate(
        """() => {
            const pages = "<p>A plugin<br><a href='/a'>One</a><br><a href='/b'>Two</a></p>";
            document.querySelector(".page-column").insertAdjacentHTML("afterbegin", `<div class=plugin>${pages}</div>`);
            return [...document.querySelectorAll(".plugin a")].map((link) => {
                const range = document.createRange();
                range.selectNodeContents(link);
                const { x, bottom } = range.getBoundingClientRect();
                return document.elementFromPoint(x + 2, bottom - 1).textContent;
            });
        }"""
    )
    assert hit == ["One", "Two"]


def test_text_contrast_is_sufficient_in_both_themes(chat: Callable[..., Page]) -> None:
    page = chat(reduced_motion="reduce")
    page.locator("details.reasoning summary").click()
    page.locator("#status button").click()
    surfaces = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        surfaces.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(CONTRAST) == []
    assert len(surfaces) == 2


def test_forced_colors_keep_controls_visible(chat: Callable[..., Page]) -> None:
    page = chat(forced_colors="active")
    background = "getComputedStyle(document.querySelector('.switch .track')).backgroundColor"
    on = page.evaluate(background)
    page.get_by_role("switch", name="Thinking").locator("..").click()
    until(page, f"on => {background} !== on", on)  # the state is visible without shadows
    for selector in ("#composer", ".bubble", "#status .badge"):
        assert page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).borderTopStyle") == "solid"


def test_selected_theme_is_kept_after_reload(chat: Callable[..., Page]) -> None:
    page = chat(color_scheme="light", reduced_motion="reduce")
    surface = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(surface)
    show_settings(page)
    page.get_by_text("Dark", exact=True).click()
    dark = page.evaluate(surface)
    assert dark != light
    page.reload()
    assert page.evaluate(surface) == dark
    show_settings(page)
    assert page.get_by_role("radio", name="Dark").is_checked()
    page.get_by_text("System", exact=True).click()
    assert page.evaluate(surface) == light


def test_landmarks_and_controls_have_roles_and_names(chat: Callable[..., Page]) -> None:
    page = chat()
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("log", name="Conversation")).to_have_count(1)
    expect(page.get_by_role("complementary", name=words["menu"])).to_be_visible()
    expect(page.get_by_role("navigation", name="Chats")).to_be_visible()
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    expect(page.get_by_role("switch", name="Thinking")).to_be_checked()
    expect(page.locator("#announcer[role=status]")).to_have_count(1)
    expect(page.locator("#sidebar a[aria-current=page]")).to_have_text("Show me")
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, summary, input:not([type=hidden]), textarea, a:not([aria-hidden])')]"
        ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert nameless == []


LEAVE_THE_END = """() => {
  const [scroller, newest] = [document.getElementById("scroller"), document.getElementById("newest")];
  if (newest.hidden || scroller.scrollTop !== 100) scroller.scrollTop = 100;  // again, if new words took it back
  return !newest.hidden && scroller.scrollTop === 100;
}"""


def test_scrolling_follows_the_answer_until_scrolled_away(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url)
    demo.always("A line.\n\n" * 900)
    demo.hold("answer", 300)
    ask(page, "Go")
    page.wait_for_url("**/chats/*")
    until(page, "() => document.getElementById('scroller')?.scrollHeight > 1500")
    until(page, AT_END)
    until(page, LEAVE_THE_END)
    expect(page.locator("#newest")).to_be_visible()
    height = page.evaluate("document.getElementById('scroller').scrollHeight")
    demo.hold("answer", 600)
    until(page, f"() => document.getElementById('scroller').scrollHeight > {height} + 200")
    assert page.evaluate("document.getElementById('scroller').scrollTop") == 100
    page.locator("#newest").click()
    expect(page.locator("#newest")).to_be_hidden()
    height = page.evaluate("document.getElementById('scroller').scrollHeight")
    demo.hold("answer", 900)
    until(page, f"() => document.getElementById('scroller').scrollHeight > {height} + 200")
    until(page, AT_END)
    page.keyboard.press("Escape")
    expect(last_answer(page)).to_have_attribute("data-state", "stopped")
    demo.dictate("Yes.", thoughts="Hm.\n\n" * 60)
    demo.release()
    ask(page, "Again")
    finished(page, 2)
    until(page, AT_END)
    last_answer(page).locator(".reasoning summary").click()
    expect(page.locator("#newest")).to_be_visible()  # an open section must not scroll away when the answer ends
    expect(last_answer(page).locator(".reasoning summary")).to_be_in_viewport()


def test_reduced_motion_stops_all_animations(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    """Checked while an answer is written, when most things move, and with every dialog open."""
    moving = """() => document.getAnimations().filter((each) => each.playState === "running"
        && each.effect.getComputedTiming().duration > 10).map((one) => one.animationName ?? one.transitionProperty)"""
    page = open_page(serve(demo.load).url)
    demo.hold("thinking")
    ask(page, "Hello")
    expect(page.locator("#status-label")).to_contain_text("Thinking")
    assert page.evaluate(moving) != [], "otherwise this test shows nothing"
    page.emulate_media(reduced_motion="reduce")
    until(page, f"() => ({moving})().length === 0")
    for name in ("help", "search", "settings"):
        page.evaluate(f"document.getElementById('{name}').showModal()")
        assert page.evaluate(moving) == []
        page.keyboard.press("Escape")
    demo.release()


def test_phone_screenshots_are_taken_in_both_themes(chat: Callable[..., Page], picture: Callable[..., None]) -> None:
    page = chat(color_scheme="light", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    picture(page, "phone", dark=True)
    page.locator("header").get_by_role("button", name=words["menu"]).tap()
    expect(page.locator("#sidebar").get_by_role("link", name="Show me")).to_be_visible()
    picture(page, "phone-drawer", dark=True)
