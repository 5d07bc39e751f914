"""Many chats and reusable items: starts, bookmarks, saved prompts, previews, archive, branches, languages."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import answers, ask, begin, finished, last_answer, more, questions, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine, say

from notso.web.values.wording import LANGUAGES, language_table

Serve = Callable[..., Any]
Open = Callable[..., Page]
Picture = Callable[..., None]

HOSTILE = (
    "```html\n<h1 id='it'>Seen</h1><script>document.getElementById('it').textContent = 'ran'</script>"
    "<img src='http://example.org/x.png'><style>h1 { color: rgb(1, 2, 3) }</style>\n```\n"
)


def saying(text: str, **facts: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda messages, thinking: say(text), **facts)


def test_conversation_starter_fills_the_input_to_be_completed(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(saying("There you are.", is_demo=False)).url)
    page.get_by_role("link", name=language_table("en")["start_explain"]).click()
    expect(page.locator("#text")).to_have_value(language_table("en")["start_explain_text"])
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("tides")
    page.keyboard.press("Enter")
    finished(page)
    expect(questions(page)).to_contain_text("Explain in simple terms: tides")


def test_start_page_suggestions_update_when_the_model_is_loaded(serve: Serve, open_page: Open) -> None:
    let_go = threading.Event()

    def load() -> ScriptedEngine:
        let_go.wait(60)
        return saying("Yes.")

    page = open_page(f"{serve(load).url}?temporary=on")
    expect(page.get_by_role("link", name=language_table("en")["start_explain"])).to_be_visible()
    page.locator("#text").fill("typed meanwhile")
    let_go.set()
    example = page.get_by_role("button", name="What can you do?")
    expect(example).to_be_visible()
    expect(page.locator("#text")).to_have_value("typed meanwhile")
    example.click()
    finished(page)
    expect(page.get_by_text(language_table("en")["temporary_note"])).to_be_visible()


def test_running_and_unread_chats_are_marked(serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("An answer that takes its time. " * 5)
    demo.hold("answer", 3)
    ask(page, "Go on")
    page.wait_for_url("**/chats/*")
    expect(page.locator("#chat-list .mark.working")).to_be_visible()
    expect(page).to_have_title(re.compile("^… "))
    page.locator("#new-chat").click()
    page.wait_for_url(re.compile(r"/$"))
    expect(page.locator("#chat-list .mark.working")).to_be_visible()
    picture(page, "working")
    demo.release()
    expect(page.locator("#chat-list .mark.unread")).to_be_visible()
    expect(page).to_have_title(re.compile(r"^\(1\) "))
    picture(page, "unread")
    page.locator("#chat-list").get_by_role("link", name="Go on").click()
    finished(page)
    expect(page.locator("#chat-list .mark")).to_have_count(0)
    expect(page).to_have_title("Go on · notso")


def test_saved_prompts_are_available_as_commands(serve: Serve, open_page: Open) -> None:
    url = serve(saying("Yes.")).url
    page = open_page(f"{url}prompts")
    for name, kind, text in (("tidy", "message", "Tidy this up:\n/x "), ("brief", "instructions", "Be brief.")):
        page.locator("#name-0").fill(name)
        page.locator("#kind-0").select_option(kind)
        page.locator("#text-0").fill(text)
        page.get_by_role("button", name="Save").last.click()
        expect(page.get_by_text(f"/{name}")).to_be_visible()
    page.goto(url)
    page.locator("#text").press_sequentially("/tidy The Moon")
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_have_value("Tidy this up:\n/x  The Moon")
    page.locator("#text").fill("Hello")
    page.keyboard.press("Enter")
    page.wait_for_url("**/chats/*")
    finished(page)
    page.locator("#text").press_sequentially("/brief So be it")
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_have_value("So be it")
    expect(page.locator("#toasts")).to_contain_text("System prompt")
    show_settings(page, "chat")
    expect(page.locator("#set-system_prompt")).to_have_value("Be brief.")


def test_named_instructions_apply_only_to_the_new_chat(serve: Serve, open_page: Open) -> None:
    url = serve(saying("Yes.")).url
    page = open_page(f"{url}prompts")
    page.locator("#name-0").fill("pirate")
    page.locator("#kind-0").select_option("instructions")
    page.locator("#text-0").fill("Speak as a pirate.")
    page.get_by_role("button", name="Save").last.click()
    page.goto(url)
    page.locator("#text").fill("/pirate Who are you?")
    page.keyboard.press("Enter")
    expect(page.locator("#carried")).to_contain_text("/pirate")
    expect(page.locator("#text")).to_have_value("Who are you?")
    page.keyboard.press("Enter")
    finished(page)
    show_settings(page, "chat")
    expect(page.locator("#set-system_prompt")).to_have_value("Speak as a pirate.")
    page.goto(f"{url}settings")
    expect(page.locator("#set-system_prompt")).to_have_value("")


def test_command_in_a_new_chat_does_not_change_thinking_switch(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(saying("Yes.")).url)
    toggle = page.get_by_role("switch", name="Thinking").first
    for on in (True, False):
        toggle.set_checked(on, force=True)
        page.locator("#text").fill(f"/temp 0.{5 + on}")
        page.keyboard.press("Enter")
        expect(page.locator("#toasts")).to_contain_text(f"0.{5 + on}")
        expect(toggle).to_be_checked(checked=on)


def test_text_typed_after_a_failed_send_is_kept_with_the_question(
    serve: Serve, open_page: Open, demo: DemoEngine
) -> None:
    page = open_page(serve(demo.load).url, expected="ERR_FAILED|htmx:error|Failed to fetch")
    begin(page, "One")
    held: list[Any] = []
    page.route("**/messages", lambda route: held.append(route))
    ask(page, "A long question")
    page.locator("#text").press_sequentially("my next idea")
    assert len(held) == 1
    held[0].abort()
    expect(page.locator("#composer-problem")).to_contain_text("Your text has been kept")
    expect(page.locator("#text")).to_have_value("A long question\n\nmy next idea")
    page.reload()
    expect(page.locator("#text")).to_have_value("A long question\n\nmy next idea")


@pytest.mark.parametrize(("width", "height"), [(320, 256), (360, 420), (740, 360)])
def test_send_button_is_reachable_on_small_screens(
    serve: Serve, open_page: Open, picture: Picture, width: int, height: int
) -> None:
    page = open_page(serve(saying("Yes.")).url, viewport={"width": width, "height": height})
    begin(page)
    files = [{"name": f"file {n}.txt", "mimeType": "text/plain", "buffer": b"text"} for n in range(8)]
    page.locator("#files").set_input_files(files)  # type: ignore[arg-type]
    page.locator("#text").fill("line\n" * 20)
    expect(page.locator(".attached")).to_have_count(len(files))  # each moves the button
    send = page.get_by_role("button", name="Send")
    send.scroll_into_view_if_needed()
    expect(send).to_be_in_viewport(ratio=1)
    picture(page)
    send.click()
    finished(page, 2)


def test_html_preview_runs_no_scripts_and_loads_nothing(serve: Serve, open_page: Open, picture: Picture) -> None:
    page = open_page(serve(saying(HOSTILE)).url)  # the fixture fails on requests to other origins and on console errors
    begin(page)
    page.get_by_role("button", name="Preview").click()
    frame = page.frame_locator("iframe[name=preview-frame]")
    expect(frame.get_by_role("heading")).to_have_text("Seen")
    expect(page.locator("iframe")).to_have_attribute("sandbox", "")
    expect(frame.locator("img[src]")).to_have_count(0)
    picture(page, dark=True)
    page.keyboard.press("Escape")
    expect(page.locator("#preview")).to_be_hidden()


def test_chats_can_be_archived_deleted_and_restored_in_bulk(serve: Serve, open_page: Open, picture: Picture) -> None:
    url = serve(saying("Yes.")).url
    page = open_page(url)
    for text in ("One", "Two", "Three"):
        page.goto(url)
        begin(page, text)
    page.get_by_role("link", name=language_table("en")["archive"]).click()
    picture(page)
    page.get_by_label("Select Two").check()
    page.get_by_role("button", name="Archive", exact=True).click()
    expect(page.get_by_text("1 chat archived.")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="Two")).to_contain_text("archived")
    page.get_by_label(language_table("en")["archive_all"]).check()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("3 chats deleted.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    page.goto(url)
    expect(page.locator("#chat-list li > a")).to_have_text(["Three", "One"])


def test_branch_opens_as_a_new_chat(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(saying("Yes.")).url)
    begin(page, "One")
    ask(page, "Two")
    finished(page, 2)
    more(answers(page).first).get_by_role("button", name=language_table("en")["branch"]).click()
    expect(page.get_by_role("heading", name="One (branch)")).to_be_visible()
    expect(questions(page)).to_have_count(1)
    ask(page, "Another two")
    finished(page, 2)
    expect(page.locator("#chat-list li > a")).to_have_count(2)


def test_temporary_chat_is_not_listed_until_kept(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(saying("Yes.")).url)
    page.get_by_role("link", name=language_table("en")["temporary"]).click()
    expect(page.get_by_text(language_table("en")["temporary_note"])).to_be_visible()
    begin(page, "Quietly")
    expect(page.locator("#chat-list li > a")).to_have_count(0)
    page.get_by_role("button", name="Chat menu").click()
    page.get_by_role("button", name=language_table("en")["temporary_keep"]).click()
    expect(page.locator("#chat-list li > a")).to_have_text(["Quietly"])


def test_answer_is_announced_sentence_by_sentence(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("The first sentence. The second one goes on and on. The $x^2$ comes last\n\n```python\nx = 1\n```\n")
    demo.hold("answer", 12)
    ask(page, "Go on")
    page.wait_for_url("**/chats/*")
    expect(page.locator("#spoken p").first).to_contain_text("The first sentence.")
    expect(page.locator("#spoken")).not_to_contain_text("last")
    demo.release()
    finished(page)
    expect(page.locator("#spoken")).to_contain_text("x = 1")
    told = " ".join(page.locator("#spoken p").all_inner_texts())
    assert re.sub(r"\s+", " ", told) == ("The first sentence. The second one goes on and on. The x^2 comes last x = 1")


CUT_CHOICES = """() => {
    const line = document.createElement("canvas").getContext("2d");
    const shown = [...document.querySelectorAll("#model-settings select")].filter((select) => select.clientWidth);
    return shown.flatMap((select) => {
        const style = getComputedStyle(select);
        line.font = style.font;
        const room = select.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
        return [...select.options].map(({ text }) => text).filter((text) => line.measureText(text).width > room + 1);
    });
}"""
SHOW = "(id) => { const it = document.getElementById(id); it.popover ? it.showPopover() : it.showModal(); }"


@pytest.mark.parametrize("code", [code for code in LANGUAGES if code != "en"])
def test_page_uses_the_browser_language_and_fits_a_phone(
    serve: Serve, open_page: Open, picture: Picture, code: str
) -> None:
    """At a phone's width nothing exceeds the page, however long the words of the language are."""
    said = language_table(code)
    page = open_page(serve(saying("Oui.")).url, locale=code, viewport={"width": 360, "height": 640})
    expect(page.locator("html")).to_have_attribute("lang", code)
    expect(page.locator("#text")).to_have_attribute("placeholder", said["placeholder"])
    attach, send = page.locator(".icon:has(#files)").bounding_box(), page.locator("#composer-action").bounding_box()
    assert attach and send and abs(attach["y"] - send["y"]) < 4, "one row"
    ask(page, "Bonjour")
    page.wait_for_url("**/chats/*")
    finished(page)
    expect(questions(page).locator("h2")).to_have_text(said["you"])
    picture(page)
    for sheet in ("settings", "help", "sidebar", "chat-menu"):
        page.evaluate(SHOW, sheet)
        expect(page.locator(f"#{sheet}")).to_be_visible()
        if sheet == "settings":
            page.locator("#tab-chat").click()
            expect(page.locator("#model-settings form")).to_be_visible()
            assert page.evaluate(CUT_CHOICES) == []
            picture(page, sheet)
        if sheet == "help":
            keys = page.locator("#help [data-keys='Control+K'] kbd")
            assert keys.evaluate_all("(keys) => keys[0].offsetLeft < keys[1].offsetLeft"), "from left to right"
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.keyboard.press("Escape")


def test_selected_language_is_kept_after_reload(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(saying("Yes.")).url, locale="fr-FR")
    show_settings(page)
    page.locator("#text").evaluate("(input) => { input.value = 'kept'; input.dispatchEvent(new Event('input')) }")
    page.get_by_label(language_table("fr")["language"]).select_option("de")
    expect(page.locator("html")).to_have_attribute("lang", "de")
    expect(page.get_by_role("link", name=language_table("de")["new_chat"])).to_be_visible()
    expect(page.locator("#text")).to_have_value("kept")
    page.reload()
    expect(page.locator("html")).to_have_attribute("lang", "de")
    assert last_answer(page).count() == 0
