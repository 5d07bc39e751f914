"""Earlier reasoning is left out of prompts unless a chat keeps it; the page shows its size and lets the user drop
it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from scripted_engine import ScriptedEngine, say

from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}
THOUGHTS = "one two three four five"


def begin(start: Start) -> tuple[Any, Any, ScriptedEngine]:
    engine = ScriptedEngine(lambda messages, thinking: say("Yes.", THOUGHTS))
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    return server, asked, engine


def test_earlier_reasoning_is_in_prompt_only_with_keep_thinking(start: Start) -> None:
    server, asked, engine = begin(start)
    server.finished(server.ask("And?", asked.chat_id))
    assert [message.reasoning_content for message in engine.requests[-1].messages] == [None, None, None]
    server.client.post(f"/chats/{asked.chat_id}/settings", data={"keep_thinking": "on"})
    server.finished(server.ask("And?", asked.chat_id))
    kept = [message for message in engine.requests[-1].messages if message.keep_reasoning]
    assert [message.reasoning_content for message in kept] == [THOUGHTS, THOUGHTS]


def test_context_meter_offers_to_discard_earlier_reasoning(start: Start) -> None:
    server, asked, _ = begin(start)
    url = f"/chats/{asked.chat_id}"
    draft = {"text": "And?", "thinking": "on"}
    assert "Discard earlier reasoning" not in server.client.post(f"{url}/estimate", data=draft, headers=FRAGMENT).text
    server.client.post(f"{url}/settings", data={"keep_thinking": "on"})
    meter = server.client.post(f"{url}/estimate", data=draft, headers=FRAGMENT).text
    assert "Discard earlier reasoning (frees 5 tokens)" in meter and "<dt>Reasoning</dt><dd>5</dd>" in meter
    dropped = {"command": "thinking", "keep_thinking": "off"}
    told = server.client.post(f"{url}/settings", data=dropped, headers=FRAGMENT)
    assert "Earlier reasoning off" in told.text
    assert "Discard earlier reasoning" not in server.client.post(f"{url}/estimate", data=draft, headers=FRAGMENT).text


def test_system_prompt_that_sets_thinking_disables_the_switch(start: Start) -> None:
    server, asked, _ = begin(start)
    page = f"/chats/{asked.chat_id}"
    assert "set by system prompt" not in server.client.get(page).text
    for text, on in (("Be brief. /no_think", False), ("/think", True)):
        changed = server.client.post(f"{page}/settings", data={"system_prompt": text}, headers=FRAGMENT).text
        for html in (changed.partition("#thinking-switch")[2], server.client.get(page).text):
            switch = re.search(r'<input type="checkbox"[^>]*role="switch" disabled[^>]*>', html)
            assert switch and ("checked" in switch[0]) == on and "set by system prompt" in html
    assert 'name="thinking" value="on"' in server.client.get(page).text, "the chat's own setting stays unchanged"
    fields = {"text": "And?", "key": new_id(), "thinking": "on"}
    assert server.client.post(f"{page}/messages", data=fields, headers=FRAGMENT).status_code == 200


def test_saving_settings_keeps_thinking_switch_on_start_page(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    for fields, on in (({"thinking": "on"}, True), ({}, False)):
        html = server.client.post("/settings", data={"temperature": "0.5"} | fields, headers=FRAGMENT).text
        switch = re.search(r'<input type="checkbox" name="thinking"[^>]*>', html)
        assert switch and ("checked" in switch[0]) == on
