"""The controls around the conversation: palette, keys, attachments, formulas, code, settings, meter."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from notso.smollm3 import Event
from notso.web.scripted_engine import ScriptedEngine, say

ANSWER = (
    "Solve $ax^2 = 0$:\n\n$$\nx = \\frac{-b}{2a}\n$$\n\nPrices: $5 and $6. Broken: $\\frac{1$.\n\n"
    "```python\nx = 1\n```\n\n```\n" + "".join(f"line {n}\n" for n in range(60)) + "```\n"
)
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}

Open = Callable[..., Page]


@pytest.fixture
def chat(serve: Callable[..., Any], open_page: Open) -> Callable[..., Page]:
    """A page with one answer."""

    def begin(engine: ScriptedEngine | None = None, **options: Any) -> Page:
        page = open_page(serve(engine or ScriptedEngine(lambda m, t: say(ANSWER, piece=50))).url, **options)
        page.locator("#text").fill("Show me")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
        return page

    return begin


def option(page: Page, name: str) -> Locator:
    return page.locator(f"#command-{name}")


def test_the_palette_by_keyboard(chat: Callable[..., Page]) -> None:
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


def test_a_command_nobody_knows_is_not_sent(chat: Callable[..., Page]) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say(f"Yes to {messages[-1].content}"))
    page = chat(engine)
    text = page.locator("#text")
    text.fill("/temprature 1")
    expect(page.locator("#palette")).to_contain_text("There is no such command")
    text.press("Enter")
    assert text.input_value() == "/temp "
    page.get_by_role("button", name="Send").click()  # the settings come, since nothing follows
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    for typed, sent in (("//temp is a folder", "/temp is a folder"), ("/usr/bin is one", "/usr/bin is one")):
        text.fill(typed)
        expect(page.locator("#palette")).to_be_hidden()
        text.press("Enter")
        expect(page.locator("article.user .bubble").last).to_have_text(sent)
        expect(page.locator("article.assistant").last).to_contain_text(f"Yes to {sent}")  # the shown question is early
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert len(engine.requests) == 3


def test_a_command_that_cannot_take_what_follows_it_says_so(serve: Callable[..., Any], open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    text, problem = page.locator("#text"), page.locator("#composer-problem")
    for typed, told in (
        ("/temp 99", "/temp takes [0..2]"),
        ("/thinking banana", "/thinking takes [on|off|N]"),
        ("/theme purple", "/theme takes [light|dark|system]"),
        ("/help me with this", "/help takes nothing after it"),
    ):
        text.fill(typed)
        text.press("Enter")
        expect(problem).to_contain_text(told)
        assert text.input_value() == typed, "nothing that was typed is lost"
    text.fill("/regenerate")
    text.press("Enter")
    expect(problem).to_contain_text("nothing here")
    text.fill("/temp 1,5")
    text.press("Enter")
    expect(page.locator("#toasts")).to_contain_text("New chats and those without their own: Temperature 1,5")
    expect(problem).to_be_empty()
    text.fill("/theme")
    text.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    expect(page.locator("#set-temperature")).to_have_value("1.5")


def test_the_palette_by_mouse(chat: Callable[..., Page]) -> None:
    page = chat()
    page.locator("#text").press_sequentially("/")
    option(page, "help").click()
    expect(page.locator("#help")).to_be_visible()
    assert page.locator("#text").input_value() == ""


def test_a_chat_that_is_not_there_yet_cannot_be_cleared(serve: Callable[..., Any], open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    page.locator("#text").fill("/clear")
    page.locator("#text").press("Enter")
    expect(page.locator("#composer-problem")).to_contain_text("no chat yet")


def test_keys_press_what_the_help_says(chat: Callable[..., Page]) -> None:
    page = chat(**CLIPBOARD)
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_visible()
    expect(page.locator("#search-text")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#search")).to_be_hidden()
    page.keyboard.press("Control+Shift+;")
    expect(page.locator("#announcer")).to_have_text("Copied")
    assert "line 59" in page.evaluate("navigator.clipboard.readText()")
    page.locator("#scroller").focus()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Shift+Escape")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("?")
    assert page.locator("#text").input_value() == "?", "in a text it is a letter"
    page.keyboard.press("Control+Enter")
    expect(page.locator(".versions").last).to_contain_text("2/2")
    page.keyboard.press("Alt+ArrowLeft")
    expect(page.locator(".versions").last).to_contain_text("1/2")
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Keyboard shortcuts").click()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+o")
    page.keyboard.press("Alt+ArrowRight")
    page.wait_for_timeout(200)
    expect(page.locator(".versions").last).to_contain_text("1/2")


def test_formulas_are_typeset_and_prices_are_not(chat: Callable[..., Page]) -> None:
    page = chat()
    expect(page.locator(".answer .katex")).to_have_count(2)
    expect(page.locator(".answer .katex-display math")).to_have_count(1)
    expect(page.locator(".answer")).to_contain_text("Prices: $5 and $6.")
    expect(page.locator(".answer .source")).to_have_text("\\frac{1")
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")
    page.reload()
    expect(page.locator(".answer .katex")).to_have_count(2)


def test_a_page_without_formulas_fetches_no_katex(serve: Callable[..., Any], open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    page.locator("#text").fill("Hello")
    page.locator("#text").press("Enter")
    expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
    assert fetched and not [url for url in fetched if "katex" in url]


def test_code_is_copied_wrapped_and_unfolded(chat: Callable[..., Page]) -> None:
    page = chat(**CLIPBOARD)
    short, long = page.locator(".code-block").first, page.locator(".code-block").last
    short.get_by_role("button", name="Copy").click()
    expect(short.get_by_role("button", name="Copy")).to_have_attribute("data-done", "")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n"
    short.get_by_role("button", name="Wrap").click()
    assert short.locator("pre").evaluate("pre => getComputedStyle(pre).whiteSpaceCollapse") == "preserve"
    expect(short.get_by_role("button", name="Wrap")).to_have_attribute("aria-pressed", "true")
    folded = long.bounding_box()
    long.get_by_role("button", name="Show all").click()
    unfolded = long.bounding_box()
    assert folded and unfolded and unfolded["height"] > folded["height"] + 300
    page.locator("article.assistant [data-copy]").click()
    expect(page.locator("article.assistant [data-copy]")).to_have_attribute("data-done", "")
    expect(page.locator("#announcer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("Solve $ax^2 = 0$")


def test_text_files_go_along_and_others_are_refused(serve: Callable[..., Any], open_page: Open, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("I have read it."))
    page = open_page(serve(engine).url)
    for name, content in (
        ("notes.md", b"The word is heron."),
        ("picture.png", b"\x89PNG\r\n\x00\xff"),
        ("big.txt", b"x" * 200_001),
    ):
        (tmp_path / name).write_bytes(content)
    page.locator("#files").set_input_files([tmp_path / name for name in ("notes.md", "picture.png", "big.txt")])
    expect(page.locator("#attachments .attached")).to_have_text(["notes.md"])
    expect(page.locator("#attachments")).to_contain_text("picture.png is no text. Images")
    expect(page.locator("#attachments")).to_contain_text("big.txt is larger than 200 kB")
    page.locator("#text").fill("What is the word?")
    page.locator("#text").press("Enter")
    expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
    expect(page.locator("article.user")).to_contain_text("notes.md")
    assert "heron" in engine.requests[0].messages[-1].content
    expect(page.locator("#attachments")).to_be_empty()
    page.locator("#files").set_input_files(tmp_path / "notes.md")  # alone it is a message too
    expect(page.locator("#attachments .attached")).to_have_count(1)
    page.locator("#text").press("Enter")
    expect(page.locator("article.user")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.locator("#text").press("Enter")
    assert page.locator("#text").evaluate("text => text.required") and page.locator("article.user").count() == 2


def test_a_long_paste_may_become_an_attachment(serve: Callable[..., Any], open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine()).url, **CLIPBOARD)
    page.evaluate("navigator.clipboard.writeText('word '.repeat(600))")
    page.locator("#text").fill("See: ")
    page.keyboard.press("Control+v")
    expect(page.locator("#paste-offer")).to_be_visible()
    page.get_by_role("button", name="Make it an attachment").click()
    expect(page.locator("#attachments .attached")).to_have_text(["Pasted text.txt"])
    assert page.locator("#text").input_value() == "See: "
    expect(page.locator("#paste-offer")).to_be_hidden()
    page.get_by_role("button", name="Remove").click()
    expect(page.locator("#attachments .attached")).to_have_count(0)
    page.evaluate("navigator.clipboard.writeText('short')")
    page.locator("#text").focus()
    page.keyboard.press("Control+v")
    expect(page.locator("#paste-offer")).to_be_hidden()


def test_settings_are_kept_and_checked_with_the_reason_beside_them(chat: Callable[..., Page]) -> None:
    page = chat(expected="status of 400|response:error")
    page.get_by_role("button", name="Settings").click()
    field = page.locator("#set-temperature")
    field.fill("7")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#set-temperature-note, #temperature-note")).to_be_visible()
    expect(field).to_have_attribute("aria-invalid", "true")
    assert field.input_value() == "7"
    field.fill("0.3")
    page.locator("#set-system_prompt").fill("Answer in verse.")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(field).to_have_value("0.3")
    expect(page.locator("#set-system_prompt")).to_have_value("Answer in verse.")
    page.keyboard.press("Escape")
    page.locator("#text").fill("/temp 0.9")
    page.locator("#text").press("Enter")
    page.wait_for_timeout(200)
    page.get_by_role("button", name="Settings").click()
    expect(field).to_have_value("0.9")
    expect(page.locator("#set-system_prompt")).to_have_value("Answer in verse.")


def test_the_meter_counts_the_draft_and_tells_of_the_end_before_it_comes(chat: Callable[..., Page]) -> None:
    page = chat()
    meter = page.locator("#meter [role=meter]")
    expect(meter).to_have_attribute("aria-valuemax", "4096")
    before = int(meter.get_attribute("aria-valuenow") or 0)
    assert before > 0
    page.locator("#text").fill("word " * 500)
    expect(page.locator("#draft-tokens")).to_contain_text(re.compile(r"^[45]\d\d tokens"))
    assert int(meter.get_attribute("aria-valuenow") or 0) > before + 400
    expect(page.locator("#meter .meter")).to_have_class(re.compile("ok"))
    page.locator("#text").fill("word " * 3300)
    expect(page.locator("#meter .meter")).to_have_class(re.compile("warn"))
    expect(page.locator("#limit")).to_contain_text("At its end the answer stops")
    page.locator("#text").fill("word " * 5000)
    expect(page.locator("#limit")).to_contain_text("does not fit")
    expect(page.locator("#meter .meter")).to_have_class(re.compile("bad"))
    page.locator("#meter button").click()
    expect(page.locator("#meter-details")).to_contain_text("This message")


def test_the_question_is_there_before_the_server_has_it(chat: Callable[..., Page]) -> None:
    page = chat(expected="ERR_FAILED|Failed to fetch|htmx:error")
    release = threading.Event()

    def wait(route: Any) -> None:
        expect(page.locator("article.user.pending .bubble")).to_have_text("At once")
        assert page.locator("#text").input_value() == ""
        release.set()
        route.abort()

    page.route("**/messages", wait)
    page.locator("#text").fill("At once")
    page.locator("#text").press("Enter")
    expect(page.locator("#composer-problem")).to_contain_text("Not sent")
    assert release.is_set()
    expect(page.locator("article.user.pending")).to_have_count(0)
    assert page.locator("#text").input_value() == "At once", "nothing that was typed is lost"


def test_views_are_chosen_in_the_browser(chat: Callable[..., Page]) -> None:
    page = chat()
    expect(page.locator(".numbers")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Show tokens and speed").click()
    page.get_by_text("Enter sends").click()
    page.keyboard.press("Escape")
    expect(page.locator(".numbers")).to_be_hidden()
    page.reload()
    expect(page.locator(".numbers")).to_be_hidden()
    page.locator("#text").fill("a")
    page.locator("#text").press("Enter")
    assert page.locator("#text").input_value() == "a\n"


def test_answer_now_stands_beside_the_thoughts_while_they_come(serve: Callable[..., Any], open_page: Open) -> None:
    def script(messages: Any, thinking: bool) -> Iterator[Event]:
        yield from say("", "A thought.\n\n" * 300, piece=12)
        yield from say("Done.")

    page = open_page(serve(ScriptedEngine(script, pace_seconds=0.03)).url)
    page.locator("#text").fill("Think")
    page.locator("#text").press("Enter")
    expect(page.locator("details.reasoning summary")).to_contain_text("Thinking")
    expect(page.locator(".thoughts")).to_contain_text("A thought.")
    view = page.locator(".thoughts").bounding_box()
    page.wait_for_timeout(400)
    later = page.locator(".thoughts").bounding_box()
    assert view and later and view["height"] == later["height"] < 200, "a window of fixed height"
    page.get_by_role("button", name="Answer now").click()
    expect(page.locator(".answer")).to_contain_text("Done.")
    expect(page.get_by_role("button", name="Answer now")).to_be_hidden()
    expect(page.locator("details.reasoning summary")).to_contain_text("Thought")


def test_it_can_be_installed(serve: Callable[..., Any], open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    manifest = page.evaluate(
        """async () => {
            const manifest = await (await fetch(document.querySelector("link[rel=manifest]").href)).json();
            const sizes = [];
            for (const icon of manifest.icons) {
                const answer = await fetch(icon.src);
                sizes.push([icon.sizes, answer.status, answer.headers.get("content-type")]);
            }
            return { ...manifest, sizes };
        }"""
    )
    assert manifest["display"] == "standalone" and manifest["start_url"] == "/"
    assert ["192x192", 200, "image/png"] in manifest["sizes"] and ["512x512", 200, "image/png"] in manifest["sizes"]
    client = page.context.new_cdp_session(page)
    found = client.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [error["errorId"] for error in found if error["errorId"] != "in-incognito"] == []
