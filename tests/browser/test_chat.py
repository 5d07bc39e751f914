"""The chat as a person meets it, in a real browser."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from notso.smollm3 import Engine, Event
from notso.web.scripted_engine import Script, ScriptedEngine, say

THOUGHTS = "They ask me something.\n\nI will answer with a list.\n\n" * 3
ANSWER = "Here is **one** answer:\n\n- first\n- second\n\n```python\nx = 1\n```\n\nAnd that is all of it.\n"

NUMBERS = "\n\n".join(f"number {number}" for number in range(1, 70))
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


def script(messages: Any, thinking: bool) -> Any:
    return say(ANSWER, THOUGHTS if thinking else "", piece=4)


def ask(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def last_answer(page: Page) -> Any:
    return page.locator("article.assistant").last


def held(release: threading.Event) -> Script:
    """Thinks, and answers only once released."""

    def script(messages: Any, thinking: bool) -> Iterator[Event]:
        yield from say("", THOUGHTS)
        assert release.wait(60)
        yield from say(ANSWER)

    return script


@pytest.mark.parametrize("kind", ["scripted", "demo"])
def test_open_ask_watch_reload(serve: Serve, open_page: Open, kind: str) -> None:
    server = serve(Engine.load if kind == "demo" else ScriptedEngine(script, pace_seconds=0.03))
    page = open_page(server.url)
    page.context.add_init_script(RECORD_GROWTH)
    expect(page.get_by_text("Demo model.")).to_be_visible(timeout=20_000)
    ask(page, "What is 27 + 48?")
    page.wait_for_url("**/chats/*")
    expect(page.locator("article.user")).to_have_text(re.compile("What is 27"))
    expect(last_answer(page)).to_have_attribute("data-state", "done", timeout=60_000)
    lengths = page.evaluate("lengths")
    assert len(lengths) > (3 if kind == "scripted" else 0), "it arrived in pieces"  # the demo model is done at once
    panel = last_answer(page).locator("details.reasoning")
    expect(panel).to_be_visible()
    expect(panel).not_to_have_attribute("open", "")
    expect(panel.locator("summary")).to_contain_text("Thought")
    answer = last_answer(page).locator(".answer").inner_text()
    assert answer.strip()
    panel.locator("summary").click()
    thoughts = panel.locator(".thoughts").inner_text()
    assert thoughts.strip()
    page.reload()
    assert last_answer(page).locator(".answer").inner_text() == answer
    expect(last_answer(page).locator("details.reasoning")).not_to_have_attribute("open", "")
    assert "<think>" not in answer + thoughts
    expect(page.locator("#status-label")).to_have_text("Idle")
    expect(page.locator("#sidebar").get_by_role("link", name="What is 27 + 48?")).to_be_visible()
    ask(page, "Thank you")
    expect(page.locator("article.assistant[data-state=done]")).to_have_count(2, timeout=20_000)
    assert page.evaluate("document.activeElement.id") == "text"


def test_thinking_is_open_while_it_runs_and_folds_at_its_end(serve: Serve, open_page: Open) -> None:
    release = threading.Event()
    page = open_page(serve(ScriptedEngine(held(release))).url)
    ask(page, "Hello")
    panel = last_answer(page).locator("details.reasoning")
    expect(panel.locator("summary")).to_contain_text("Thinking")
    expect(panel.locator(".thoughts")).to_be_visible()
    expect(page.locator("#status-label")).to_contain_text("Thinking")
    release.set()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    expect(last_answer(page).locator(".answer")).to_contain_text("Here is one")
    expect(panel.locator(".thoughts")).to_be_hidden()
    expect(page.locator("#announcer")).to_have_text("Answer ready")


def test_a_touched_panel_is_left_alone(serve: Serve, open_page: Open) -> None:
    release = threading.Event()
    page = open_page(serve(ScriptedEngine(held(release))).url)
    ask(page, "Hello")
    last_answer(page).locator(".thoughts").click()
    release.set()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    expect(last_answer(page).locator(".thoughts")).to_be_visible()
    release.clear()
    ask(page, "Again")
    expect(page.locator("article.assistant")).to_have_count(2)
    expect(last_answer(page).locator(".thoughts")).to_be_visible()
    last_answer(page).locator("summary").click()
    expect(last_answer(page).locator(".thoughts")).to_be_hidden()
    release.set()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    expect(last_answer(page).locator(".thoughts")).to_be_hidden()
    expect(page.locator("article.assistant").first.locator(".thoughts")).to_be_visible()


def test_reload_while_it_writes_continues_and_doubles_nothing(serve: Serve, open_page: Open) -> None:
    release = threading.Event()
    page = open_page(serve(ScriptedEngine(held(release), pace_seconds=0.01)).url)
    ask(page, "Hello")
    for _ in range(2):
        expect(last_answer(page).locator(".thoughts")).to_contain_text("They ask")
        page.reload()
    release.set()
    expect(last_answer(page).locator(".answer")).to_contain_text("Here is one")
    page.reload()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    assert last_answer(page).locator(".answer").text_content().count("Here is one answer") == 1
    assert last_answer(page).locator(".thoughts p").count() == 6
    assert last_answer(page).locator("li").count() == 2


def test_two_tabs_see_the_same_and_one_stops_both(serve: Serve, open_page: Open) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 2000, piece=5), pace_seconds=0.02)
    first = open_page(serve(engine).url)
    ask(first, "Hello")
    first.wait_for_url("**/chats/*")
    second = open_page(first.url, like=first)
    for page in (first, second):
        expect(last_answer(page).locator(".answer")).to_contain_text("word word word")
    ask(second, "Not now")  # Enter does nothing while the answer runs: the text stays
    assert second.locator("#text").input_value() == "Not now"
    second.get_by_role("button", name="Stop").click()
    for page in (first, second):
        expect(last_answer(page)).to_have_attribute("data-state", "stopped")
        expect(last_answer(page)).to_contain_text("Stopped here.")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator("#status-label")).to_have_text("Idle")
    assert last_answer(first).locator(".answer").inner_text() == last_answer(second).locator(".answer").inner_text()
    assert len(engine.requests) == 1


def test_a_refused_message_stays_in_the_input(serve: Serve, open_page: Open) -> None:
    engine = ScriptedEngine(script)
    first = open_page(serve(engine).url)
    ask(first, "Hello")
    expect(last_answer(first)).to_have_attribute("data-state", "done")
    second = open_page(
        first.url, like=first, expected="status of 409|response:error|htmx:sse:error|ERR_FAILED|Failed to fetch"
    )
    second.route("**/feed?*", lambda route: route.abort())  # it does not hear of the first one's doings
    second.reload()
    engine.gate.clear()
    ask(first, "Another")
    expect(first.locator("article.user")).to_have_count(2)
    ask(second, "At the same time")
    expect(second.locator("#composer-problem")).to_contain_text("still being written")
    assert second.locator("#text").input_value() == "At the same time"
    expect(second.locator("article.user")).to_have_count(1)
    engine.gate.set()
    expect(last_answer(first)).to_have_attribute("data-state", "done")
    second.locator("#text").press("Enter")
    expect(second.locator("article.user").last).to_contain_text("At the same time")
    expect(second.locator("#composer-problem")).to_be_empty()


def test_keys(serve: Serve, open_page: Open) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 2000, piece=5), pace_seconds=0.02)
    page = open_page(serve(engine).url)
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#text").input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    expect(page.locator("article.user .bubble")).to_have_text("one\ntwo", use_inner_text=True)
    expect(last_answer(page).locator(".answer")).to_contain_text("word")
    page.keyboard.press("Escape")
    expect(last_answer(page)).to_have_attribute("data-state", "stopped")
    page.keyboard.press("Enter")
    expect(page.locator("article.user")).to_have_count(1)  # nothing was typed, nothing is sent


def test_a_server_that_goes_and_comes_back(serve: Serve, open_page: Open) -> None:
    endless = lambda messages, thinking: say("word " * 3000, piece=5)  # noqa: E731
    server = serve(ScriptedEngine(endless, pace_seconds=0.02))
    page = open_page(server.url, expected=r"htmx:sse:error|ERR_CONNECTION|ERR_INCOMPLETE|status of 404")
    ask(page, "Hello")
    expect(last_answer(page).locator(".answer")).to_contain_text("word word")
    server.close()
    serve(ScriptedEngine(script), port=server.port)
    page.wait_for_timeout(300)
    expect(last_answer(page)).to_have_attribute("data-state", "interrupted")
    expect(last_answer(page)).to_contain_text("The server stopped")
    ask(page, "Go on")
    expect(page.locator("article.assistant[data-state=done]")).to_have_count(1)


def test_a_hidden_tab_lets_go_and_catches_up(serve: Serve, open_page: Open) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say(NUMBERS, piece=6), pace_seconds=0.02)
    server = serve(engine)
    page = open_page(server.url)
    ask(page, "Count")
    expect(last_answer(page).locator(".answer")).to_contain_text("number 3")
    page.evaluate(HIDE, True)
    page.wait_for_timeout(300)
    shown = last_answer(page).locator(".answer").inner_text()
    page.wait_for_timeout(600)
    assert last_answer(page).locator(".answer").inner_text() == shown, "a hidden tab holds no connection"
    page.evaluate(HIDE, False)
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    before = last_answer(page).locator(".answer").inner_text()
    page.reload()
    assert last_answer(page).locator(".answer").inner_text() == before
    assert before.split() == NUMBERS.split()


def test_a_server_that_does_not_answer_is_told(serve: Serve, open_page: Open) -> None:
    server = serve(ScriptedEngine(script))
    page = open_page(server.url, expected="Failed to fetch|ERR_CONNECTION")
    ask(page, "Hello")
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    server.close()
    ask(page, "Are you there?")
    expect(page.locator("#composer-problem")).to_contain_text("Not sent")
    assert page.locator("#text").input_value() == "Are you there?"
    serve(ScriptedEngine(script), port=server.port)
    page.locator("#text").press("Enter")
    expect(page.locator("article.assistant[data-state=done]")).to_have_count(2)
    expect(page.locator("#composer-problem")).to_be_empty()


def test_the_page_opens_before_the_model_is_there(serve: Serve, open_page: Open) -> None:
    gate = threading.Event()

    def load() -> ScriptedEngine:
        assert gate.wait(20)
        return ScriptedEngine(script)

    page = open_page(serve(load).url)
    expect(page.locator("#status-label")).to_have_text("Loading")
    expect(page.locator("#banner")).to_have_text("")
    ask(page, "Already here")
    page.wait_for_url("**/chats/*")
    expect(page.locator("#status-label")).to_have_text("Loading")
    gate.set()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    expect(page.locator("#banner")).to_contain_text("Demo model.")


def test_without_scripts(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(script)).url, java_script_enabled=False)
    page.locator("#text").fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/chats/*")
    for _ in range(50):
        if page.locator("article.assistant[data-state=done]").count():
            break
        page.wait_for_timeout(50)
        page.reload()
    expect(last_answer(page).locator(".answer")).to_contain_text("And that is all of it.")
    page.locator("details.reasoning summary").click()
    expect(last_answer(page).locator(".thoughts")).to_contain_text("They ask me something.")


def test_rename_and_delete(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(script)).url)
    page.get_by_role("button", name="What can you do?").click()
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    page.get_by_role("button", name="Chat menu").click()
    page.get_by_label("Title").fill("A new name")
    page.get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", name="A new name")).to_be_visible()
    page.get_by_role("button", name="Chat menu").click()
    page.locator("#chat-menu").get_by_text("Delete this chat").click()
    expect(page.locator("#sidebar")).to_contain_text("Your chats will be listed here.")
    page.locator("#toasts").get_by_role("button", name="Undo").click()
    expect(page.get_by_role("heading", name="A new name")).to_be_visible()
    expect(last_answer(page)).to_have_attribute("data-state", "done")


def test_the_toggle_holds_per_chat(serve: Serve, open_page: Open) -> None:
    engine = ScriptedEngine(script)
    page = open_page(serve(engine).url)
    ask(page, "Hello")
    expect(last_answer(page)).to_have_attribute("data-state", "done")
    with page.expect_response("**/thinking") as answered:
        page.get_by_role("switch", name="Thinking").locator("..").click()
    assert answered.value.status == 204
    page.reload()
    expect(page.get_by_role("switch", name="Thinking")).not_to_be_checked()
    ask(page, "Again")
    expect(page.locator("article.assistant[data-state=done]")).to_have_count(2)
    expect(last_answer(page).locator("details.reasoning")).to_be_hidden()
    assert [request.thinking for request in engine.requests] == [True, False]
