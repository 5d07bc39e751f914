"""A question that cannot fit into the context is returned to its author and not stored."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, EngineError
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine()).ready()


def messages_of(server: Any, chat_id: str) -> Any:
    return server.on_loop(lambda: server.shared.store.messages("local", chat_id))


def test_question_over_context_limit_is_rejected_and_not_stored(server: Any) -> None:
    refused = server.client.post("/chats", data={"text": "w " * 5000, "key": new_id()})
    assert refused.status_code == 400
    assert "would need 5,021 tokens, but the context has only 4,096" in refused.text
    assert "w w w" in refused.text, "the question must stay in the input"
    assert server.on_loop(lambda: server.shared.store.chats("local")) == []
    asked = server.ask("Hello")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages"
    refused = server.client.post(url, data={"text": "w " * 5000, "key": new_id()}, headers=FRAGMENT)
    assert refused.status_code == 400 and 'hx-target="#limit"' in refused.text and "Summarize" in refused.text
    assert len(messages_of(server, asked.chat_id)) == 2
    question = messages_of(server, asked.chat_id)[0].id
    edited = {"text": "w " * 5000, "key": new_id()}
    assert server.client.post(f"{url}/{question}/edit", data=edited, headers=FRAGMENT).status_code == 400
    assert len(messages_of(server, asked.chat_id)) == 2


def test_question_too_long_to_tokenize_is_rejected_with_a_lower_bound(start: Start) -> None:
    server = start(Engine.load).ready()
    refused = server.client.post("/chats", data={"text": "w " * 90_000, "key": new_id()})
    assert refused.status_code == 400 and re.search(r"would need ≥ [\d,]+ tokens", refused.text)
    gauge = server.client.post("/estimate", data={"text": "w " * 90_000}, headers=FRAGMENT)
    assert gauge.status_code == 200 and re.search(r"≥ [\d,]+ / 4,096", gauge.text) and "over by" not in gauge.text


def test_max_tokens_does_not_count_against_the_question(server: Any) -> None:
    server.client.post("/settings", data={"max_tokens": "4000"})
    taken = server.client.post("/chats", data={"text": "w " * 100, "key": new_id()})
    assert taken.status_code == 303 and "/chats/" in taken.headers["location"]


def test_drop_oldest_accepts_question_that_overflows_the_context(server: Any) -> None:
    asked = server.ask("w " * 3000)
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    fields = {"text": "v " * 3000, "key": new_id()}
    assert server.client.post(f"{url}/messages", data=fields, headers=FRAGMENT).status_code == 400
    server.client.post(f"{url}/settings", data={"when_full": "drop_oldest"})
    assert server.client.post(f"{url}/messages", data=fields, headers=FRAGMENT).status_code == 200


def test_answer_that_failed_without_text_offers_no_continue_button(start: Start) -> None:
    for script, offered in ((lambda m, t: [], False), (lambda m, t: say("Half an"), True)):
        server = start(ScriptedEngine(script, failure=EngineError("the engine broke"))).ready()
        asked = server.ask("Hello")
        assert server.finished(asked).state == "failed"
        page = server.client.get(f"/chats/{asked.chat_id}").text
        assert (">Continue<" in page) == offered
        assert "Try again" in page
        server.close()


def test_gauge_distinguishes_full_context_from_too_long_message(server: Any) -> None:
    asked = server.ask("w " * 4000)
    server.finished(asked)
    server.client.post(f"/chats/{asked.chat_id}/settings", data={"system_prompt": "w " * 200})
    empty = server.client.post(f"/chats/{asked.chat_id}/estimate", data={"text": ""}, headers=FRAGMENT).text
    assert "The context is full" in empty and "Draft" not in empty.replace("Draft</dt>", "")
    typed = server.client.post(f"/chats/{asked.chat_id}/estimate", data={"text": "and now more"}, headers=FRAGMENT).text
    assert "Message too long" in typed
