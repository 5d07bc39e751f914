"""Keyboard, focus and clipboard: dialogs are modal, lists are one Tab stop, and no editing key is intercepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.conftest import WAIT_MS, Served
from browser.conversation import answers, ask, begin, chat_row, last_answer, more, until
from playwright.sync_api import Browser, BrowserContext, Page, expect
from scripted_engine import ScriptedEngine, say

from notso.web.values.settings import Settings
from notso.web.values.wording import words

ANSWER = (
    "The first paragraph, which is read and selected.\n\nIn $O(n \\log n)$.\n\n"
    'A table:\n\n|a|b|\n|-|-|\n|1, 2|say "x"<br>twice|\n\n```python\n' + "y = 1\n" * 5 + "```\n\nThe end.\n"
)
PRESSED = """([init]) => {
    const event = new KeyboardEvent("keydown", { bubbles: true, cancelable: true, ...init });
    if (init.keyCode) Object.defineProperty(event, "keyCode", { value: init.keyCode });
    document.activeElement.dispatchEvent(event);
    return event.defaultPrevented;
}"""
ARROWS = ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown")
# Text editing keys of all systems: Option and Command with arrows or Enter, and Emacs keys with Control on a Mac.
EDITING = [
    *({"key": key, "altKey": True} for key in (*ARROWS, "Enter", "Backspace")),
    *({"key": key, "altKey": True, "shiftKey": True} for key in ARROWS),
    *({"key": key, "ctrlKey": True, "shiftKey": shift} for key in ARROWS for shift in (False, True)),
    *({"key": key, "metaKey": True} for key in (*ARROWS, "Backspace", "a", "c", "v", "x", "z")),
    *({"key": key, "ctrlKey": True} for key in ("a", "c", "v", "x", "z", "y")),
]
EDITING_ON_MAC = [{"key": key, "ctrlKey": True} for key in ("a", "b", "d", "e", "f", "h", "k", "n", "p", "t", "y")]
INSIDE = """(sheet) => {
    const [dialog, focused] = [document.getElementById(sheet), document.activeElement];
    return dialog.contains(focused) || focused === document.body;
}"""


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda messages, thinking: say(ANSWER, piece=12), is_demo=False)


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine, closing: list[Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("keys")
    server = Served(lambda: engine, Settings(port=0, data_dir=folder / "data"))
    closing.append(server)
    yield server
    server.begin_close()


def opened(context: BrowserContext, url: str) -> Page:
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    return page


@pytest.fixture(scope="module")
def page(browser: Browser, server: Served) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 800},
        reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"],
    )
    page = opened(context, server.url)
    for title in ("One", "Two", "Three"):
        page.goto(server.url)
        begin(page, title)
    yield page
    context.close()


@pytest.mark.parametrize("sheet", ["settings", "help", "search"])
def test_focus_stays_in_an_open_dialog(page: Page, sheet: str) -> None:
    page.evaluate("(sheet) => document.querySelector(`#sidebar button[commandfor=${sheet}]`).click()", sheet)
    expect(page.locator(f"#{sheet}")).to_be_visible()
    outside = 0
    for _ in range(45):
        page.keyboard.press("Tab")
        outside += not page.evaluate(INSIDE, sheet)
    page.keyboard.press("Escape")
    expect(page.locator(f"#{sheet}")).to_be_hidden()
    assert outside == 0


def test_settings_tabs_are_one_tab_stop_navigated_by_arrows(page: Page) -> None:
    page.locator("#sidebar [commandfor=settings]").click()
    page.locator("#tab-general").focus()
    steps = (("ArrowDown", "model"), ("End", "shortcuts"), ("ArrowDown", "general"), ("ArrowUp", "shortcuts"))
    for key, wanted in steps:
        page.keyboard.press(key)
        expect(page.locator(f"#tab-{wanted}")).to_be_focused()
        expect(page.locator(f"#tab-{wanted}")).to_have_attribute("aria-selected", "true")
    assert page.locator("#settings [role=tab][tabindex='0'], #settings [role=tab]:not([tabindex])").count() == 1
    page.keyboard.press("Escape")


def test_chat_list_is_one_tab_stop_navigated_by_arrows(page: Page) -> None:
    controls = "[...document.querySelectorAll('#chat-list a, #chat-list button')]"
    stops = f"{controls}.filter(e => e.checkVisibility() && e.tabIndex === 0)"
    assert page.evaluate(f"{stops}.length") == 1
    page.locator("#chat-list a[aria-current]").focus()
    rows = page.locator("#chat-list li > a")
    page.keyboard.press("Home")
    expect(rows.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(rows.nth(1)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#chat-list .chats > li").nth(1).locator(".row-menu")).to_be_focused()
    page.keyboard.press("Enter")
    menu = page.locator("#chat-list .chats > li").nth(1).locator("[popover]")
    expect(menu).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")
    expect(rows.nth(1)).to_be_focused()
    assert page.evaluate(f"{stops}.length") == 1


def test_chat_is_renamed_and_archived_from_its_row_menu(page: Page) -> None:
    here = page.url
    menu = chat_row(page, "One")
    menu.get_by_label(words["title"]).fill("First")
    menu.get_by_role("button", name=words["rename"]).click()
    expect(page.locator("#chat-list").get_by_role("link", name="First")).to_be_visible()
    chat_row(page, "First").get_by_role("button", name=words["archive_this"]).click()
    expect(page.locator("#chat-list").get_by_role("link", name="First")).to_have_count(0)
    assert page.url == here, "a row of another chat does not leave the current page"


def test_editing_keys_are_not_intercepted(page: Page) -> None:
    page.locator("#text").fill("half a thought")
    taken = [key for key in EDITING if page.evaluate(PRESSED, [key])]
    page.locator("#text").fill("")
    assert taken == []


def test_mac_editing_keys_are_not_intercepted(browser: Browser, server: Served, page: Page) -> None:
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(navigator, 'platform', { get: () => 'MacIntel' })")
    mac = opened(context, page.url)
    mac.locator("#text").fill("half a thought")
    assert [key for key in EDITING + EDITING_ON_MAC if mac.evaluate(PRESSED, [key])] == []
    assert mac.evaluate(PRESSED, [{"key": "k", "metaKey": True}]), "Command is the modifier on a Mac"
    context.close()


def test_shortcuts_work_on_keyboards_of_other_scripts(page: Page) -> None:
    for event, sheet in (
        ({"key": "ن", "code": "KeyK", "ctrlKey": True}, "search"),
        ({"key": "؟", "code": "Slash", "shiftKey": True}, "help"),
    ):
        page.locator("#scroller").focus()
        assert page.evaluate(PRESSED, [event])
        expect(page.locator(f"#{sheet}")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(f"#{sheet}")).to_be_hidden()


@pytest.mark.parametrize("event", [{"isComposing": True}, {"keyCode": 229}])
def test_enter_that_ends_an_ime_composition_does_not_send(page: Page, event: dict[str, Any]) -> None:
    """Safari reports the end of a composition before the Enter that caused it, with key code 229."""
    page.locator("#text").fill("日本")
    assert not page.evaluate(PRESSED, [{"key": "Enter", **event}])
    expect(page.locator("#text")).to_have_value("日本")
    assert page.locator("article.pending").count() == 0
    page.locator("#text").fill("/")
    assert not page.evaluate(PRESSED, [{"key": "Enter", **event}]), "it runs no command either"
    page.locator("#text").fill("")


def test_text_inserted_by_scripts_can_be_undone(page: Page, server: Served) -> None:
    chat = page.url
    page.goto(server.url)
    page.locator("#text").press_sequentially("my words")
    page.locator(".examples .button").first.click()
    expect(page.locator("#text")).to_have_value(words["start_explain_text"] + "my words")
    page.keyboard.press("Control+z")
    expect(page.locator("#text")).to_have_value("my words")
    page.locator("#text").fill("")
    page.keyboard.type("/the")
    page.keyboard.press("Tab")
    expect(page.locator("#text")).to_have_value("/theme ")
    page.keyboard.press("Control+z")
    expect(page.locator("#text")).to_have_value("/the")
    page.locator("#text").fill("")
    page.goto(chat)


def test_end_of_an_answer_keeps_selection_and_code_wrapping(page: Page, engine: ScriptedEngine) -> None:
    held = {"at": 0}

    def script(messages: Any, thinking: bool) -> Iterator[Any]:
        for event in say(ANSWER, piece=12):
            yield event
            held["at"] += 1
            if held["at"] == len(say(ANSWER, piece=12)) - 1:
                engine.gate.clear()

    plain, engine.script = engine.script, script
    before = answers(page).count()
    ask(page, "Once more")
    answer = answers(page).nth(before)
    expect(answer.locator(".code-block")).to_be_visible()
    answer.locator(".wrap-code").click()
    expect(answer.locator(".katex").first).to_be_attached()
    formula = answer.locator(".math").first.element_handle()
    answer.locator("p").first.select_text()
    selected = page.evaluate("getSelection().toString()")
    assert selected.startswith("The first paragraph")
    engine.gate.set()
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".toolbar")).to_be_visible()
    engine.script = plain
    assert page.evaluate("getSelection().toString()") == selected
    expect(answer.locator(".wrap-code")).to_have_attribute("aria-pressed", "true")
    assert answer.locator(".code-block").evaluate("block => block.classList.contains('wrapped')")
    assert formula.evaluate("element => element.isConnected && element.querySelector('.katex') !== null")
    expect(answer.locator(".answer")).to_contain_text("The end.")


def test_queued_messages_return_to_input_in_order_if_sending_fails(page: Page, engine: ScriptedEngine) -> None:
    count = answers(page).count()
    engine.gate.clear()
    ask(page, "Before")
    expect(page.locator("[data-stop]")).to_be_visible()
    for text in ("B", "C"):
        ask(page, text)
    page.locator("#text").fill("D")
    page.route("**/messages", lambda route: route.abort())
    engine.gate.set()
    expect(page.locator("#composer-problem")).to_contain_text("Not sent")
    expect(page.locator("#text")).to_have_value("B\n\nC\n\nD")
    expect(page.locator("#queued li")).to_have_count(0)
    page.unroute("**/messages")
    page.locator("#text").fill("")
    expect(answers(page)).to_have_count(count + 1)


def test_answers_are_copied_as_rich_text_and_tables_as_csv(page: Page) -> None:
    answer = answers(page).first
    answer.hover()
    answer.locator(".toolbar > [data-copy]").click()
    expect(answer.locator(".toolbar > [data-copy]")).to_have_attribute("data-done", "")
    html = page.evaluate("async () => (await (await navigator.clipboard.read())[0].getType('text/html')).text()")
    assert "<table" in html and "<button" not in html and "class=" not in html
    assert page.evaluate("navigator.clipboard.readText()").startswith("The first paragraph")
    more(answer).locator("[data-copy-tables]").click()
    until(page, "async () => (await navigator.clipboard.readText()).startsWith('a,b')")
    assert page.evaluate("navigator.clipboard.readText()") == 'a,b\n"1, 2","say ""x""\ntwice"'


def test_selected_formulas_are_copied_as_source(page: Page) -> None:
    expect(page.locator(".answer .katex").first).to_be_attached()
    page.locator(".answer p:has(.katex)").first.select_text()
    page.keyboard.press("Control+c")
    assert page.evaluate("navigator.clipboard.readText()").strip() == "In $O(n \\log n)$."


def test_copy_without_server_uses_the_shown_text(page: Page) -> None:
    page.route("**/text", lambda route: route.abort())
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    button = last_answer(page).locator(".toolbar > [data-copy]")
    button.click()
    expect(button).to_have_attribute("data-done", "")
    page.unroute("**/text")
    assert "The first paragraph" in page.evaluate("navigator.clipboard.readText()") and complaints == []


def test_failed_first_message_keeps_the_start_page(page: Page, server: Served) -> None:
    chat = page.url
    page.goto(server.url)
    page.route("**/chats", lambda route: route.abort() if route.request.method == "POST" else route.continue_())
    ask(page, "Not now")
    expect(page.locator("#composer-problem")).to_contain_text("Not sent")
    expect(page.locator(".greeting .hello")).to_be_visible()
    expect(page.locator("#text")).to_have_value("Not now")
    page.unroute("**/chats")
    page.locator("#text").fill("")
    page.goto(chat)


def test_chat_table_can_be_sorted_filtered_and_selected(page: Page, server: Served) -> None:
    chat = page.url
    page.goto(server.url.rstrip("/") + "/archive")
    buttons = page.locator(".bar button[name=action]")
    assert buttons.evaluate_all("all => all.every((each) => each.disabled)"), "nothing is selected"
    titles = page.locator("tbody .title a")
    expect(titles).to_have_count(3)
    page.get_by_role("link", name=words["title"]).click()
    expect(page.locator("th[aria-sort]")).to_contain_text(words["title"])
    first = titles.first.inner_text()
    page.get_by_role("link", name=words["title"]).click()
    expect(titles.last).to_contain_text(first)
    page.get_by_role("searchbox").fill("tw")
    page.get_by_role("searchbox").press("Enter")
    expect(titles).to_have_text(["Two"])
    page.locator("tbody input").check()
    assert buttons.evaluate_all("all => all.every((each) => !each.disabled)")
    page.goto(chat)
