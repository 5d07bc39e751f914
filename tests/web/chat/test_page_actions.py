"""Small page features: jumping between questions, finding a model by part of its name, and questions as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import LocalModel
from notso.web.engine.models import InstalledModel, Inventory, ModelRegistry
from notso.web.store.protocol import StoredMessage
from notso.web.store.tree import shown_path
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


def message(number: int) -> StoredMessage:
    role = "user" if number % 2 else "assistant"
    parent = str(number - 1) if number > 1 else None
    return StoredMessage(str(number), "chat", role, "text", "", "done", 0, parent_id=parent)  # type: ignore[arg-type]


def test_messages_link_to_previous_and_next_question() -> None:
    path = shown_path([message(number) for number in range(1, 7)], None)
    assert [(each.previous_user_message, each.next_user_message) for each in path] == [
        *((None, "3"), ("1", "3"), ("1", "5"), ("3", "5"), ("3", None), ("5", None))
    ]


def test_new_question_is_linked_from_the_previous_question(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("One")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    assert 'data-user-message="after"' not in server.client.get(url).text
    fields = {"text": "Two", "key": new_id()}
    turn = server.client.post(f"{url}/messages", data=fields, headers=FRAGMENT).text
    first, second = (
        each.id for each in server.on_loop(lambda: server.shared.store.messages("local", asked.chat_id))[::2]
    )
    link = re.search(rf'<hx-partial hx-target="#msg-{first}-after"[^>]*>(.*?)</hx-partial>', turn, re.DOTALL)
    assert link and f'href="#msg-{second}"' in link[1]
    assert f'href="#msg-{first}"' in turn
    server.wait(lambda: server.chat.turns.unfinished == 0)
    page = server.client.get(url).text
    assert page.count('data-user-message="after"') == 1 and page.count('data-user-message="before"') == 2


def test_questions_are_shown_as_typed_or_as_markdown(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("Is **this** <b>bold</b>?")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    assert "Is **this** &lt;b&gt;bold&lt;/b&gt;?</div>" in server.client.get(url).text
    server.client.post("/settings", data={"raw_user_messages": "off"})
    turns = server.client.get(f"{url}/turns", headers=FRAGMENT).text
    one = server.client.get(f"{url}/messages/{server.stored(asked).parent_id}", headers=FRAGMENT).text
    for html in (server.client.get(url).text, turns, one):
        assert "Is <strong>this</strong> &lt;b&gt;bold&lt;/b&gt;?" in html


def inventory(*names: str) -> Inventory:
    models = [LocalModel(name, Path("/m") / name, 1, "Q4_K_M", "folder", "no") for name in names]
    return Inventory(
        tuple(InstalledModel(name[:4], model, False) for name, model in zip(names, models, strict=True)), (), True
    )


def test_models_are_found_by_part_of_their_name() -> None:
    stock = inventory("SmolLM3-Q4_K_M.gguf", "SmolLM3-Q8_0.gguf", "other.gguf")
    assert [each.model.name for each in stock.search("q8")] == ["SmolLM3-Q8_0.gguf"]
    assert [each.model.name for each in stock.search(" OTHER.gguf ")] == ["other.gguf"]
    assert len(stock.search("smollm3")) == 2
    assert stock.search("") == stock.search("nothing") == []


@pytest.mark.parametrize(("name", "status"), [("demo", 204), ("no such thing", 404), ("", 404)])
def test_model_command_switches_or_reports_unknown_model(start: Start, name: str, status: int) -> None:
    server = start(ScriptedEngine(), model_registry=ModelRegistry(lambda path: ScriptedEngine(name="Another"))).ready()
    fields = {"model": name, "command": "model", "chat": ""}
    answer = server.client.post("/models/switch", data=fields, headers=FRAGMENT)
    assert answer.status_code == status
    if status == 204:
        assert answer.headers["HX-Redirect"] == "/"
        server.wait(lambda: server.shared.engine.info is not None and server.shared.engine.info.name == "Another")
    else:
        assert "Model not found" in answer.text


def test_stream_announces_the_word_count_of_the_answer(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask("Hello", thinking=False)
    server.finished(asked)
    told = "".join(event.data for event in server.stream(asked))
    assert "Answer finished, 7 words" in told
