"""Settings: validated with a reason, merged by level, and passed to the engine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.web.store.protocol import Chat, ChatDefaults
from notso.web.turns.chat_settings import (
    SETTING_NAMES,
    ChatSettings,
    effective_settings,
    form_values,
    merge_settings,
    updated_settings,
)
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true"}

GOOD = {
    "system_prompt": [("Be\nbrief.", "Be\nbrief."), ("x" * 20_000, "x" * 20_000)],
    "temperature": [("0", 0.0), ("2", 2.0), (" 0,7 ", 0.7), ("1e-1", 0.1)],
    "top_p": [("0.01", 0.01), ("1", 1.0)],
    "min_p": [("0", 0.0), ("1", 1.0)],
    "max_tokens": [("1", 1), ("131,072", 131_072), ("none", "none")],
    "seed": [("-9223372036854775808", -(1 << 63)), ("9223372036854775807", (1 << 63) - 1), ("None", "none")],
    "thinking_budget": [("0", 0), ("4096", 4096), ("none", "none")],
    "suggestions": [("on", True), ("off", False)],
    "keep_thinking": [("on", True), ("off", False)],
    "raw_user_messages": [("on", True), ("off", False)],
    "titles": [("on", True), ("off", False)],
    "speculative_prefill": [("on", True), ("off", False)],
    "memory": [("on", True), ("off", False)],
    "when_full": [("stop", "stop"), ("drop_oldest", "drop_oldest")],
    "compaction": [("automatic", "automatic"), ("off", "off")],
    "tools": [("clock", "clock"), (" clock  files__read clock ", "clock files__read"), ("none", "none")],
    "model": [("demo", "demo"), (" smollm3-3b:q8_0:legal ", "smollm3-3b:q8_0:legal")],
}
BAD = {
    "system_prompt": ["x" * 20_001],
    "temperature": ["-0.1", "2.1", "nan", "inf", "1e999", "warm", "True"],
    "top_p": ["0", "-1", "1.01", "nan"],
    "min_p": ["-0.001", "1.001"],
    "max_tokens": ["0", "-1", "131073", "1.5", "1e3", "٣", "9" * 5000],
    "seed": ["9223372036854775808", "-9223372036854775809", "x"],
    "thinking_budget": ["-1", "131073"],
    "suggestions": ["yes", "true"],
    "keep_thinking": ["yes", "true"],
    "raw_user_messages": ["yes", "true"],
    "titles": ["yes", "true"],
    "speculative_prefill": ["yes", "true"],
    "memory": ["yes", "true"],
    "when_full": ["explode"],
    "compaction": ["sometimes"],
    "tools": ["a,b", "<b>", "x" * 5000],
    "model": ["x" * 201, "a\x00b"],
}


def test_values_cover_every_setting() -> None:
    assert set(GOOD) == set(BAD) == set(SETTING_NAMES)


@pytest.mark.parametrize("name, text, value", [(name, *pair) for name, pairs in GOOD.items() for pair in pairs])
def test_valid_setting_values_are_accepted_and_round_trip(name: str, text: str, value: object) -> None:
    settings, problems = updated_settings({}, {name: text})
    assert (settings, problems) == ({name: value}, {})
    assert isinstance(merge_settings(settings), ChatSettings)
    again, _ = updated_settings({}, {name: form_values(settings)[name]})
    assert again == settings, "a displayed value must be accepted as input"


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in BAD.items() for text in texts])
def test_invalid_setting_values_are_rejected_with_a_reason(name: str, text: str) -> None:
    settings, problems = updated_settings({"min_p": 0.5} if name != "min_p" else {}, {name: text})
    assert set(problems) == {name} and len(problems[name]) > 5
    assert name not in settings


def test_chat_settings_override_defaults() -> None:
    settings = merge_settings({"temperature": 0.9, "max_tokens": 50, "seed": 3}, {"max_tokens": "none", "unknown": 1})
    sampling = settings.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.top_p) == (0.9, None, 3, 0.95)


def test_none_is_an_ordinary_system_prompt_and_model_name() -> None:
    settings = merge_settings({"system_prompt": "none", "model": "none", "tools": "none", "seed": "none"})
    assert (settings.system_prompt, settings.model) == ("none", "none")
    assert (settings.tools, settings.sampling.seed) == (None, None)
    with_memory = effective_settings(
        ChatDefaults({"system_prompt": "none"}, memories=("Tea.",)), Chat("c", "", False, date(2026, 1, 1), 0, 0)
    )
    assert with_memory.system_prompt == "The user wants you to remember:\n- Tea.\n\nnone"


def test_missing_setting_is_kept_and_empty_one_is_removed() -> None:
    assert updated_settings({"seed": 3, "min_p": 0.1}, {"seed": "", "other": "x"}) == ({"min_p": 0.1}, {})


def test_default_and_chat_settings_reach_the_engine(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    assert server.client.post("/settings", data={"temperature": "0.9", "seed": "5"}).status_code == 303
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/settings"
    fields = {"temperature": "0.1", "system_prompt": "Be brief.", "thinking_budget": "7", "when_full": "drop_oldest"}
    answer = server.client.post(url, data=fields, headers=FRAGMENT)
    assert answer.status_code == 200 and "Saved." in answer.text
    server.finished(server.ask("two", asked.chat_id))
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.seed, first.thinking_budget) == (0.9, 5, None)
    assert (second.temperature, second.seed, second.thinking_budget) == (0.1, 5, 7)
    assert engine.requests[1].messages[0].content == "Be brief."
    assert (engine.requests[0].options.when_full, engine.requests[1].options.when_full) == ("stop", "drop_oldest")


def test_invalid_field_shows_an_error_and_others_are_saved(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/settings"
    answer = server.client.post(url, data={"temperature": "9", "min_p": "0.2"}, headers=FRAGMENT)
    assert answer.status_code == 400
    assert "Enter a number from 0 to 2." in answer.text and 'value="9"' in answer.text and 'value="0.2"' in answer.text
    kept = server.client.get(url, headers=FRAGMENT).text
    assert 'value="0.2"' in kept and 'value="9"' not in kept
    assert "<html" in server.client.get(url).text and "<html" not in server.client.get(url, headers=FRAGMENT).text


def test_composer_thinking_settings_are_saved_and_validated(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    fields = {"text": "one", "key": new_id(), "thinking": "on", "thinking_budget": "256"}
    asked = server.last(server.client.post("/chats", data=fields).headers["location"].removeprefix("/chats/"))
    server.finished(asked)
    assert engine.requests[-1].params.thinking_budget == 256
    url = f"/chats/{asked.chat_id}"
    server.client.post(f"{url}/thinking", data={"thinking": "on", "thinking_budget": ""}, headers=FRAGMENT)
    server.finished(server.ask("two", asked.chat_id))
    assert engine.requests[-1].params.thinking_budget is None
    refused = server.client.post(f"{url}/messages", data=fields | {"key": new_id(), "thinking_budget": "x"})
    assert refused.status_code == 400 and ">\none</textarea>" in refused.text


def test_unchanged_budget_of_an_older_page_does_not_undo_the_settings(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    saved = server.client.post(f"{url}/settings", data={"thinking_budget": "1024"}, headers=FRAGMENT).text
    assert 'hx-target="#thinking-budget"' in saved and '<option value="1024" selected>' in saved
    composer = {"thinking_budget": "", "thinking_budget_was": ""}
    server.finished(server.ask("two", asked.chat_id, **composer))
    server.client.post(f"{url}/thinking", data=composer | {"thinking": "on"}, headers=FRAGMENT)
    server.finished(server.ask("three", asked.chat_id, **composer))
    assert [request.params.thinking_budget for request in engine.requests] == [None, 1024, 1024]
    server.finished(server.ask("four", asked.chat_id, **composer | {"thinking_budget_was": "1024"}))
    assert engine.requests[-1].params.thinking_budget is None


def test_composer_offers_the_default_budget_and_no_limit(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    assert '<option value="" selected>No limit</option>' in server.client.get("/").text
    saved = server.client.post("/settings", data={"thinking_budget": "2000"}, headers=FRAGMENT).text
    assert '<option value="" selected>Default: 2,000 tokens</option>' in saved
    asked = server.ask("one", thinking_budget="none")
    server.finished(asked)
    assert engine.requests[-1].params.thinking_budget is None
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert '<option value="">Default: 2,000 tokens</option>' in page
    assert '<option value="none" selected>No limit</option>' in page and ">0 tokens<" not in page


def test_settings_command_reports_change_or_error(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("one")
    server.finished(asked)
    for url, told in (
        (f"/chats/{asked.chat_id}", "Chat settings: Temperature 1.5"),
        ("", "Default settings: Temperature 1.5"),
    ):
        bad = server.client.post(f"{url}/settings", data={"temperature": "9", "command": "temp"}, headers=FRAGMENT)
        assert (
            bad.status_code == 400
            and "Temperature: Enter a number from 0 to 2." in bad.text
            and "<form" not in bad.text
        )
        good = server.client.post(f"{url}/settings", data={"temperature": "1.5", "command": "temp"}, headers=FRAGMENT)
        assert told in good.text and "#toasts" in good.text
    assert server.client.post("/settings", data={"command": "temp"}, headers=FRAGMENT).status_code == 200
    assert "#toasts" not in server.client.post("/settings", data={"temperature": "1"}, headers=FRAGMENT).text
