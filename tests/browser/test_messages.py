"""Operations on questions and answers, with the real engine, and how messages look."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from browser.conversation import answers, ask, begin, finished, last_answer, more, questions
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect

from notso.web.values.wording import words

Serve = Callable[..., Any]
Open = Callable[..., Page]
Picture = Callable[..., None]

HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""

CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}


@pytest.fixture
def numbered(demo: DemoEngine) -> DemoEngine:
    """Let each answer contain its number, so that all differ."""
    for number in range(1, 9):
        demo.dictate(f"Answer number {number}.")
    return demo


def test_regenerated_versions_can_be_switched(
    serve: Serve, open_page: Open, numbered: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page)
    expect(answers(page)).to_contain_text("Answer number 1.")
    answers(page).hover()
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(page)).to_contain_text("Answer number 2.")
    expect(answers(page)).to_contain_text("2/2")
    finished(page)
    picture(page)
    page.get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_contain_text("Answer number 1.")
    expect(answers(page)).to_have_count(1)
    page.reload()
    expect(answers(page)).to_contain_text("Answer number 1.")
    expect(page.get_by_role("button", name="Previous version")).to_be_disabled()
    page.get_by_role("button", name="Next version").click()
    expect(answers(page)).to_contain_text("Answer number 2.")


def test_demo_model_regenerates_an_answer(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    begin(page, "What is 27 + 48?")
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(page)).to_contain_text("2/2")
    finished(page)
    expect(answers(page).locator(".answer")).to_contain_text("27 + 48 =")


def test_edited_question_becomes_a_new_version(
    serve: Serve, open_page: Open, numbered: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page, "First question")
    questions(page).locator(".bubble").hover()
    questions(page).get_by_role("link", name="Edit").click()
    area = page.locator("#edit-text")
    expect(area).to_have_value("First question")
    picture(page)
    page.get_by_role("link", name="Cancel").click()
    expect(questions(page)).to_have_text(re.compile("First question"))
    questions(page).get_by_role("link", name="Edit").click()
    area.fill("A better question")
    page.get_by_role("button", name=words["edit_send"]).click()
    expect(questions(page)).to_contain_text("A better question")
    expect(answers(page)).to_contain_text("Answer number 2.")
    finished(page)
    questions(page).get_by_role("button", name="Previous version").click()
    expect(questions(page)).to_contain_text("First question")
    expect(answers(page)).to_contain_text("Answer number 1.")


def test_edit_can_be_sent_and_cancelled_by_keyboard(serve: Serve, open_page: Open, numbered: DemoEngine) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page, "First question")
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
    asked = [prompt for prompt in numbered.prompts if "Suggest three" not in prompt]
    assert "Sent by key" in asked[1] and "First question" not in asked[1]


def test_edited_answer_is_marked_and_used_in_the_prompt(serve: Serve, open_page: Open, numbered: DemoEngine) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page)
    more(answers(page)).get_by_role("link", name="Edit").click()
    page.locator("#edit-text").fill("My **own** words.")
    page.get_by_role("button", name="Save").click()
    expect(answers(page)).to_contain_text("My own words.")
    expect(answers(page)).to_contain_text("edited")
    expect(answers(page).locator("strong")).to_have_text("own")
    ask(page, "What did you say?")
    finished(page, 2)
    assert any("My **own** words." in prompt for prompt in numbered.prompts), "the prompt contains the new text"


@pytest.mark.parametrize("way", ["button", "key"])
def test_stopped_answer_can_be_continued(serve: Serve, open_page: Open, demo: DemoEngine, way: str) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("answer", 20)
    demo.dictate("word " * 3000, "A thought.")
    ask(page, "Go")
    page.wait_for_url("**/chats/*")
    expect(answers(page).locator(".answer")).to_contain_text("word word")
    if way == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    finished(page, state="stopped")
    expect(answers(page)).to_contain_text("Stopped.")
    demo.release()
    demo.dictate("And that was all.")
    if way == "key":
        page.keyboard.press("Control+Shift+Enter")
    else:
        page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator(".answer")).to_contain_text("And that was all.")
    finished(page)
    expect(answers(page).locator(".answer")).to_contain_text("word word")
    assert "word word" in demo.prompts[1].rpartition("assistant")[2], "the answer continues its own text"


def test_double_click_continues_an_answer_once(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, expected="status of 409|response:error")
    demo.dictate("word " * 300)
    with demo.held("answer", 10):
        ask(page, "Go")
        page.wait_for_url("**/chats/*")
        expect(answers(page)).to_contain_text("word word")
        page.get_by_role("button", name="Stop").click()
        finished(page, state="stopped")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("/continue") else None)
    demo.dictate("And that was all.")
    demo.dictate("And more.")
    page.get_by_role("button", name="Continue").dblclick()
    expect(answers(page)).to_contain_text("And that was all.")
    finished(page)
    ask(page, "Still here?")
    finished(page, 2)
    assert len(sent) == 1
    expect(answers(page).first).not_to_contain_text("And more.")


@pytest.mark.parametrize("verb", ["continued", "deleted"])
def test_hidden_tab_shows_what_became_of_its_answer(serve: Serve, open_page: Open, demo: DemoEngine, verb: str) -> None:
    page = open_page(serve(demo.load).url, expected="status of 404|reconnect failed")
    demo.dictate("word " * 3000)
    demo.dictate("And that was all.")
    with demo.held("answer", 10):
        ask(page, "Go")
        page.wait_for_url("**/chats/*")
        expect(answers(page)).to_contain_text("word word")
        page.evaluate(HIDE, True)
        other = open_page(page.url, like=page, expected="status of 404|reconnect failed")
        other.get_by_role("button", name="Stop").click()
        finished(other, state="stopped")
    if verb == "continued":
        other.get_by_role("button", name="Continue").click()
        finished(other)
    else:
        more(answers(other)).get_by_role("button", name=words["delete_message"]).click()
        expect(answers(other)).to_have_count(0)
    page.evaluate(HIDE, False)
    expect(page.locator("[data-stop]")).to_have_count(0)
    expect(answers(page)).to_have_count(1 if verb == "continued" else 0)
    if verb == "continued":
        expect(answers(page)).to_contain_text("And that was all.")
    expect(page.locator("#status.lost")).to_have_count(0)
    ask(page, "Still here?")
    finished(page, 2 if verb == "continued" else 1)


def test_stopped_reasoning_can_be_continued_or_ended(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("Never said.", "thought " * 300)
    with demo.held("thinking", 20):
        ask(page, "Go")
        page.wait_for_url("**/chats/*")
        expect(answers(page).locator(".reasoning-text")).to_contain_text("thought thought")
        page.keyboard.press("Escape")
        finished(page, state="stopped")
    demo.dictate("Never said either.", "and more " * 300)
    with demo.held("thinking", 20):
        answers(page).get_by_role("button", name="Continue thinking").click()
        expect(answers(page).locator(".reasoning-text")).to_contain_text("and more")
        expect(answers(page).locator(".reasoning-text")).to_contain_text("thought thought")
        page.keyboard.press("Escape")
        finished(page, state="stopped")
    demo.dictate("And that was all.", "One more thought.")
    answers(page).get_by_role("button", name=words["answer_now"]).click()
    expect(answers(page).locator(".answer")).to_contain_text("And that was all.")
    finished(page)


def test_messages_are_copied_as_source_text(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, **CLIPBOARD)
    begin(page, "Show me some Markdown")
    for turn, said in ((questions(page), "Show me some Markdown"), (answers(page), "## ")):
        turn.locator(".bubble, .answer").first.hover()
        turn.get_by_role("button", name="Copy").click()
        expect(turn.locator("[data-copy]")).to_have_attribute("data-done", "")
        expect(page.locator("#announcer")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()").startswith(said)
    with page.context.expect_page() as opened:
        more(answers(page)).get_by_role("link", name=words["raw"]).click()
    assert "## " in (opened.value.locator("body").text_content() or "")


def test_tables_lists_and_formulas_of_the_model_are_rendered(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    """The demo model writes these structures when it is asked for them."""
    page = open_page(serve(demo.load).url)
    begin(page, "Write a table")
    expect(last_answer(page).locator("table th")).to_have_text(["number", "square"])
    expect(last_answer(page).locator("tbody tr")).not_to_have_count(0)
    ask(page, "Write a formula")
    finished(page, 2)
    expect(last_answer(page).locator(".katex math")).not_to_have_count(0)
    ask(page, "Show me some Markdown")
    finished(page, 3)
    expect(last_answer(page).locator("strong")).to_have_text("bold")
    expect(last_answer(page).locator("ul li")).not_to_have_count(0)
    expect(last_answer(page).locator("blockquote")).to_be_visible()
    picture(page, dark=True)


def test_code_is_highlighted_when_its_block_closes(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.dictate("```python\ndef f(x):  # comment\n    return 'text', 1\n```\n\n" + "And more words. " * 20)
    with demo.held("answer", 18):
        ask(page, "Code")
        expect(last_answer(page).locator("pre code")).to_contain_text("def f(x)")
        assert last_answer(page).locator("pre code span").count() == 0, "plain while it is open"
    finished(page)
    expect(last_answer(page).locator("pre code .k").first).to_have_text("def")
    colours = page.evaluate(
        "[...new Set([...document.querySelectorAll('pre code span')].map(e => getComputedStyle(e).color))].length"
    )
    assert colours >= 3


def test_tokens_and_speed_are_shown_under_an_answer(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    begin(page, "Tell me a story")
    numbers = last_answer(page).locator(".numbers")
    expect(numbers.locator("summary")).to_have_text(re.compile(r"^\d+ tokens, [\d.,]+ tokens/s$"))
    numbers.locator("summary").click()
    expect(numbers).to_have_text(re.compile(r"prompt: \d+ tokens? in [\d.]+ s, .*first token after", re.DOTALL))
    ask(page, "Thank you")
    finished(page, 2)
    expect(last_answer(page).locator(".numbers")).to_contain_text("cached")


def test_turns_and_versions_are_synchronized_between_tabs(serve: Serve, open_page: Open, numbered: DemoEngine) -> None:
    first = open_page(serve(numbered.load).url)
    begin(first)
    second = open_page(first.url, like=first)
    second.locator("#text").fill("A draft that stays")
    ask(first, "Second question")
    for page in (first, second):
        finished(page, 2)
        expect(questions(page)).to_have_count(2)
        expect(last_answer(page)).to_contain_text("Answer number 2.")
    expect(second.locator("#text")).to_have_value("A draft that stays")
    second.get_by_role("button", name=words["regenerate"]).last.click()
    for page in (first, second):
        expect(last_answer(page)).to_contain_text("Answer number 3.")
        finished(page, 2)
    first.get_by_role("button", name="Previous version").click()
    expect(last_answer(second)).to_contain_text("Answer number 2.")


def test_summary_replaces_messages_and_can_be_removed(
    serve: Serve, open_page: Open, numbered: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page, "A question before the summary")
    page.get_by_role("button", name="Chat menu").click()
    page.get_by_role("button", name=words["menu_summarize"]).click()
    card = page.locator("article.summary-card")
    expect(card).to_have_attribute("data-state", "done")
    expect(card).to_contain_text("instead of the messages above")
    picture(page)
    ask(page, "And then?")
    finished(page, 3)
    read = next(prompt for prompt in numbered.prompts if "And then?" in prompt)
    assert "A question before" not in read and "Answer number 2." in read, "the summary replaces the messages above it"
    card.get_by_role("button", name=words["unsummarize"]).click()
    expect(card).to_have_count(0)
    expect(questions(page).first).to_contain_text("A question before the summary")


def test_each_page_keeps_one_feed_connection(serve: Serve, open_page: Open, numbered: DemoEngine) -> None:
    """Browsers open six connections to a server; a page that kept old ones open would block in the middle of a chat."""
    page = open_page(serve(numbered.load).url)
    begin(page)
    open_feeds: set[Any] = set()
    second = open_page(page.url, like=page)
    for each in (page, second):
        each.on("request", lambda request: open_feeds.add(request) if "/feed?" in request.url else None)
        for end in ("requestfinished", "requestfailed"):
            each.on(end, lambda request: open_feeds.discard(request))
        each.reload()
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(page)).to_contain_text("2/2")
    finished(page)
    for way, shown in 3 * (("version_previous", "1/2"), ("version_next", "2/2")):
        page.get_by_role("button", name=words[way]).click()
        for each in (page, second):
            expect(answers(each)).to_contain_text(shown)
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(second)).to_contain_text("3/3")
    for _ in range(400):
        if len(open_feeds) == 2:
            break
        page.wait_for_timeout(10)
    assert len(open_feeds) == 2, "one for each page"


def test_queued_message_is_not_sent_to_a_search_result_branch(
    serve: Serve, open_page: Open, numbered: DemoEngine
) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page, "An old walrus")
    questions(page).locator(".bubble").hover()
    questions(page).get_by_role("link", name="Edit").click()
    page.locator("#edit-text").fill("A new seal")
    with numbered.held("answer", 1):
        page.get_by_role("button", name=words["edit_send"]).click()
        expect(last_answer(page)).to_have_attribute("aria-busy", "true")
        ask(page, "Where does the seal live?")
        expect(page.locator("#queued .what")).to_have_text("Where does the seal live?")
        chat = page.url
        page.locator("#new-chat").click()
        page.wait_for_url(re.compile(r"/$"))
    expect(page.locator("#chat-list .mark.unread")).to_be_visible()
    page.locator("#sidebar [commandfor=search]").click()
    page.locator("#search-text").fill("walrus")
    page.locator("#search-results a[href*='?at=']").first.click()
    page.wait_for_url("**?at=*")
    expect(questions(page)).to_contain_text("An old walrus")
    expect(page.locator("#text")).to_have_value("Where does the seal live?")
    expect(page.locator("#queued li")).to_have_count(0)
    page.goto(chat)
    expect(questions(page)).to_have_count(1)


def test_reload_keeps_the_branch_started_at_a_search_result(
    serve: Serve, open_page: Open, numbered: DemoEngine
) -> None:
    page = open_page(serve(numbered.load).url)
    begin(page)
    expect(answers(page)).to_contain_text("Answer number 1.")
    finished(page)
    page.locator("#sidebar [commandfor=search]").click()
    page.locator("#search-text").fill("number")
    with page.expect_response("**/estimate"):  # requests that the new page sends on its own
        page.locator("#search-results a[href*='?at=']").first.click()
    expect(page).to_have_url(re.compile(r"\?at="))
    answers(page).hover()
    page.get_by_role("button", name=words["regenerate"]).click()
    expect(answers(page)).to_contain_text("Answer number 2.")
    finished(page)
    expect(page).to_have_url(re.compile(r"/chats/[^?]*$"))
    page.reload()
    expect(answers(page)).to_contain_text("Answer number 2.")


def test_suggestions_appear_when_idle_and_can_be_sent(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(demo.load).url)
    demo.suggestions = "1. What is a walrus?\n2. Where is it?\n3. Why?"
    begin(page)
    chips = page.locator("#suggestions button")
    expect(chips).to_have_count(3)
    picture(page)
    chips.first.click()
    expect(questions(page).last).to_contain_text("What is a walrus?")
    expect(answers(page)).to_have_count(2)
