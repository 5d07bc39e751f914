"""The controls around the conversation, with the real engine: keys, attachments, formulas, settings and context
meter."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser.conversation import ask, begin, finished, questions, show_settings, until
from browser.demo_engine import DemoEngine
from documents.made import pdf, stream, text_pdf
from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine

from notso.web.values.wording import words

ANSWER = (
    "Solve $ax^2 = 0$:\n\n$$\nx = \\frac{-b}{2a}\n$$\n\nPrices: $5 and $6. Broken: $\\frac{1$.\n\n"
    "```python\nx = 1\n```\n\n```\n" + "".join(f"line {n}\n" for n in range(60)) + "```\n"
)
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}

Open = Callable[..., Page]


Picture = Callable[..., None]


@pytest.fixture
def chat(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> Callable[..., Page]:
    """A page with one answer that contains every kind of content."""

    def open_chat(**options: Any) -> Page:
        demo.dictate(ANSWER)
        page = open_page(serve(demo.load).url, **options)
        begin(page, "Show me")
        return page

    return open_chat


def test_keyboard_shortcuts_work_and_can_be_disabled(chat: Callable[..., Page]) -> None:
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
    assert page.locator("#text").input_value() == "?", "in a text field the key types a letter"
    page.keyboard.press("Control+Enter")
    expect(page.locator(".versions").last).to_contain_text("2/2")
    finished(page)
    page.locator("#scroller").focus()
    page.keyboard.press("h")
    expect(page.locator(".versions").last).to_contain_text("1/2")
    show_settings(page)
    page.locator(".switch:has([data-preference=keys])").click()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+o")
    page.locator("#scroller").focus()
    page.keyboard.press("l")
    page.wait_for_timeout(300)  # time for an effect that must not happen
    expect(page.locator(".versions").last).to_contain_text("1/2")


def test_formulas_are_typeset_and_prices_are_not(chat: Callable[..., Page]) -> None:
    page = chat()
    to_the_top = "document.getElementById('scroller').scrollTop = 0"
    page.evaluate(to_the_top)
    expect(page.locator(".answer .katex")).to_have_count(2)
    expect(page.locator(".answer .katex-display math")).to_have_count(1)
    expect(page.locator(".answer")).to_contain_text("Prices: $5 and $6.")
    expect(page.locator(".answer .source")).to_have_text("\\frac{1")
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")
    page.reload()
    page.evaluate(to_the_top)
    expect(page.locator(".answer .katex")).to_have_count(2)


def test_page_without_formulas_does_not_load_katex(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url)
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    begin(page)
    assert fetched and not [url for url in fetched if "katex" in url]


def test_code_blocks_can_be_copied_wrapped_and_expanded(chat: Callable[..., Page]) -> None:
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


def test_readable_files_are_attached_and_others_rejected(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, tmp_path: Path, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    for name, content in (
        ("notes.md", b"The word is heron."),
        ("picture.png", b"\x89PNG\r\n\x00\xff"),
        ("big.txt", b"x" * 200_001),
        ("old.txt", "Le caf\u00e9 \u2013 5 \u20ac".encode("windows-1252")),
    ):
        (tmp_path / name).write_bytes(content)
    page.locator("#files").set_input_files(
        [tmp_path / name for name in ("notes.md", "picture.png", "big.txt", "old.txt")]
    )
    old = "old.txttext, 13 characters"
    expect(page.locator("#attachments .attached")).to_have_text(["notes.md", old])
    expect(page.locator("#attachments")).to_contain_text("its encoding was guessed: Windows-1252")
    expect(page.locator("#attachments")).to_contain_text("picture.png is not a text file (UTF-8). Images")
    expect(page.locator("#attachments")).to_contain_text("big.txt is larger than 200 kB")
    for name, content in (("paper.pdf", text_pdf(["Its bird is a stork."])), ("scan.pdf", pdf([stream(b"")]))):
        (tmp_path / name).write_bytes(content)
    page.locator("#files").set_input_files([tmp_path / "paper.pdf", tmp_path / "scan.pdf"])
    expect(page.locator("#attachments .attached")).to_have_text(["notes.md", old, "paper.pdfPDF, 20 characters"])
    expect(page.locator("#attachments")).to_contain_text("scan.pdf has no text: it is probably a scan")
    picture(page)
    begin(page, "What is the word?")
    expect(page.locator("article.user")).to_contain_text("notes.md")
    assert "heron" in demo.prompts[0] and "--- notes.md ---" in demo.prompts[0]
    assert "--- paper.pdf ---\nIts bird is a stork.\n--- end" in demo.prompts[0]
    assert "Le caf\u00e9 \u2013 5 \u20ac" in demo.prompts[0], "neither UTF-8 nor UTF-16"
    expect(page.locator("#attachments")).to_be_empty()
    page.locator("#files").set_input_files(tmp_path / "notes.md")  # an attachment alone is a message too
    expect(page.locator("#attachments .attached")).to_have_count(1)
    page.locator("#text").press("Enter")
    expect(questions(page)).to_have_count(2)
    finished(page, 2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.locator("#text").press("Enter")
    assert page.locator("#text").evaluate("text => text.required") and page.locator("article.user").count() == 2


def test_long_paste_can_become_an_attachment(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, **CLIPBOARD)
    page.evaluate("navigator.clipboard.writeText('word '.repeat(600))")
    page.locator("#text").fill("See: ")
    page.keyboard.press("Control+v")
    expect(page.locator("#paste-offer")).to_be_visible()
    page.get_by_role("button", name=words["paste_attach"]).click()
    expect(page.locator("#attachments .attached")).to_have_text(["Pasted text.txt"])
    assert page.locator("#text").input_value() == "See: "
    expect(page.locator("#paste-offer")).to_be_hidden()
    page.get_by_role("button", name="Remove").click()
    expect(page.locator("#attachments .attached")).to_have_count(0)
    page.evaluate("navigator.clipboard.writeText('short')")
    page.locator("#text").focus()
    page.keyboard.press("Control+v")
    expect(page.locator("#paste-offer")).to_be_hidden()


PASTE = """(text) => {
    const data = new DataTransfer();
    if (text) data.setData("text/plain", text);
    data.items.add(new File([new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10])], "image.png", { type: "image/png" }));
    const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    return document.getElementById("text").dispatchEvent(event);
}"""


def test_text_copied_with_a_picture_of_it_is_pasted(serve: Callable[..., Any], open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    assert not page.evaluate(PASTE, ""), "a picture alone is rejected"
    expect(page.locator("#attachments .bad")).to_contain_text("image.png")
    page.locator("#text").fill("As follows: ")
    assert page.evaluate(PASTE, "1\t2"), "the browser pastes the text"
    expect(page.locator("#attachments .bad")).to_have_count(0)


def test_invalid_settings_show_the_reason_beside_the_field(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url, expected="status of 400|response:error")
    show_settings(page, "model")
    wrong = {
        "temperature": "7",
        "top_p": "0",
        "min_p": "two",
        "max_tokens": "0",
        "seed": "1.5",
        "thinking_budget": "-1",
    }
    for name, value in wrong.items():
        page.locator(f"#set-{name}").fill(value)
    page.get_by_role("button", name="Save").click()
    for name, value in wrong.items():
        field = page.locator(f"#set-{name}")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_value(value)
        reason = page.locator(f"#{(field.get_attribute('aria-describedby') or '').split()[0]}")
        expect(reason).to_contain_text(re.compile(r"a (whole )?number"))
        beside, box = reason.bounding_box(), field.bounding_box()
        assert beside and box and 0 <= beside["y"] - box["y"] < 90 and abs(beside["x"] - box["x"]) < 60
    picture(page, dark=True)


def test_settings_are_validated_and_survive_reload(chat: Callable[..., Page]) -> None:
    page = chat(expected="status of 400|response:error")
    show_settings(page, "model")
    field = page.locator("#set-temperature")
    field.fill("7")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#set-temperature-note, #temperature-note")).to_be_visible()
    expect(field).to_have_attribute("aria-invalid", "true")
    assert field.input_value() == "7"
    field.fill("0.3")
    page.locator("#tab-chat").click()
    page.locator("#set-system_prompt").fill("Answer in verse.")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    page.reload()
    show_settings(page, "model")
    expect(field).to_have_value("0.3")
    expect(page.locator("#set-system_prompt")).to_have_value("Answer in verse.")
    page.keyboard.press("Escape")
    with page.expect_response("**/settings"):
        ask(page, "/temp 0.9")
    show_settings(page, "model")
    expect(field).to_have_value("0.9")
    expect(page.locator("#set-system_prompt")).to_have_value("Answer in verse.")


def test_context_meter_counts_the_draft_and_warns_when_nearly_full(
    chat: Callable[..., Page], demo: DemoEngine, picture: Picture
) -> None:
    page = chat()
    meter = page.locator("#gauge [role=meter]")
    expect(meter).to_have_attribute("aria-valuemax", "4096")
    expect(meter).not_to_have_attribute("aria-valuenow", "0")
    before = int(meter.get_attribute("aria-valuenow") or 0)
    each = demo.engine.tokenizer.encode(" word" * 100)
    words = lambda tokens: "word " * (100 * tokens // len(each))  # noqa: E731
    page.locator("#text").fill(words(500))
    expect(page.locator("#draft-tokens")).to_contain_text(re.compile(r"^(49|50|51)\d tokens"))
    expect(page.locator("#gauge .gauge")).to_have_class(re.compile("ok"))
    until(page, "least => +document.querySelector('#gauge [role=meter]').ariaValueNow > least", before + 400)
    page.locator("#text").fill(words(3000))
    expect(page.locator("#gauge .gauge")).to_have_class(re.compile("warn"))
    expect(page.locator("#limit")).to_contain_text("When it is full, generation stops")
    picture(page, "near", dark=True)
    page.locator("#text").fill(words(4500))
    expect(page.locator("#limit")).to_contain_text("Message too long")
    expect(page.locator("#gauge .gauge")).to_have_class(re.compile("bad"))
    page.locator("#gauge button").click()
    expect(page.locator("#gauge-details")).to_contain_text("Draft")
    picture(page, "over", dark=True)


def test_question_is_shown_while_sending_and_restored_on_failure(chat: Callable[..., Page]) -> None:
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
    assert page.locator("#text").input_value() == "At once", "the typed text is not lost"


def test_browser_preferences_survive_reload(chat: Callable[..., Page]) -> None:
    page = chat()
    expect(page.locator(".numbers")).to_be_visible()
    show_settings(page)
    page.get_by_text("Show token counts and speed").click()
    page.get_by_text(words["prefer_enter"]).click()
    page.keyboard.press("Escape")
    expect(page.locator(".numbers")).to_be_hidden()
    page.reload()
    expect(page.locator(".numbers")).to_be_hidden()
    page.locator("#text").fill("a")
    page.locator("#text").press("Enter")
    assert page.locator("#text").input_value() == "a\n"


def test_preferences_changed_in_two_tabs_are_both_kept(serve: Callable[..., Any], open_page: Open) -> None:
    server = serve(ScriptedEngine())
    first = open_page(server.url)
    second = open_page(server.url, like=first)
    show_settings(first)
    first.get_by_text(words["prefer_enter"]).click()
    show_settings(second)
    second.get_by_text(words["theme_dark"], exact=True).click()
    first.reload()
    expect(first.locator("html")).to_have_attribute("data-theme", "dark")
    expect(first.locator("html")).to_have_attribute("data-enter", "off")


def test_answer_now_button_is_shown_while_thinking(
    serve: Callable[..., Any], open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("Done.", "A thought.\n\n" * 300)
    demo.hold("thinking", 150)
    ask(page, "Think")
    expect(page.locator("details.reasoning summary")).to_contain_text("Thinking")
    demo.reached()
    # more paragraphs than the box can show
    until(page, "() => document.querySelectorAll('.reasoning-text p').length > 20")
    view = page.locator(".reasoning-text").bounding_box()
    shown = page.locator(".reasoning-text").inner_text()
    demo.hold("thinking", 300)
    expect(page.locator(".reasoning-text")).not_to_have_text(shown, use_inner_text=True)
    later = page.locator(".reasoning-text").bounding_box()
    assert view and later and view["height"] == later["height"] < 200, "the box has a fixed height"
    picture(page, dark=True)
    page.get_by_role("button", name=words["answer_now"]).click()
    expect(page.locator(".answer")).to_contain_text("Done.")
    demo.release()
    expect(page.get_by_role("button", name=words["answer_now"])).to_be_hidden()
    expect(page.locator("details.reasoning summary")).to_contain_text(re.compile("Reasoning|Thought"))


def test_page_is_an_installable_web_app(serve: Callable[..., Any], open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    manifest = page.evaluate(
        """async () => {
            const address = document.querySelector("link[rel=manifest]").href;
            const manifest = await (await fetch(address)).json();
            const [sizes, beside] = [[], (path) => new URL(path, address)];
            for (const icon of manifest.icons) {
                const answer = await fetch(beside(icon.src));
                sizes.push([icon.sizes, answer.status, answer.headers.get("content-type")]);
            }
            return { ...manifest, start: beside(manifest.start_url).pathname, sizes };
        }"""
    )
    assert manifest["display"] == "standalone" and manifest["start"] == "/"
    assert ["192x192", 200, "image/png"] in manifest["sizes"] and ["512x512", 200, "image/png"] in manifest["sizes"]
    client = page.context.new_cdp_session(page)
    found = client.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [error["errorId"] for error in found if error["errorId"] != "in-incognito"] == []
