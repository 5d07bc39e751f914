"""Versions, editing, writing on, undo, search, and several tabs in step, in a real browser."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from playwright.sync_api import Page, expect

from notso.smollm3 import Event, Message, Progress
from notso.web.chat.suggestions import REQUEST
from notso.web.scripted_engine import ScriptedEngine, say

Serve = Callable[..., Any]
Open = Callable[..., Page]


def numbered() -> Callable[[Sequence[Message], bool], Iterator[Event]]:
    """Answers that differ: each has its number."""
    numbers = itertools.count(1)

    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].content != REQUEST:
            yield from say(f"Answer number {next(numbers)}.")

    return script


def long_answer(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
    """Goes on and on; written on, it comes to an end."""
    if messages[-1].role == "assistant":
        yield from say(" And that was all.", " One more thought." if not messages[-1].content else "")
    else:
        yield from say("word " * 3000, "thought " * 30 if thinking else "", piece=5)


def ask(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def answers(page: Page) -> Any:
    return page.locator("#turns article.assistant")


def questions(page: Page) -> Any:
    return page.locator("#turns article.user")


def begin(page: Page, text: str = "First question") -> None:
    ask(page, text)
    page.wait_for_url("**/chats/*")
    expect(answers(page).last).to_have_attribute("data-state", "done")


def test_regenerate_and_arrows(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page)
    expect(answers(page)).to_contain_text("Answer number 1.")
    answers(page).hover()
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page)).to_contain_text("Answer number 2.")
    expect(answers(page)).to_contain_text("2/2")
    page.get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_contain_text("Answer number 1.")
    expect(answers(page)).to_have_count(1)
    page.reload()
    expect(answers(page)).to_contain_text("Answer number 1.")
    expect(page.get_by_role("button", name="Previous version")).to_be_disabled()
    page.get_by_role("button", name="Next version").click()
    expect(answers(page)).to_contain_text("Answer number 2.")


def test_edit_a_question(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page)
    questions(page).hover()
    questions(page).get_by_role("link", name="Edit").click()
    area = page.locator("#edit-text")
    expect(area).to_have_value("First question")
    page.get_by_role("link", name="Cancel").click()
    expect(questions(page)).to_have_text(re.compile("First question"))
    questions(page).get_by_role("link", name="Edit").click()
    area.fill("A better question")
    page.get_by_role("button", name="Ask again").click()
    expect(questions(page)).to_contain_text("A better question")
    expect(answers(page)).to_contain_text("Answer number 2.")
    expect(answers(page)).to_have_attribute("data-state", "done")
    questions(page).get_by_role("button", name="Previous version").click()
    expect(questions(page)).to_contain_text("First question")
    expect(answers(page)).to_contain_text("Answer number 1.")


def test_an_edit_is_sent_and_left_by_key(serve: Serve, open_page: Open) -> None:
    engine = ScriptedEngine(numbered())
    page = open_page(serve(engine).url)
    begin(page)
    page.keyboard.press("ArrowUp")
    page.locator("#edit-text").fill("Given up")
    page.keyboard.press("Escape")
    expect(page.locator("#edit-text")).to_have_count(0)
    expect(questions(page)).to_contain_text("First question")
    page.locator("#text").press("ArrowUp")
    page.locator("#edit-text").fill("Sent by key")
    page.keyboard.press("Control+Enter")
    expect(questions(page)).to_contain_text("Sent by key")
    expect(answers(page)).to_contain_text("Answer number 2.")
    assert [message.content for message in engine.requests[1].messages if message.role == "user"] == ["Sent by key"]


def test_edit_an_answer(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page)
    answers(page).get_by_role("link", name="Edit").click()
    page.locator("#edit-text").fill("My **own** words.")
    page.get_by_role("button", name="Save").click()
    expect(answers(page)).to_contain_text("My own words.")
    expect(answers(page)).to_contain_text("edited")
    expect(answers(page).locator("strong")).to_have_text("own")


def test_stop_and_continue(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(long_answer, pace_seconds=0.01)).url)
    ask(page, "Go")
    page.wait_for_url("**/chats/*")
    expect(answers(page).locator(".answer")).to_contain_text("word word")
    page.keyboard.press("Escape")
    expect(answers(page)).to_have_attribute("data-state", "stopped")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator(".answer")).to_contain_text("And that was all.")
    expect(answers(page)).to_have_attribute("data-state", "done")
    expect(answers(page).locator(".answer")).to_contain_text("word word")
    expect(answers(page)).to_have_count(1)


def test_a_thought_that_was_stopped_goes_on_or_ends(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(long_answer, pace_seconds=0.05)).url)
    ask(page, "Go")
    page.wait_for_url("**/chats/*")
    expect(answers(page).locator(".thoughts")).to_contain_text("thought thought")
    page.keyboard.press("Escape")
    expect(answers(page)).to_have_attribute("data-state", "stopped")
    expect(page.get_by_role("button", name="Continue thinking")).to_be_visible()
    answers(page).get_by_role("button", name="Answer now").click()
    expect(answers(page).locator(".answer")).to_contain_text("And that was all.")
    expect(answers(page)).to_have_attribute("data-state", "done")


def test_answer_now(serve: Serve, open_page: Open) -> None:
    script = lambda messages, thinking: say("So it is.", "thought " * 500, piece=8)  # noqa: E731
    page = open_page(serve(ScriptedEngine(script, pace_seconds=0.05)).url)
    ask(page, "Go")
    page.wait_for_url("**/chats/*")
    expect(answers(page).locator("summary")).to_contain_text(re.compile(r"Thinking, \d+ s, \d+ tokens"))
    answers(page).get_by_role("button", name="Answer now").click()
    expect(answers(page).locator(".answer")).to_contain_text("So it is.")
    expect(answers(page)).to_have_attribute("data-state", "done")


def test_reading_a_long_prompt_is_told(serve: Serve, open_page: Open) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        for done in range(360, 1400, 40):
            yield Event("progress", progress=Progress(done, 1400, 360, 80.0))
        yield from say("Read.")

    page = open_page(serve(ScriptedEngine(script, pace_seconds=0.25)).url)
    ask(page, "Go")
    page.wait_for_url("**/chats/*")
    expect(page.locator("#status-label")).to_have_text(re.compile(r"Reading prompt \d+ %"))
    expect(answers(page)).to_contain_text(re.compile(r"\d+ of 1,040 new tokens \(360 from cache\), \d+ s left"))
    page.keyboard.press("Escape")
    expect(answers(page)).to_have_attribute("data-state", "stopped")


def test_a_turn_begun_in_one_tab_appears_in_the_other(serve: Serve, open_page: Open) -> None:
    first = open_page(serve(ScriptedEngine(numbered(), pace_seconds=0.02)).url)
    begin(first)
    second = open_page(first.url, like=first)
    second.locator("#text").fill("A draft that stays")
    ask(first, "Second question")
    expect(questions(second)).to_have_count(2)
    for page in (first, second):
        expect(answers(page).last).to_have_attribute("data-state", "done")
        expect(answers(page).last).to_contain_text("Answer number 2.")
        expect(answers(page)).to_have_count(2)
    expect(second.locator("#text")).to_have_value("A draft that stays")
    second.get_by_role("button", name="Answer again").last.click()
    for page in (first, second):
        expect(answers(page).last).to_contain_text("Answer number 3.")
        expect(answers(page).last).to_have_attribute("data-state", "done")
    first.get_by_role("button", name="Previous version").click()
    expect(answers(second).last).to_contain_text("Answer number 2.")


def test_the_list_of_chats_follows(serve: Serve, open_page: Open) -> None:
    server = serve(ScriptedEngine(numbered()))
    first = open_page(server.url)
    second = open_page(server.url, like=first)
    begin(first, "Apples and pears")
    link = second.locator("#chat-list").get_by_role("link", name="Apples and pears")
    expect(link).to_be_visible()
    first.locator("#chat-list li").hover()
    first.locator("#chat-list").get_by_role("button", name="Pin: Apples and pears").click()
    for page in (first, second):
        expect(page.locator("#chat-list")).to_contain_text("Pinned")


def test_delete_and_undo(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page, "To be deleted")
    page.locator("#chat-list li").hover()
    page.locator("#chat-list").get_by_role("button", name="Delete this chat: To be deleted").click()
    page.wait_for_url("**/?undo=*")
    expect(page.locator("#toasts")).to_contain_text("Chat deleted.")
    expect(page.locator("#chat-list")).not_to_contain_text("To be deleted")
    page.get_by_role("button", name="Undo").click()
    page.wait_for_url("**/chats/*")
    expect(answers(page)).to_contain_text("Answer number 1.")


def test_a_chat_deleted_in_another_tab(serve: Serve, open_page: Open) -> None:
    server = serve(ScriptedEngine(long_answer, pace_seconds=0.05))
    page = open_page(server.url, expected="status of 404|response:error")
    ask(page, "Go on")
    page.wait_for_url("**/chats/*")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    other = open_page(server.url, like=page)
    other.locator("#chat-list li").hover()
    other.locator("#chat-list").get_by_role("button", name="Delete this chat: Go on").click()
    expect(page.locator("#turns")).to_contain_text("There is no such chat.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#status-label")).to_have_text("Idle")
    ask(page, "Still here?")
    expect(page.locator("#composer-problem")).to_contain_text("There is no such chat.")
    expect(page.locator("#text")).to_have_value("Still here?")
    other.get_by_role("button", name="Undo").click()
    expect(questions(page)).to_contain_text("Go on")


def test_clear_and_undo(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page)
    page.get_by_role("button", name="Chat menu").click()
    page.get_by_role("button", name="Empty this chat").click()
    expect(answers(page)).to_have_count(0)
    expect(page.locator("#toasts")).to_contain_text("Chat emptied.")
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_contain_text("Answer number 1.")


def test_summarise_and_take_it_out(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page)
    page.get_by_role("button", name="Chat menu").click()
    page.get_by_role("button", name="Summarise older turns").click()
    card = page.locator("article.summary-card")
    expect(card).to_have_attribute("data-state", "done")
    expect(card).to_contain_text("in place of everything above")
    card.get_by_role("button", name="Take the summary out").click()
    expect(card).to_have_count(0)
    expect(answers(page)).to_have_count(1)


def test_search_finds_and_leads_there(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(ScriptedEngine(numbered())).url)
    begin(page, "Where do walruses live?")
    page.get_by_role("button", name="Answer again").click()
    expect(answers(page)).to_contain_text("Answer number 2.")
    expect(answers(page)).to_have_attribute("data-state", "done")
    page.goto(page.url.partition("/chats")[0] + "/")
    page.keyboard.press("Control+k")
    page.locator("#search-text").fill("number 1")
    hit = page.locator("#search-results a").first
    expect(hit.locator("mark").first).to_be_visible()
    hit.click()
    page.wait_for_url("**/chats/*")
    expect(answers(page)).to_contain_text("Answer number 1.")


def test_suggestions_come_when_idle_and_can_be_asked(serve: Serve, open_page: Open) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].content == REQUEST:
            yield from say("1. What is a walrus?\n2. Where is it?\n3. Why?", piece=50)
        else:
            yield from say("An answer.")

    page = open_page(serve(ScriptedEngine(script)).url)
    ask(page, "Hello")
    page.wait_for_url("**/chats/*")
    chips = page.locator("#suggestions button")
    expect(chips).to_have_count(3)
    chips.first.click()
    expect(questions(page).last).to_contain_text("What is a walrus?")
    expect(answers(page)).to_have_count(2)
