"""A thousand hostile texts in a real browser: no script runs, no request leaves, and the page stays
intact.

The engine generates a part of them, both byte by byte and as tokenized text. All of them reach the page in a stream
with one update per byte, built by the server's renderer and log. (The full path for every byte would take hours at ten
updates a second.) tests/web/rendering/test_hostile_stream.py covers the stream without a browser.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from browser.conversation import ask, begin, last_answer, until
from browser.demo_engine import DemoEngine
from browser.hostile_texts import BATCHES, IN_ALL, hostile
from playwright.sync_api import Error, Page, Route, expect

from notso.web.rendering.streaming import StreamingMarkdown
from notso.web.turns.sse import update_html
from notso.web.turns.turn_log import AnswerStatus, TurnLog

FOREIGN = ".prose :is(img, script, iframe, object, embed, video, audio, form, input, link, style, base, meta, template)"


def assert_unharmed(page: Page, articles: int = 2) -> None:
    assert page.evaluate("[typeof pwned, document.querySelectorAll('#turns').length]") == ["undefined", 1]
    assert page.locator("#turns > article").count() == articles and page.locator("#composer").count() == 1
    assert page.locator(f"{FOREIGN}, .answer [id]:not(div), .bubble:not(.prose) *").count() == 0
    assert page.evaluate("location.pathname").startswith("/chats/")


def test_hostile_engine_output_is_harmless(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine
) -> None:
    """Run two answers at once, of which one consists of single-byte tokens."""
    url = serve(lambda: demo.load(context_tokens=8192)).url
    pages, addresses = [], list[str]()
    demo.pace_s = 0.01  # so that both answers run at the same time
    for texts in (hostile(0)[::9], hostile(1)[::9]):
        demo.dictate([b"\n\n".join([*texts, b"The end."])] if not pages else spoken(texts))
        page = open_page(url)  # the fixture fails on console errors and on requests to other origins
        page.on("request", lambda request: addresses.append(request.url))
        page.locator("#text").fill(b"\n".join(texts[-20:]).decode(errors="replace").replace("\x00", ""))
        page.get_by_role("switch", name="Thinking").locator("..").click()
        page.get_by_role("button", name="Send").click()
        page.wait_for_url("**/chats/*")
        expect(page.locator("#status-label")).to_have_text("Generating")
        pages.append(page)
    demo.pace_s = 0
    for page in pages:
        expect(last_answer(page)).to_have_attribute("data-state", "done", timeout=120_000)
        expect(page.locator(".answer")).to_contain_text("The end.")
        assert "\ufffd" in page.locator(".answer").inner_text(), "invalid UTF-8 is shown as such"
        assert_unharmed(page)
        for button in page.locator(".answer .copy-code").all()[:2]:
            button.click()
        page.reload()
        expect(page.locator(".answer")).to_contain_text("The end.")
        assert_unharmed(page)
    assert addresses and not [address for address in addresses if "evil" in address]


def spoken(texts: list[bytes]) -> list[str | bytes]:
    """Convert texts for `dictate`: as text if they are valid UTF-8, otherwise as bytes."""
    said: list[str | bytes] = []
    for data in texts:
        try:
            said += [data.decode(), "\n\n"]
        except UnicodeDecodeError:
            said += [data, "\n\n"]
    return [*said, "The end."]


@pytest.mark.long("page")
@pytest.mark.timeout(500)  # 8,000 updates, beside other browsers
@pytest.mark.parametrize("batch", range(BATCHES))
def test_hostile_texts_streamed_byte_by_byte_are_harmless(
    serve: Callable[..., Any], open_page: Callable[..., Page], demo: DemoEngine, batch: int
) -> None:
    """Replace the stream of a held answer with one that has an update for every byte."""
    texts = hostile(batch)
    page = open_page(serve(demo.load).url)
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    begin(page)
    streams: list[tuple[bytes, int]] = []

    def every_byte(route: Route) -> None:
        if not streams:
            streams.append(stream_of(last_answer(page).get_attribute("id") or "", texts))
        with suppress(Error):  # the page reconnects when the stream ends, and may have left by then
            route.fulfill(status=200, content_type="text/event-stream", body=streams[0][0])

    page.route("**/generations/*/events?*", every_byte)
    demo.hold("thinking")
    ask(page, "Go on")
    expect(last_answer(page).locator(".answer")).to_contain_text("The end.", timeout=400_000)
    until(page, "() => document.querySelectorAll('.answer .copy-code').length > 3")
    assert sum(len(hostile(number)) for number in range(BATCHES)) == IN_ALL == 1000
    assert streams[0][1] > 8000
    assert_unharmed(page, 4)
    assert not [address for address in addresses if "evil" in address]
    page.unroute_all()
    page.keyboard.press("Escape")
    demo.release()
    page.reload()
    expect(page.locator("#turns > article")).to_have_count(4)
    assert_unharmed(page, 4)


def stream_of(article: str, texts: list[bytes]) -> tuple[bytes, int]:
    """Build the server's event stream with an update for every byte; return it and the number of updates."""
    message = article.removeprefix("msg-")

    async def events() -> AsyncIterator[bytes]:
        from fastapi.sse import format_sse_event

        log, number = TurnLog(), None
        log.set_status(AnswerStatus("generating", "Generating"))
        markdown, decoder = StreamingMarkdown(), codecs.getincrementaldecoder("utf-8")("replace")
        for byte in b"\n\n".join([*texts, b"The end.\n"]):
            rendered = markdown.feed(decoder.decode(bytes([byte])))
            log.write("answer", rendered.closed, rendered.tail)
            update = log.since(number)
            if update.number != number:
                yield format_sse_event(data_str=update_html(message, update), id=str(update.number))
            number = update.number

    async def collected() -> list[bytes]:
        return [event async for event in events()]

    found = run_apart(collected)
    return b"".join(found), len(found)


def run_apart(work: Callable[[], Any]) -> Any:
    """Run a coroutine in another thread, because playwright occupies this thread's event loop."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()
