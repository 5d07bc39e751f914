"""Chatting in a real browser with the real engine and the demo model."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import answers, ask, begin, finished, last_answer, questions, until
from browser.demo_engine import DemoEngine
from browser.wire import Wire
from playwright.sync_api import Page, expect

from notso.smollm3 import Engine
from notso.web.values.wording import words

LONG = "Count to 50"
"""The demo model answers this with more than a thousand numbers."""

HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""

RECORD_GROWTH = """addEventListener("DOMContentLoaded", () => {
    window.lengths = [];
    const look = () => {
        const texts = [...document.querySelectorAll(".assistant .prose")].map((prose) => prose.textContent.trim());
        const length = texts.join("").length;
        if (length && length !== lengths.at(-1)) lengths.push(length);
    };
    new MutationObserver(look).observe(document.getElementById("turns"), { childList: true, subtree: true });
});"""

Serve = Callable[..., Any]
Open = Callable[..., Page]
Picture = Callable[..., None]


@pytest.mark.parametrize("awaited", ["notification", "queue"])
def test_awaited_answer_ends_in_the_background(serve: Serve, open_page: Open, demo: DemoEngine, awaited: str) -> None:
    page = open_page(serve(demo.load).url)
    page.context.add_init_script("""
        window.notes = [];
        window.Notification = class { constructor(title) { notes.push(title); } static permission = "granted"; };
    """)
    demo.hold("thinking", 3)
    ask(page, "What is 27 + 48?")
    page.wait_for_url("**/chats/*")
    expect(page.locator("#status-label")).to_have_text("Thinking")
    if awaited == "queue":
        ask(page, "What is 1 + 2?")
    else:
        page.evaluate("document.documentElement.dataset.notify = 'on'")
    page.evaluate(HIDE, True)
    demo.release()
    finished(page, 2 if awaited == "queue" else 1)
    assert page.evaluate("notes") == ([] if awaited == "queue" else ["What is 27 + 48?"])


def test_streamed_answer_is_unchanged_after_reload(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    page.context.add_init_script(RECORD_GROWTH)
    expect(page.get_by_text("Demo model", exact=True)).to_be_visible()
    expect(page.get_by_text("The model runs without any cloud service.")).to_be_visible()
    picture(page, "greeting", dark=True)
    demo.hold("thinking", 3)
    ask(page, "What is 27 + 48?")
    page.wait_for_url("**/chats/*")
    expect(questions(page)).to_have_text(re.compile("What is 27"))
    for pieces, (part, tokens) in enumerate((("thinking", 12), ("answer", 2), ("answer", 6)), start=1):
        until(page, "pieces => window.lengths?.length >= pieces", pieces)
        demo.hold(part, tokens)
    demo.release()
    finished(page)
    assert len(page.evaluate("lengths")) > 3, "it arrived in pieces"
    panel = last_answer(page).locator("details.reasoning")
    expect(panel).to_be_visible()
    expect(panel).not_to_have_attribute("open", "")
    expect(panel.locator("summary")).to_contain_text(re.compile("Reasoning|Thought"))
    answer = last_answer(page).locator(".answer").inner_text()
    assert "27 + 48 = " in answer
    panel.locator("summary").click()
    expect(panel.locator(".reasoning-text")).to_contain_text("ones:")
    thoughts = panel.locator(".reasoning-text").inner_text()
    picture(page, "answer", dark=True)
    page.reload()
    assert last_answer(page).locator(".answer").inner_text() == answer
    expect(panel).not_to_have_attribute("open", "")
    assert "<think>" not in answer + thoughts
    expect(page.locator("#status-label")).to_have_text("Ready")
    expect(page.locator("#sidebar").get_by_role("link", name="What is 27 + 48?")).to_be_visible()
    ask(page, "Thank you")
    finished(page, 2)
    assert page.evaluate("document.activeElement.id") == "text"


def test_reasoning_panel_is_open_while_thinking_and_then_collapses(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("thinking", 12)
    ask(page, "What is 27 + 48?")
    panel = last_answer(page).locator("details.reasoning")
    expect(panel.locator("summary")).to_have_text(re.compile(r"Thinking, \d+ s, \d+ tokens"))
    expect(panel.locator(".reasoning-text")).to_contain_text("27 + 48")
    expect(page.locator("#status-label")).to_contain_text("Thinking")
    expect(page.locator("#announcer")).to_have_text("Thinking")
    expect(page.locator("#turns [aria-busy=true]")).to_have_count(1)
    picture(page, dark=True)
    demo.release()
    finished(page)
    expect(last_answer(page).locator(".answer")).to_contain_text("27 + 48 =")
    expect(panel.locator(".reasoning-text")).to_be_hidden()
    expect(page.locator("#announcer")).to_have_text(re.compile(r"^Answer finished, \d+ words$"))
    expect(panel.locator("summary")).to_have_text(re.compile(r"^\s*(Thought|Reasoning).*, \d+ tokens\s*$"))
    expect(page.locator("#turns [aria-busy=true]")).to_have_count(0)


def test_toggled_reasoning_panel_keeps_its_state(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    with demo.held("thinking"):
        ask(page, "What is 27 + 48?")
        last_answer(page).locator(".reasoning-text").click()
    finished(page)
    expect(last_answer(page).locator(".reasoning-text")).to_be_visible()
    with demo.held("thinking"):
        ask(page, "What is 12 + 13?")
        expect(answers(page)).to_have_count(2)
        expect(last_answer(page).locator(".reasoning-text")).to_be_visible()
        last_answer(page).locator(".reasoning summary").click()
        expect(last_answer(page).locator(".reasoning-text")).to_be_hidden()
    finished(page, 2)
    expect(last_answer(page).locator(".reasoning-text")).to_be_hidden()
    expect(answers(page).first.locator(".reasoning-text")).to_be_visible()


@pytest.mark.parametrize("by", [None, "touch", "keyboard"])
def test_reasoning_that_was_scrolled_stays_open(
    serve: Serve, open_page: Open, demo: DemoEngine, by: str | None
) -> None:
    page = open_page(serve(demo.load).url, has_touch=True)
    demo.dictate("Done.", "A thought.\n\n" * 100)
    demo.hold("thinking", 200)
    page.locator("#text").fill("Think")
    page.locator("#composer-action").click()  # on a touch keyboard, Enter inserts a line break
    page.wait_for_url("**/chats/*")
    until(page, "() => document.querySelectorAll('.reasoning-text p').length > 30")
    text = last_answer(page).locator(".reasoning-text")
    if by == "touch":
        box = text.bounding_box()
        assert box is not None
        finger = page.context.new_cdp_session(page)
        for kind, down in (("touchStart", 20), ("touchMove", 60), ("touchMove", 120), ("touchEnd", None)):
            points = [] if down is None else [{"x": box["x"] + 40, "y": box["y"] + down}]
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    elif by == "keyboard":
        for _ in range(100):  # a press may have no effect while the text grows
            text.press("PageUp")
            if text.evaluate("text => text.scrollTop < 0"):
                break
    if by:
        until(page, "() => document.querySelector('.reasoning-text').scrollTop < 0")
    demo.release()
    finished(page)
    expect(text).to_be_visible(visible=by is not None)


def test_reload_during_an_answer_continues_without_duplicates(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("thinking", 10)
    ask(page, "What is 27 + 48?")
    for _ in range(2):
        expect(last_answer(page).locator(".reasoning-text")).to_contain_text("27 + 48")
        page.reload()
        expect(page.locator("#status-label")).to_contain_text("Thinking")
    expect(last_answer(page).locator(".reasoning-text")).to_be_visible()
    demo.hold("answer", 3)
    expect(last_answer(page).locator(".answer")).to_contain_text("27")
    page.reload()
    expect(last_answer(page).locator(".answer")).to_contain_text("27")
    demo.release()
    finished(page)
    last_answer(page).locator(".reasoning summary").click()
    seen = (
        last_answer(page).locator(".reasoning-text").text_content(),
        last_answer(page).locator(".answer").text_content(),
    )
    assert seen[0].count("result:") == 1 and seen[1].count("27 + 48 =") == 1
    page.reload()
    last_answer(page).locator(".reasoning summary").click()
    assert seen == (
        last_answer(page).locator(".reasoning-text").text_content(),
        last_answer(page).locator(".answer").text_content(),
    )


def test_stop_in_one_tab_stops_the_answer_in_both(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    first = open_page(serve(demo.load).url)
    demo.pace_s = 0.03
    # a separate browser context, because six streams would use all connections of one
    elsewhere = open_page(first.url, like=first)
    ask(elsewhere, LONG)
    elsewhere.wait_for_url("**/chats/*")
    ask(first, LONG)
    first.wait_for_url("**/chats/*")
    second = open_page(first.url, like=first)
    for page in (first, second):
        expect(last_answer(page).locator(".answer")).to_contain_text("1, 2, 3, 4")
    demo.hold_all()
    ask(second, "Not now")  # queued until the answer ends
    expect(second.locator("#queued .what")).to_have_text(["Not now"])
    second.get_by_role("button", name="Stop").click()
    for page in (first, second):
        finished(page, state="stopped")
        expect(last_answer(page)).to_contain_text("Stopped.")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator("#status-label")).to_have_text("Stopped")
        expect(page.locator("#announcer")).to_have_text("Stopped")
    assert last_answer(first).locator(".answer").inner_text() == last_answer(second).locator(".answer").inner_text()
    expect(second.locator("#text")).to_have_value("Not now")  # returned to the input, because the answer was stopped
    assert len(demo.prompts) == 2
    expect(elsewhere.locator("#chat-list .chats > li")).to_have_count(2)
    elsewhere.get_by_role("button", name="Stop").click()
    finished(elsewhere, state="stopped")


def test_rejected_message_stays_in_the_input(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    first = open_page(serve(demo.load).url)
    begin(first)
    second = open_page(
        first.url, like=first, expected="status of 409|response:error|htmx:sse:error|ERR_FAILED|Failed to fetch"
    )
    second.route("**/feed?*", lambda route: route.abort())  # this tab is not notified of the other tab's messages
    second.reload()
    demo.hold_all()
    ask(first, "Another")
    expect(questions(first)).to_have_count(2)
    ask(second, "At the same time")
    expect(second.locator("#composer-problem")).to_contain_text("still being generated")
    assert second.locator("#text").input_value() == "At the same time"
    expect(questions(second)).to_have_count(1)
    demo.release()
    finished(first, 2)
    second.locator("#text").press("Enter")
    expect(second.locator("#composer-problem")).to_contain_text("another tab")
    expect(questions(second)).to_have_count(1)
    second.get_by_role("link", name="Show new messages").click()
    expect(questions(second)).to_have_count(2)
    second.locator("#text").press("Enter")
    expect(questions(second).last).to_contain_text("At the same time")
    expect(second.locator("#composer-problem")).to_be_empty()


def test_enter_sends_shift_enter_breaks_line_and_escape_stops(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("thinking")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#text").input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    expect(page.locator("article.user .bubble")).to_have_text("one\ntwo", use_inner_text=True)
    expect(page.locator("#status-label")).to_contain_text("Thinking")
    page.keyboard.press("Escape")
    finished(page, state="stopped")
    page.keyboard.press("Enter")
    expect(questions(page)).to_have_count(1)  # the input is empty, so nothing is sent


def test_answer_is_resumed_after_server_restart(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    server = serve(demo.load, drain_seconds=0.2)
    page = open_page(server.url, expected=r"htmx:sse:error|ERR_CONNECTION|ERR_INCOMPLETE|status of 404")
    demo.hold("answer", 20)
    ask(page, LONG)
    expect(last_answer(page).locator(".answer")).to_contain_text("1, 2, 3")
    server.close()
    demo.release()
    serve(demo.load, port=server.port)
    expect(last_answer(page).locator(".answer")).to_contain_text("1, 2, 3")
    finished(page)  # the answer was resumed without a request
    ask(page, "Hello")
    finished(page, 2)


def test_hidden_tab_disconnects_and_catches_up_when_shown(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("answer", 10)
    ask(page, "Tell me a story")
    expect(last_answer(page).locator(".answer")).to_contain_text("Once")
    page.evaluate(HIDE, True)
    page.wait_for_timeout(300)
    shown = last_answer(page).locator(".answer").inner_text()
    demo.hold("answer", 60)
    demo.reached()
    page.wait_for_timeout(400)
    assert last_answer(page).locator(".answer").inner_text() == shown, "a hidden tab holds no connection"
    page.evaluate(HIDE, False)
    demo.release()
    finished(page)
    before = last_answer(page).locator(".answer").inner_text()
    assert before.startswith(shown) and "The end." in before
    page.reload()
    assert last_answer(page).locator(".answer").inner_text() == before


def test_unreachable_server_is_reported_and_text_kept(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    server = serve(demo.load)
    page = open_page(server.url, expected="Failed to fetch|ERR_CONNECTION")
    begin(page)
    server.close()
    ask(page, "Are you there?")
    expect(page.locator("#composer-problem")).to_contain_text("Not sent")
    assert page.locator("#text").input_value() == "Are you there?"
    serve(demo.load, port=server.port)
    page.locator("#text").press("Enter")
    finished(page, 2)
    expect(page.locator("#composer-problem")).to_be_empty()


def test_page_opens_and_queues_a_question_while_model_loads(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    gate = threading.Event()

    def load() -> Engine:
        assert gate.wait(120)
        return demo.load()

    page = open_page(serve(load).url)
    expect(page.locator("#status-label")).to_have_text("Loading model")
    expect(page.locator("#banner")).to_have_text("")
    ask(page, "Already here")
    page.wait_for_url("**/chats/*")
    expect(page.locator("#status-label")).to_have_text("Loading model")
    picture(page)
    gate.set()
    finished(page)
    expect(page.locator("#banner")).to_contain_text("Demo model")


def test_chat_works_without_scripts(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, java_script_enabled=False)
    page.locator("#text").fill("What is 27 + 48?")
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/chats/*")
    for _ in range(400):
        if page.locator("article.assistant[data-state=done]").count():
            break
        page.wait_for_timeout(50)
        page.reload()
    expect(last_answer(page).locator(".answer")).to_contain_text("27 + 48 =")
    page.locator("details.reasoning summary").click()
    expect(last_answer(page).locator(".reasoning-text")).to_contain_text("result:")


def test_chat_can_be_renamed_deleted_and_restored(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url, expected="404 .*/turns")  # a request sent just before the chat was deleted
    page.get_by_role("button", name="What can you do?").click()
    finished(page)
    page.get_by_role("button", name="Chat menu").click()
    picture(page, "menu")
    page.locator("#chat-menu").get_by_label("Title").fill("A new name")
    page.locator("#chat-menu").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", name="A new name")).to_be_visible()
    expect(page.locator("#chat-list")).to_contain_text("A new name")
    page.get_by_role("button", name="Chat menu").click()
    page.locator("#chat-menu").get_by_text(words["delete"]).click()
    expect(page.locator("#sidebar")).to_contain_text("Your chats will appear here.")
    picture(page, "undo")
    page.locator("#toasts").get_by_role("button", name="Undo").click()
    expect(page.get_by_role("heading", name="A new name")).to_be_visible()
    finished(page)


def test_thinking_switch_is_saved_per_chat(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    begin(page)
    with page.expect_response("**/thinking") as answered:
        page.get_by_role("switch", name="Thinking").locator("..").click()
    assert answered.value.status == 204
    page.reload()
    expect(page.get_by_role("switch", name="Thinking")).not_to_be_checked()
    ask(page, "Again")
    finished(page, 2)
    expect(last_answer(page).locator("details.reasoning")).to_be_hidden()
    asked = [prompt for prompt in demo.prompts if "Suggest three" not in prompt]
    assert ["/no_think" in prompt for prompt in asked] == [False, True]


LOST = "ERR_(INTERNET|NETWORK|EMPTY|CONNECTION|CONTENT_LENGTH|INCOMPLETE|SOCKET)|htmx:sse:error|Failed to fetch"


@pytest.mark.parametrize("part", ["thinking", "answer"])
def test_broken_connection_is_resumed_without_gaps_or_duplicates(
    serve: Serve, open_page: Open, demo: DemoEngine, part: str
) -> None:
    """All connections are cut while the answer continues; the missed part arrives exactly once."""
    wire = Wire(serve(demo.load).port)
    page = open_page(wire.url, expected=LOST)
    demo.hold(part, 6)
    ask(page, "Tell me a story")
    shown = last_answer(page).locator(".reasoning-text" if part == "thinking" else ".answer")
    expect(shown).to_contain_text("The user" if part == "thinking" else "Once")
    wire.cut()
    expect(page.locator("#status .reconnecting")).to_be_visible()
    demo.hold("answer", 40)
    demo.reached()
    wire.mend()
    expect(last_answer(page).locator(".answer")).to_contain_text("Every morning")
    demo.release()
    finished(page)
    text = last_answer(page).locator(".answer").text_content()
    assert text.count("Once there was") == 1 and text.count("The end.") == 1
    page.reload()
    assert last_answer(page).locator(".answer").text_content() == text
    wire.close()


def test_answer_finished_while_offline_is_completed_when_online(
    serve: Serve, open_page: Open, demo: DemoEngine
) -> None:
    """The stream may still deliver the end while offline; what it triggers must be fetched once the network is back."""
    page = open_page(serve(demo.load).url, expected=LOST + "|htmx:error")
    demo.hold("answer", 6)
    ask(page, "Tell me a story")
    expect(last_answer(page).locator(".answer")).to_contain_text("Once")
    page.context.set_offline(True)
    demo.release()
    expect(last_answer(page).locator(".answer")).to_contain_text("The end.")
    page.context.set_offline(False)
    finished(page)
    assert (last_answer(page).locator(".answer").text_content() or "").count("Once there was") == 1
