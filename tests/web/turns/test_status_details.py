"""The details behind the status badge and beside the context meter."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from scripted_engine import ScriptedEngine, say

from notso.smollm3 import EngineError, Event
from notso.web.chat.routes.settings import measure_directory
from notso.web.store.protocol import AnswerStats
from notso.web.turns.status_line import TurnStats

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


def details(server: Any, chat_id: str) -> str:
    answer = server.client.get("/status/details", params={"chat": chat_id}, headers=FRAGMENT)
    assert answer.status_code == 200
    text: str = answer.text
    return text


def test_status_details_show_statistics_of_running_answer(start: Start) -> None:
    release = threading.Event()

    def script(messages: Any, thinking: bool) -> Iterator[Event]:
        yield from say("", "Let me see. ")
        assert release.wait(60)
        yield from say("There.")

    server = start(ScriptedEngine(script)).ready()
    server.client.post("/settings", data={"thinking_budget": "1024"})
    asked = server.ask("How are you today?")
    server.wait(lambda: "left of 1,024" in details(server, asked.chat_id))
    html = details(server, asked.chat_id)
    assert "Current response" in html and "24 tokens, " in html and "cached" in html
    assert "1 running, 0 queued" in html
    assert 'hx-trigger="intersect once delay:' in html, "the details refresh while they are visible"
    release.set()
    server.finished(asked)
    server.wait(lambda: "Last response" in details(server, asked.chat_id))
    assert "Time to first token" in details(server, asked.chat_id)


def test_the_last_error_can_be_copied(start: Start) -> None:
    server = start(ScriptedEngine(lambda m, t: [], failure=EngineError("the engine <broke>"))).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    html = details(server, asked.chat_id)
    assert "Last error" in html and "the engine &lt;broke&gt;" in html
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}/text?part=note"
    assert url in html
    assert server.client.get(url).text == "the engine <broke>"


def test_status_details_without_chat_show_only_the_model(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    for chat_id in ("", "nonsense", "0198f0a0-0000-7000-8000-000000000000"):
        html = details(server, chat_id)
        assert "Scripted" in html and "Last response" not in html


def test_turn_stats_list_only_known_values() -> None:
    assert TurnStats().rows == []
    assert TurnStats(place=2).rows == [("queue", "position 2")]
    rows = dict(
        TurnStats(
            AnswerStats(
                prompt_tokens=1249,
                cached_tokens=1000,
                completion_tokens=400,
                reasoning_tokens=300,
                prompt_ms=2000,
                completion_ms=20_000,
                thinking_ms=10_000,
                queue_ms=1250,
                first_token_ms=3300,
            ),
            prefill_tokens=249,
            budget=256,
        ).rows
    )
    assert rows == {
        "queue": "1.2 s",
        "prompt": "1,249 tokens, 249 processed in 2.0 s (124 tokens/s), 1,000 cached",
        "thinking": "300 tokens in 10.0 s, 0 left of 256",
        "written": "400 tokens in 20.0 s (20.0 tokens/s)",
        "first": "3.3 s",
    }


def test_context_meter_shows_memory_in_use(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    html = server.client.post("/estimate", data={"text": "x"}, headers=FRAGMENT).text
    assert "in use" in html and re.search(r"\d [MG]B", html)


def test_settings_show_data_folder_and_cache_size(start: Start, tmp_path: Any) -> None:
    server = start(ScriptedEngine()).ready()
    kv = tmp_path / "data" / "kv" / "ab"
    kv.mkdir(parents=True)
    (kv / "block").write_bytes(b"x" * 3_000_000)
    folder = measure_directory(tmp_path / "data")
    assert folder.chats_bytes > 4096 and folder.cache_bytes == 3_000_000
    part = server.client.get("/settings", headers=FRAGMENT).text
    page = server.client.get("/settings").text
    for html in (part, page):
        assert f"Stored in {tmp_path / 'data'}" in html and "3 MB of prompt cache" in html
    assert "<hx-partial" in part and "<hx-partial" not in page
    assert measure_directory(tmp_path / "nowhere").chats_bytes == 0
    assert measure_directory(tmp_path / "caf\udce9").path == f"{tmp_path}/caf?", "UTF-8, as pages require"
