"""Waiting and limits, with the real engine: queue, prompt processing, thinking budget, status badge and the context's
end."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from browser.conversation import answers, ask, begin, finished, last_answer, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect

Serve = Callable[..., Any]
Open = Callable[..., Page]
Picture = Callable[..., None]


def test_queued_question_shows_its_position_and_can_be_stopped(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    url = serve(lambda: demo.load(max_num_seqs=1)).url
    first = open_page(url)
    demo.pace_s = 0.05
    demo.dictate("word " * 3000)
    ask(first, "Go on for long")
    expect(first.locator("#status-label")).to_have_text("Generating")
    # separate browser contexts, because each has only six connections to a server
    second, third = open_page(url), open_page(url)
    for page, place in ((second, 1), (third, 2)):
        ask(page, "Hello")
        expect(page.locator("#status-label")).to_have_text(f"Queued (#{place})")
    picture(third)
    second.get_by_role("button", name="Stop").click()
    finished(second, state="stopped")
    expect(third.locator("#status-label")).to_have_text("Queued (#1)")
    first.get_by_role("button", name="Stop").click()
    finished(first, state="stopped")
    finished(third)


def test_status_is_queued_while_the_engine_is_busy(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    expect(page.get_by_text("Demo model", exact=True)).to_be_visible()
    demo.hold_all()
    ask(page, "Hello")
    page.wait_for_url("**/chats/*")
    demo.reached()
    expect(page.locator("#status-label")).to_have_text("Queued")
    demo.release()
    finished(page)


def test_progress_of_processing_a_long_prompt_is_shown(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(lambda: demo.load(rows=32)).url)
    begin(page, "Tell me a story")
    demo.pace_s = 0.05
    demo.hold("prefill", 900)
    ask(page, "word " * 1500)
    expect(page.locator("#status-label")).to_have_text(re.compile(r"Processing prompt [1-9]\d?%"))
    expect(last_answer(page)).to_contain_text(
        re.compile(r"[\d,]+ of [1-9][\d,]+ new tokens \(\d+ cached\), about \d+ s left")
    )
    picture(page, dark=True)
    page.get_by_role("button", name="Stop").click()
    finished(page, 2, state="stopped")
    demo.release()


def test_status_badge_opens_details(serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture) -> None:
    page = open_page(serve(demo.load).url)
    begin(page, "Tell me a story")
    page.reload()
    page.locator("#status .badge").click()
    details = page.locator("#status-details")
    for said in ("demo", "4,096", "tokens/s", "Memory", "kernels"):
        expect(details).to_contain_text(re.compile(said, re.IGNORECASE))
    picture(page, dark=True)


def test_reasoning_ends_at_the_thinking_budget(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    begin(page)
    with page.expect_response("**/thinking"):
        page.locator("#budget").select_option("256")
    page.reload()
    expect(page.locator("#budget")).to_have_value("256")
    show_settings(page, "model")
    page.locator("#set-thinking_budget").fill("1024")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#budget")).to_have_value("1024")
    page.keyboard.press("Escape")
    for budget in ("", "1024"):  # back to the value with which the field was rendered
        with page.expect_response("**/thinking"):
            page.locator("#budget").select_option(budget)
    page.reload()
    expect(page.locator("#budget")).to_have_value("1024")
    ask(page, "/thinking 20")
    expect(page.locator("#budget")).to_have_value("20")
    demo.dictate("So it is.", "A thought. " * 300)
    ask(page, "Think")
    finished(page, 2)
    expect(last_answer(page).locator(".answer")).to_contain_text("So it is.")
    summary = last_answer(page).locator(".reasoning summary").text_content() or ""
    assert 20 <= int(re.findall(r"(\d+) tokens", summary)[0]) < 40, summary


def test_full_context_is_reported_and_drop_oldest_continues(
    serve: Serve, open_page: Open, demo: DemoEngine, picture: Picture
) -> None:
    page = open_page(serve(lambda: demo.load(context_tokens=512)).url, expected="status of 400|response:error")
    demo.dictate("word " * 2000)
    ask(page, "Go on for ever")
    finished(page)
    expect(last_answer(page)).to_contain_text("Response cut off at the maximum length.")
    expect(last_answer(page).get_by_role("button", name="Continue")).to_be_visible()
    expect(page.locator("#gauge .gauge")).to_have_class(re.compile("bad"))
    picture(page, "full", dark=True)
    ask(page, "And now?")
    expect(page.locator("#limit")).to_contain_text(re.compile(r"the prompt would need \d+ tokens.*512"))
    expect(page.locator("#text")).to_have_value("And now?")
    picture(page, "refused")
    show_settings(page, "chat")
    page.locator("#set-when_full").select_option("drop_oldest")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#text").press("Enter")
    finished(page, 2)
    expect(last_answer(page)).to_contain_text("older messages no longer fit in the context and were left out.")


def test_answer_cut_off_at_max_tokens_can_be_continued(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    show_settings(page, "model")
    page.locator("#set-max_tokens").fill("40")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    page.keyboard.press("Escape")
    begin(page, "Tell me a story")
    expect(last_answer(page)).to_contain_text("Response cut off at the maximum length.")
    before = last_answer(page).locator(".answer").inner_text()
    assert before.startswith("Once")
    last_answer(page).get_by_role("button", name="Continue").click()
    expect(last_answer(page).locator(".answer")).not_to_have_text(before, use_inner_text=True)
    finished(page)
    assert last_answer(page).locator(".answer").inner_text().startswith(before.rstrip())
    expect(answers(page)).to_have_count(1)
