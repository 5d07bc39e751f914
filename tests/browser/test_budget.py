"""What the page may cost: bytes, time to be of use, frames, and not a pixel of unasked movement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

from notso.web.scripted_engine import ScriptedEngine, say

FIRST_PAGE_BYTES = 150_000
INTERACTIVE_MS = 1_000
LAYOUT_SHIFT = 0.01  # what browsers call good is 0.1
LONG_CHAT_TURNS = 250  # so 500 messages
FRAME_MS = 250  # a scrolled frame of a long chat, on a machine that others use too

WATCH = """
    window.shifts = [];
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) if (!entry.hadRecentInput) {
            shifts.push([entry.value, ...entry.sources.map((source) => source.node?.outerHTML?.slice(0, 120))]);
        }
    }).observe({ type: "layout-shift", buffered: true });
"""
ANSWER = (
    "Some words to begin with.\n\n"
    + "```python\nx = 1\ny = 2\n```\n\nA formula $x^2$ and\n\n$$\n\\frac{1}{2}\n$$\n\n"
    + "\n\n".join(f"Paragraph {n} goes on for a while, **so** that it takes more than one line." for n in range(40))
)


def test_the_first_page_is_light_and_soon_of_use(serve: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    page = open_page(serve(ScriptedEngine()).url)
    page.wait_for_timeout(500)
    page.context.new_cdp_session(page).send("Network.clearBrowserCache")
    best = None
    for _ in range(3):  # other work may hold up one of them
        page.reload()
        page.wait_for_timeout(300)
        found = page.evaluate(
            """() => {
                const entries = (kind) => performance.getEntriesByType(kind);
                const all = [...entries("navigation"), ...entries("resource")];
                const files = all.filter((entry) => !/feed|estimate/.test(entry.name));
                return [
                    files.reduce((sum, entry) => sum + entry.encodedBodySize + 300, 0),
                    performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd,
                    files.length,
                ];
            }"""
        )
        best = found if best is None or found[1] < best[1] else best
    assert best is not None and best[2] > 10
    assert 20_000 < best[0] < FIRST_PAGE_BYTES
    assert best[1] < INTERACTIVE_MS


def test_nothing_jumps_while_an_answer_is_written(serve: Callable[..., Any], open_page: Callable[..., Page]) -> None:
    engine = ScriptedEngine(lambda m, t: say(ANSWER, "A thought.\n\n" * 20 if t else "", piece=24), pace_seconds=0.01)
    page = open_page(serve(engine).url)
    page.locator("#text").fill("Hello")
    page.locator("#text").press("Enter")
    expect(page.locator("article.assistant")).to_have_attribute("data-state", "done")
    page.evaluate(WATCH)
    page.wait_for_timeout(600)  # past what counts as an answer to the keys
    page.locator("#text").fill("Go on")
    page.locator("#text").press("Enter")
    expect(page.locator("article.assistant")).to_have_count(2)
    page.wait_for_timeout(600)
    page.evaluate("shifts.length = 0")
    expect(page.locator("article.assistant").last).to_have_attribute("data-state", "done", timeout=40_000)
    page.wait_for_timeout(200)
    shifts = page.evaluate("shifts")
    assert sum(shift[0] for shift in shifts) < LAYOUT_SHIFT, shifts


def test_a_chat_of_five_hundred_messages_stays_smooth(
    serve: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    engine = ScriptedEngine(lambda m, t: say("The **last** answer. " * 40, piece=20), pace_seconds=0.005)
    page = open_page(serve(engine).url)
    turns = [
        message
        for n in range(LONG_CHAT_TURNS)
        for message in (
            {"role": "user", "content": f"Question {n}"},
            {
                "role": "assistant",
                "content": f"Answer {n}.\n\n- one\n- two\n\n```python\nx = {n}\n```\n\n" + "Words. " * 60,
            },
        )
    ]
    place = page.evaluate(
        """async (messages) => {
            const headers = { "Content-Type": "application/json", "HX-Request": "true" };
            const answer = await fetch("/import", { method: "POST", headers, body: JSON.stringify({ messages }) });
            return answer.headers.get("HX-Redirect") ?? `${answer.status} ${await answer.text()}`;
        }""",
        turns,
    )
    assert place.startswith("/chats/"), place
    page.goto(page.url.rstrip("/") + place)
    expect(page.locator("#turns > article")).to_have_count(2 * LONG_CHAT_TURNS)
    frames = page.evaluate(
        """async () => {
            const scroller = document.getElementById("scroller"), frames = [];
            let last = performance.now();
            for (let step = 0; step < 60; step += 1) {
                scroller.scrollTop -= 400;
                await new Promise(requestAnimationFrame);
                frames.push(performance.now() - last);
                last = performance.now();
            }
            return frames.sort((a, b) => a - b);
        }"""
    )
    assert frames[len(frames) // 2] < FRAME_MS, frames
    page.locator("#text").fill("And now?")
    page.locator("#text").press("Enter")
    expect(page.locator("article.assistant").last).to_have_attribute("data-state", "done", timeout=40_000)
    expect(page.locator("article.assistant").last).to_be_in_viewport()
