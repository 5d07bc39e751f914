"""Smaller page features: drafts that survive, messages for otherwise silent failures, details behind numbers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.conversation import ask, show_settings
from browser.demo_engine import DemoEngine
from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine

from notso.web.engine.models import ModelRegistry
from notso.web.values.wording import words

Serve = Callable[..., Any]
Open = Callable[..., Page]
NO_ANSWER = "ERR_CONNECTION|ERR_INTERNET_DISCONNECTED|Failed to fetch|htmx:sse:error|ERR_INCOMPLETE|ERR_EMPTY"


def answered(page: Page, count: int = 1) -> None:
    expect(page.locator("article.assistant[data-state=done]")).to_have_count(count, timeout=60_000)


def reload_until_answered(page: Page) -> None:
    """Reload until the answer is there, as the page tells users without scripts."""
    for _ in range(600):
        if page.locator("article.assistant[data-state=done]").count():
            return
        expect(page.get_by_text("Reload the page to see the response")).to_be_visible()
        page.wait_for_timeout(100)
        page.reload()
    raise AssertionError("no answer appeared")


def test_draft_survives_reload_and_is_cleared_after_sending(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    page.locator("#text").fill("half a thought")
    page.reload()
    expect(page.locator("#text")).to_have_value("half a thought")
    page.locator("#text").press("Enter")
    answered(page)
    page.reload()
    expect(page.locator("#text")).to_have_value("")
    page.locator("#text").fill("another")
    page.goto(page.url.split("/chats")[0])
    expect(page.locator("#text")).to_have_value("")
    page.go_back()
    expect(page.locator("#text")).to_have_value("another")


def test_enter_during_an_answer_queues_the_message(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("thinking")
    ask(page, "Hello")
    expect(page.locator("[data-stop]")).to_be_visible()
    for text in ("And another thing", "A third", "Not this one"):
        ask(page, text)
    queued = page.locator("#queued .what")
    expect(queued).to_have_text(["And another thing", "A third", "Not this one"])
    expect(page.locator("#composer-problem")).to_be_empty()
    page.locator("#queued li").last.get_by_role("button", name=words["queue_remove"]).click()
    page.reload()
    expect(queued).to_have_text(["And another thing", "A third"])
    page.locator("#text").fill("being typed")
    demo.release()
    answered(page, 3)
    expect(page.locator("article.user .bubble")).to_have_text(["Hello", "And another thing", "A third"])
    expect(queued).to_have_count(0)
    expect(page.locator("#text")).to_have_value("being typed")
    page.locator("#text").fill("")
    demo.hold("thinking")
    ask(page, "Once more")
    expect(page.locator("[data-stop]")).to_be_visible()
    ask(page, "Wait")
    page.keyboard.press("Escape")
    expect(page.locator("#text")).to_have_value("Wait")
    expect(queued).to_have_count(0)
    demo.release()


def test_every_action_reports_an_unresponsive_server(
    serve: Serve, open_page: Open, demo: DemoEngine, tmp_path: Path
) -> None:
    server = serve(demo.load)
    page = open_page(server.url, expected=NO_ANSWER)
    ask(page, "Hello")
    answered(page)
    server.close()
    file = tmp_path / "chats.json"
    file.write_text("{}")
    show_settings(page, "data")
    page.locator("#import").set_input_files(file)
    expect(page.locator("#import-report")).to_contain_text("The server is not responding")
    page.keyboard.press("Escape")
    page.locator("article.assistant [data-regenerate]").click()
    expect(page.locator("#composer-problem")).to_contain_text("The server is not responding")
    ask(page, "Hello?")
    expect(page.locator("#composer-problem")).to_contain_text("Your text has been kept")
    expect(page.locator("#text")).to_have_value("Hello?")
    expect(page.locator(".reconnecting")).to_be_visible()


def test_too_long_question_stays_in_the_input(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, expected="status of 400|response:error")
    ask(page, "Hello")
    answered(page)
    ask(page, "w " * 5000)
    limit = page.locator("#limit")
    expect(limit).to_contain_text("Message too long")
    expect(limit.locator("p")).to_have_count(1)
    expect(limit.get_by_role("button", name=words["menu_summarize"])).to_be_visible()
    expect(limit.get_by_role("link", name="New chat")).to_be_visible()
    assert page.locator("#text").input_value().startswith("w w")
    assert page.locator("article.user").count() == 1
    page.locator("#text").fill("")
    expect(limit).to_be_empty()


def test_asking_search_and_export_work_without_scripts(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    server = serve(demo.load)
    page = open_page(server.url, java_script_enabled=False)
    page.locator("#text").fill("What is SmolLM3?")
    page.get_by_role("button", name="Send").click()
    page.wait_for_url("**/chats/*")
    expect(page.locator("article.user .bubble")).to_have_text("What is SmolLM3?")
    reload_until_answered(page)
    assert "SmolLM3" in page.locator("article.assistant .answer").inner_text()
    with page.expect_download() as export:
        page.locator("[popovertarget=chat-menu]").click()  # popovers work without scripts
        page.get_by_role("link", name="Markdown").click()
    assert "What is SmolLM3?" in Path(export.value.path()).read_text()
    page.locator("article.assistant").get_by_role("button", name=words["regenerate"]).click()
    reload_until_answered(page)
    expect(page.locator(".versions")).to_contain_text("2/2")
    page.get_by_role("link", name="Search").click()
    page.locator("#search-text").fill("smollm3")
    page.locator("#search-text").press("Enter")
    expect(page.locator(".hits mark").first).to_be_visible()
    page.locator(".hits a").first.click()
    expect(page.locator("article.user .bubble")).to_have_text("What is SmolLM3?")
    page.get_by_role("link", name="Settings").click()
    page.locator("#set-temperature").fill("0.3")
    page.get_by_role("button", name="Save").first.click()
    expect(page.locator("#composer")).to_be_visible()


def test_status_details_refresh_only_while_open(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    demo.hold("thinking")
    ask(page, "Hello")
    expect(page.locator("[data-stop]")).to_be_visible()
    page.locator(".badge").click()
    facts = page.locator("#status-facts")
    expect(facts).to_contain_text("Current response")
    expect(facts).to_contain_text("1 running")
    demo.release()
    expect(facts).to_contain_text("Last response")
    expect(facts).to_contain_text("Time to first token")
    page.keyboard.press("Escape")
    page.wait_for_timeout(1500)  # requests that were under way when it closed
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert not [url for url in asked if "/status" in url], "closed, so nothing is requested"


def test_memory_in_use_and_data_folder_are_shown(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, viewport={"width": 1300, "height": 800})
    page.locator("#gauge button").click()
    expect(page.locator("#gauge-details")).to_contain_text(re.compile(r"\d [MG]B in use"))
    page.keyboard.press("Escape")
    show_settings(page, "data")
    expect(page.locator("#data-folder")).to_contain_text("Stored in /")


def test_kept_earlier_reasoning_can_be_discarded(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    ask(page, "What is 27 + 48?")
    answered(page)
    show_settings(page, "chat")
    page.locator("#set-keep_thinking").select_option("on")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#model-settings")).to_contain_text("Saved")
    page.keyboard.press("Escape")
    page.locator("#gauge button").click()
    drop = page.locator("#gauge-details").get_by_role("button", name="Discard earlier reasoning")
    expect(drop).to_be_visible()
    before = int(page.locator("#gauge [role=meter]").get_attribute("aria-valuenow") or 0)
    drop.click()
    expect(page.locator("#toasts")).to_contain_text("Earlier reasoning off")
    expect(page.locator("#gauge-details button", has_text="Discard earlier reasoning")).to_have_count(0)
    assert int(page.locator("#gauge [role=meter]").get_attribute("aria-valuenow") or 0) < before


def test_system_prompt_that_sets_thinking_disables_the_switch(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url, viewport={"width": 320, "height": 640})
    page.locator("#text").fill("/settings")
    page.locator("#text").press("Enter")
    page.locator("#tab-chat").click()
    page.locator("#set-system_prompt").fill("Be brief. /no_think")
    page.get_by_role("button", name="Save").click()
    switch = page.locator("#thinking-switch")
    expect(switch).to_contain_text("set by system prompt")
    page.keyboard.press("Escape")
    expect(switch.get_by_role("switch")).to_be_disabled()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.locator("#text").fill("/thinking on")
    page.locator("#text").press("Enter")
    expect(page.locator("#composer-problem")).to_contain_text("in the system prompt")


def test_keys_and_links_jump_between_questions(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    demo.always("A line.\n\n" * 40)
    page = open_page(serve(demo.load).url)
    for number in range(1, 4):
        ask(page, f"Question {number}")
        answered(page, number)
    page.locator("#scroller").focus()
    for key, wanted in (("k", 3), ("k", 2), ("k", 1), ("j", 2), ("j", 3)):
        page.keyboard.press(key)
        expect(page.locator("article.user:focus .bubble")).to_have_text(f"Question {wanted}")
        expect(page.locator("article.user").nth(wanted - 1)).to_be_in_viewport()
    page.locator("article.user").nth(1).get_by_role("link", name=words["previous_user_message"]).click()
    expect(page.locator("article.user").first).to_be_in_viewport()


def test_model_command_switches_by_part_of_the_name(
    serve: Serve, open_page: Open, demo: DemoEngine, own_home: Path, tmp_path: Path
) -> None:
    """The other engine is scripted, because it must have another name."""
    gate = threading.Event()
    model_registry = ModelRegistry(
        lambda path: ScriptedEngine(name="Another" if gate.wait(60) else "Nobody waited for"), tmp_path
    )
    (tmp_path / "another-one-Q8_0.gguf").write_bytes(b"GGUF")
    page = open_page(serve(demo.load, model_registry=model_registry).url, expected="status of 404|response:error")
    ask(page, "/model nonsense")
    expect(page.locator("#composer-problem")).to_contain_text("Model not found")
    ask(page, "/model another")
    expect(page.locator("#status-label")).to_have_text("Loading model")
    expect(page.locator("button.model-name, #gauge .count")).to_have_count(0)
    gate.set()
    expect(page.locator("#gauge .count")).to_be_visible()
    expect(page.locator("button.model-name")).to_have_text("Another")
    page.locator("#text").fill("/model")
    page.locator("#text").press("Enter")
    page.wait_for_url("**/models")


def test_questions_can_be_shown_as_markdown(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    page = open_page(serve(demo.load).url)
    ask(page, "Is **this** bold, or $x^2$?")
    answered(page)
    expect(page.locator(".bubble strong")).to_have_count(0)
    show_settings(page, "chat")
    page.locator("#set-raw_user_messages").select_option("off")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#model-settings")).to_contain_text("Saved")
    page.reload()
    expect(page.locator(".bubble strong")).to_have_text("this")
    expect(page.locator(".bubble .math .katex")).to_be_attached()


def test_lost_connection_shows_a_reload_button(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    server = serve(demo.load)
    page = open_page(server.url, expected=NO_ANSWER)
    demo.hold("thinking")
    ask(page, "Hello")
    expect(page.locator("[data-stop]")).to_be_visible()
    expect(page.locator(".reload")).to_be_hidden()
    page.context.set_offline(True)
    demo.release()
    server.close()
    expect(page.locator(".reconnecting")).to_be_visible()
    expect(page.locator(".reload")).to_be_visible()


def test_answer_continues_after_links_that_keep_the_page(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    demo.dictate("One two three four five six seven.")
    page = open_page(serve(demo.load).url)
    streams: list[str] = []
    page.on("request", lambda request: streams.append(request.url) if "/events" in request.url else None)
    with demo.held("answer"):
        ask(page, "Count")
        expect(page.locator(".answer")).to_contain_text("One")
        with page.expect_download():
            page.evaluate("Object.assign(document.createElement('a'), { href: '/export', download: '' }).click()")
        page.evaluate("dispatchEvent(new Event('beforeunload', { cancelable: true }))")
    answered(page)
    expect(page.locator(".answer")).to_have_text("One two three four five six seven.")
    expect(page.locator("#status.lost")).to_have_count(0)
    assert len(streams) == 1


def test_suggestions_cause_no_layout_shift(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    demo.always("A line.\n\n" * 40)
    demo.suggestions = "Why is that?\nWhere is it now?\nWho said so first?"
    server = serve(demo.load)
    for width in (1100, 320):
        page = open_page(server.url, viewport={"width": width, "height": 640})
        page.locator("#text").fill("Hello")
        page.locator("#composer-action").click()
        answered(page)
        before = page.locator("#composer").bounding_box()
        expect(page.locator("#suggestions button")).to_have_count(3)
        assert page.locator("#composer").bounding_box() == before
        last, chips = (
            page.locator("article.assistant footer").bounding_box(),
            page.locator("#suggestions").bounding_box(),
        )
        assert last and chips and last["y"] + last["height"] <= chips["y"] + 1, "no overlap with the answer"
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_chat_under_base_path_requests_no_other_paths(serve: Serve, open_page: Open, demo: DemoEngine) -> None:
    """A whole visit: a streamed answer, a dialog, a command that navigates, and an import."""
    demo.dictate("A **bold** answer with $x^2$ and `code`.\n\n```python\nprint(1)\n```\n")
    server = serve(demo.load, base_path="/chat")
    page = open_page(server.url + "chat/")
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    ask(page, "Hello")
    answered(page)
    assert page.url.startswith(f"{server.url}chat/chats/")
    expect(page.locator(".katex")).not_to_have_count(0)
    show_settings(page)
    page.keyboard.press("Escape")
    ask(page, "/model")
    page.wait_for_url("**/chat/models")
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    file = {"name": "chat.json", "mimeType": "application/json", "buffer": json.dumps(body).encode()}
    page.goto(server.url + "chat/archive")
    page.locator("#import").set_input_files([file])
    page.wait_for_url("**/chat/chats/**")
    outside = [url for url in addresses if url.startswith(server.url) and not url.startswith(f"{server.url}chat/")]
    assert len(addresses) > 40
    assert not outside
