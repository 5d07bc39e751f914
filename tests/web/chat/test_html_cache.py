"""Cached HTML of messages: rendered once, within its time budget, and without delaying pages of other chats."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine
from web.conftest import Running

from notso.web.chat import html_cache
from notso.web.rendering import markdown
from notso.web.store.protocol import StoredMessage
from notso.web.values.fair_queue import FairQueue
from notso.web.values.ids import new_id
from notso.web.values.wording import words

Start = Callable[..., Running]
MESSAGES = [{"role": "user", "content": "*one*"}, {"role": "assistant", "content": "**two**"}]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every Markdown block that is rendered."""
    texts: list[str] = []

    def count(text: str, *rest: Any) -> str:
        texts.append(text)
        return render_block(text, *rest)

    render_block = markdown.render_block
    monkeypatch.setattr(markdown, "render_block", count)
    return texts


def imported(server: Running, messages: list[dict[str, str]] = MESSAGES) -> str:
    kind = {"content-type": "application/json"}
    return str(server.client.post("/import", content=json.dumps(messages), headers=kind).headers["location"])


def test_imported_message_is_rendered_once(start: Start, made: list[str]) -> None:
    server = start(ScriptedEngine()).ready()
    chat = imported(server)
    assert made == [], "an import does not render messages"
    pages = [server.client.get(chat).text for _ in range(3)]
    assert all("<strong>two</strong>" in page and words["not_yet_laid_out"] not in page for page in pages)
    assert made == ["**two**"], "questions are shown as typed"
    server.client.post(f"{chat}/settings", data={"raw_user_messages": "off"})
    assert all("<em>one</em>" in server.client.get(chat).text for _ in range(2))
    assert made == ["**two**", "*one*"]
    assert server.client.get(f"{chat}/export/html").text.count("<strong>two</strong>") == 1 and len(made) == 2


def test_edited_answer_is_rendered_once(start: Start, made: list[str]) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    made.clear()
    for _ in range(2):
        server.client.get(url)
    assert made == [], "the HTML from the end of the stream is cached"
    server.client.post(f"{url}/messages/{asked.message_id}/edit", data={"text": "*mine*"})
    assert all("<em>mine</em>" in server.client.get(url).text for _ in range(2))
    assert made.count("*mine*") == 1 and len(made) == 2, "the reasoning is rendered once, too"


def test_html_of_older_renderer_version_is_rendered_again_once(
    start: Start, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(ScriptedEngine()).ready()
    chat = imported(server)
    server.client.get(chat)
    for module in ("web.chat.html_cache", "web.chat.templates", "web.turns.turn_consumer"):
        monkeypatch.setattr(f"notso.{module}.RENDERER_VERSION", markdown.RENDERER_VERSION + 1)
    for _ in range(2):
        server.client.get(chat)
    assert made == ["**two**"] * 2


def test_slow_rendering_delays_only_its_own_chat_for_limited_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("another chat")
    server.finished(asked)
    chat, held, free = imported(server), threading.Event(), threading.Event()
    with_html = html_cache.with_html

    tries = 0

    def hold(message: Any) -> Any:
        nonlocal tries
        tries += 1
        held.set()
        assert free.wait(60)
        return with_html(message)

    monkeypatch.setattr(html_cache, "with_html", hold)
    monkeypatch.setattr(html_cache, "WAIT_SECONDS", 0.05)
    pages: list[httpx.Response] = []
    reader = threading.Thread(target=lambda: pages.append(server.client.get(chat)))
    reader.start()
    assert held.wait(60)
    assert server.client.get(f"/chats/{asked.chat_id}").status_code == 200
    reader.join(60)
    assert words["not_yet_laid_out"] in pages[0].text and "**two**" in pages[0].text
    monkeypatch.setattr(html_cache, "WAIT_SECONDS", 60.0)
    wanted, made = threading.Event(), html_cache.HtmlCache._render_stale

    async def noted(self: html_cache.HtmlCache, owner: str, stale: list[Any]) -> dict[str, Any]:
        wanted.set()
        return await made(self, owner, stale)

    monkeypatch.setattr(html_cache.HtmlCache, "_render_stale", noted)
    second = threading.Thread(target=lambda: pages.append(server.client.get(chat)))
    second.start()
    assert wanted.wait(60)  # the first page's rendering is still running, and this page joins it
    free.set()
    second.join(60)
    assert "<strong>two</strong>" in pages[1].text
    assert tries == 1, "rendering that its reader did not wait for is cached too"


def test_answer_over_render_budget_stays_unformatted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_cache, "WAIT_SECONDS", 60.0)
    hard = "*a*\n\n" + "[a](" * 4_000 + ("\n\n" + "[a](" * 4_000) * 40
    server = start(ScriptedEngine()).ready()
    chat = imported(server, [MESSAGES[0], {"role": "assistant", "content": hard[: 250 * 1024]}])
    pages = [server.client.get(chat).text for _ in range(3)]
    shown = [page.partition('answer-closed">')[2].partition("</div>")[0] for page in pages]
    assert shown[0] == shown[1] == shown[2]
    assert shown[0].count(words["unformatted"]) == 1 and "<em>a</em>" in shown[0]


def test_rendering_queue_alternates_between_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Store:
        async def keep_html(self, owner: str, messages: list[StoredMessage]) -> None:
            order.append(owner)

    def a_message() -> StoredMessage:
        return StoredMessage(new_id(), new_id(), "assistant", "text", "", "done", 0)

    async def work() -> None:
        queue, held = FairQueue("test-render"), threading.Event()
        kept: Any = html_cache.HtmlCache(Store(), None, queue)  # type: ignore[arg-type]
        holding = asyncio.create_task(queue.run("greedy", held.wait))
        views = [asyncio.create_task(kept.messages("greedy", [a_message()])) for _ in range(6)]
        await asyncio.sleep(0)
        views.append(asyncio.create_task(kept.messages("modest", [a_message()])))
        while sum(queue.waiting.values()) < 7:
            await asyncio.sleep(0)
        held.set()
        await asyncio.gather(holding, *views)
        queue.close()

    asyncio.run(work())
    assert order.index("modest") <= 1 and order.count("greedy") == 6


def test_page_that_waits_for_another_page_keeps_its_own_values(start: Start) -> None:
    """The second page reads the message after it was rated, while the first page renders it."""
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    message = replace(server.finished(asked), renderer=0)

    async def render() -> list[list[StoredMessage]]:
        pages = [server.chat.html_cache.messages("local", [each]) for each in (message, replace(message, rating=1))]
        return list(await asyncio.gather(*pages))

    first, second = server.on_loop(render)
    assert [first[0].rating, second[0].rating] == [0, 1]
    assert first[0].answer_html == second[0].answer_html != ""
