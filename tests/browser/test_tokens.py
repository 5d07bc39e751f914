"""The look: few sizes and radii, contrast in every look, and places that do not move. One server and one tab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.conftest import WAIT_MS, Served
from browser.conversation import ask, begin, last_answer, show_settings, until
from playwright.sync_api import Browser, Page, expect
from scripted_engine import ScriptedEngine, say

from notso.web.values.settings import Settings

ANSWER = (
    "# Sorting\n\nIn Python you call `sorted(items)`, in $O(n \\log n)$.\n\n## Which\n\n"
    "|Algorithm|Average|Worst|Stable|Notes|\n|-|-|-|-|-|\n"
    "|Quicksort|fast|slow|no|in place, and hidden behind the right edge|\n"
    "|Merge sort|fast|fast|yes|needs memory, and is hidden behind the right edge|\n\n"
    "```python\n" + "x = sorted(items)  # a line of code\n" * 10 + "```\n\n> A quotation.\n\n1. one\n2. two\n"
)
SIZES = {12.5, 14.0, 16.0, 18.0, 21.0, 26.0}
RADII = {"0px", "6px", "8px", "12px", "20px", "999px"}
TEXT = ("ink", "ink-soft", "accent", "ok", "warn", "bad")
SURFACES = ("rail", "canvas", "lifted", "sunken", "tint")
LOOKS = [(scheme, contrast) for scheme in ("light", "dark") for contrast in ("no-preference", "more")]

COLORS = """(names) => {
    const probe = document.body.appendChild(document.createElement("i"));
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    const found = {};
    for (const name of names) {
        probe.style.color = `var(--${name})`;
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = getComputedStyle(probe).color;
        canvas.fillRect(0, 0, 1, 1);
        found[name] = [...canvas.getImageData(0, 0, 1, 1).data];
    }
    probe.remove();
    return found;
}"""
STYLES = """() => {
    const [sizes, radii] = [new Set(), new Set()];
    for (const element of document.querySelectorAll("body *")) {
        if (!element.checkVisibility() || element.closest(".katex, svg, option, .unseen, input")) continue;
        const style = getComputedStyle(element);
        if ([...element.childNodes].some((node) => node.nodeType === 3 && node.nodeValue.trim())) {
            sizes.add(parseFloat(style.fontSize));
        }
        for (const radius of style.borderRadius.split(/[ /]+/)) radii.add(radius);
    }
    return [[...sizes], [...radii]];
}"""
BOXES = """() => {
    const places = ["#chat-title", "#model-name", "#gauge", "#status", "[popovertarget=chat-menu]"];
    return places.map((selector) => {
        const { x, y, width } = document.querySelector(selector).getBoundingClientRect();
        return [selector, x, y, width];
    });
}"""


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda messages, thinking: say(ANSWER, "A thought. " * 20, piece=12), is_demo=False)


@pytest.fixture(scope="module")
def page(
    browser: Browser, engine: ScriptedEngine, closing: list[Served], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    folder: Path = tmp_path_factory.mktemp("tokens")
    server = Served(lambda: engine, Settings(port=0, data_dir=folder / "data"))
    closing.append(server)
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(server.url)
    begin(page, "Explain sorting")
    yield page
    context.close()
    server.begin_close()


def blended(over: list[int], under: list[int]) -> list[int]:
    share = over[3] / 255
    return [round(share * a + (1 - share) * b) for a, b in zip(over[:3], under[:3], strict=True)]


def contrast(one: list[int], other: list[int]) -> float:
    def luminance(color: list[int]) -> float:
        channels = (value / 255 for value in color[:3])
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("scheme", "wish"), LOOKS)
def test_colors_can_be_told_apart(page: Page, scheme: Any, wish: Any) -> None:
    page.emulate_media(color_scheme=scheme, contrast=wish, reduced_motion="reduce")
    names = (*TEXT, *SURFACES, "ink-hint", "on-accent", "edge", "found", "hover", "active")
    color = page.evaluate(COLORS, names)
    page.emulate_media(color_scheme="light", contrast="no-preference", reduced_motion="reduce")
    text = {(name, surface): contrast(color[name], color[surface]) for name in TEXT for surface in SURFACES}
    text |= {("ink-hint", surface): contrast(color["ink-hint"], color[surface]) for surface in ("canvas", "lifted")}
    text[("on-accent", "accent")] = contrast(color["on-accent"], color["accent"])
    text[("ink", "found")] = contrast(color["ink"], color["found"])
    for wash in ("hover", "active"):  # what is pointed at and pressed
        text |= {
            (name, f"{surface} under {wash}"): contrast(color[name], blended(color[wash], color[surface]))
            for name in ("ink", "ink-soft")
            for surface in ("rail", "canvas", "lifted")
        }
    least = 7.0 if wish == "more" else 4.5
    ordinary = ("ink", "ink-soft", "ink-hint")
    assert {pair: found for pair, found in text.items() if found < (least if pair[0] in ordinary else 4.5)} == {}
    edges = {("edge", surface): contrast(color["edge"], color[surface]) for surface in ("rail", "canvas", "lifted")}
    edges |= {("focus", surface): contrast(color["accent"], color[surface]) for surface in SURFACES}
    assert {pair: found for pair, found in edges.items() if found < 3} == {}


def test_sizes_and_radii_are_few(page: Page) -> None:
    """In the chat, its sheets and menus, and the other pages."""
    chat = page.url
    root = "/".join(chat.split("/")[:3])
    found: dict[str, Any] = {"chat": page.evaluate(STYLES)}
    show_settings(page)
    for tab in ("general", "model", "chat", "tools", "data", "shortcuts"):
        page.locator(f"#tab-{tab}").click()
        found[tab] = page.evaluate(STYLES)
    page.keyboard.press("Escape")
    page.locator("#text").press_sequentially("/")
    found["palette"] = page.evaluate(STYLES)
    page.locator("#text").fill("")
    for path in ("/", "/archive", "/models", "/prompts", "/search?q=sort", "/settings", "/login", "/nowhere"):
        page.goto(root + path)
        found[path] = page.evaluate(STYLES)
    page.goto(chat)
    wrong = {
        name: (sorted(set(sizes) - SIZES), sorted(set(radii) - RADII))
        for name, (sizes, radii) in found.items()
        if set(sizes) - SIZES or set(radii) - RADII
    }
    assert wrong == {}


def test_the_header_stays_where_it_is(page: Page, engine: ScriptedEngine) -> None:
    until(page, "() => document.querySelector('#gauge button') !== null")
    before = page.evaluate(BOXES)
    engine.gate.clear()
    ask(page, "Again")
    expect(page.locator("[data-stop]")).to_be_visible()
    assert page.evaluate(BOXES) == before
    engine.gate.set()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    assert page.evaluate(BOXES) == before


def test_code_is_set_solid_and_rows_of_tables_are_lines(page: Page) -> None:
    lines = page.locator(".code-block pre").last
    height = lines.evaluate(
        "pre => (pre.clientHeight - parseFloat(getComputedStyle(pre).paddingTop) * 1"
        " - parseFloat(getComputedStyle(pre).paddingBottom)) / 10"
    )
    assert height <= 1.6 * 14
    page.set_viewport_size({"width": 390, "height": 800})
    rows = page.locator(".answer").last.locator("tr").evaluate_all("rows => rows.map(row => row.offsetHeight)")
    page.set_viewport_size({"width": 1280, "height": 800})
    assert max(rows) < 50


@pytest.mark.parametrize("height", [720, 800, 900, 1080, 1440])
def test_the_start_stands_above_the_middle(page: Page, height: int) -> None:
    chat = page.url
    page.goto("/".join(chat.split("/")[:3]))
    page.set_viewport_size({"width": 1280, "height": height})
    hello, composer = page.locator(".hello").bounding_box(), page.locator("#composer").bounding_box()
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(chat)
    assert hello and composer
    center = (hello["y"] + composer["y"] + composer["height"]) / 2 / height
    assert 0.38 <= center <= 0.5


def test_fields_for_texts_show_several_lines(page: Page) -> None:
    show_settings(page, "chat")
    expect(page.locator("#set-system_prompt")).to_be_visible()
    assert page.locator("#set-system_prompt").evaluate("field => field.offsetHeight") >= 80
    page.keyboard.press("Escape")
    chat = page.url
    page.goto("/".join(chat.split("/")[:3]) + "/prompts")
    assert page.locator("#text-0").evaluate("field => field.offsetHeight") >= 80
    page.goto(chat)


def test_the_sidebar_is_on_every_page_and_can_be_collapsed(page: Page) -> None:
    chat = page.url
    root = "/".join(chat.split("/")[:3])
    for path in ("/archive", "/models", "/prompts", "/search?q=x", "/settings", "/tools"):
        page.goto(root + path)
        expect(page.locator("#chat-list").get_by_role("link", name="Explain sorting")).to_be_visible()
        page.keyboard.press("Control+b")
        expect(page.locator("#sidebar")).to_be_hidden()
        page.reload()
        expect(page.locator("#sidebar")).to_be_hidden()
        page.locator("header [data-toggle-rail]").click()
        expect(page.locator("#sidebar")).to_be_visible()
    page.goto(chat)
    room = page.locator("#chat-list").evaluate("list => list.clientHeight")
    assert room / 37 >= 14, "rows at 800 px"
