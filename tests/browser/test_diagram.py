"""Mermaid diagrams are drawn in a sandboxed frame that can run scripts and do nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect
from scripted_engine import ScriptedEngine

ANSWER = (
    '```mermaid\ngraph TD\n  A[Begin] --> B{Choice}\n  B --> C["<img src=x onerror=alert(1)>"]\n```\n\n'
    "```mermaid\nno diagram\n```\n"
)


def test_mermaid_diagram_is_drawn_in_a_sandboxed_frame(
    serve: Callable[..., Any], open_page: Callable[..., Page]
) -> None:
    page = open_page(serve(ScriptedEngine()).url, expected="Content Security Policy|cross-origin|CORS")
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    body = json.dumps([{"role": "user", "content": "Draw"}, {"role": "assistant", "content": ANSWER}])
    page.evaluate(
        """async (body) => {
            const headers = { "Content-Type": "application/json", Accept: "application/json" };
            const answer = await fetch("/import", { method: "POST", headers, body });
            location.assign("/chats/" + (await answer.json()).chats[0]);
        }""",
        body,
    )
    page.wait_for_url(re.compile("/chats/"))
    expect(page.locator(".code-label").first).to_contain_text("mermaid")
    assert not [url for url in fetched if "diagram" in url or "mermaid" in url], "only requested for a diagram"
    page.locator(".preview-code").first.click()
    frame = page.frame_locator("#preview-place iframe")
    expect(frame.locator("svg")).to_contain_text("Begin")
    assert page.locator("#preview-place iframe").get_attribute("sandbox") == "allow-scripts"
    inside = next(each for each in page.frames if each.url.endswith("/diagram"))
    assert inside.evaluate("self.origin") == "null"
    assert inside.evaluate("fetch('/health').then(() => 'reached', () => 'refused')") == "refused"
    assert inside.evaluate("(() => { try { return parent.document.title } catch { return 'refused' } })()") == "refused"
    page.keyboard.press("Escape")
    expect(page.locator("#preview-place iframe")).to_have_count(0)
    page.locator(".preview-code").nth(1).click()
    expect(page.frame_locator("#preview-place iframe").locator("#diagram")).not_to_be_empty()
