"""Operations on stored and background responses, through OpenAI's client."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, EngineError, Event, Message, ToolCall
from notso.web.api.shared import resumable
from notso.web.chat.library import clear_stale_caches
from notso.web.values.errors import EngineUnavailableError, StorageError, StorageFullError

Start = Callable[..., Any]
URL = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("stored"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


def calls(messages: Any, thinking: bool) -> list[Event]:
    if messages[-1].role == "tool":
        return say("It is 4.")
    return [*say("Let me see.", "Hm."), Event("tool_call", tool_call=ToolCall("call_1", "add", '{"a": 1}'))]


# Items


def test_item_reference_replaces_full_item(start: Start) -> None:
    engine = ScriptedEngine(calls)
    client = client_of(start(engine).ready())
    ask: dict[str, Any] = {"model": "scripted", "tools": [TOOL]}
    first = client.responses.create(**ask, input="2 + 2?")
    (question,) = client.responses.input_items.list(first.id).data
    output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
    named: Any = [{"type": "item_reference", "id": item.id} for item in (question, *first.output)]
    named[1].pop("type")  # the type may be omitted
    second = client.responses.create(**ask, input=[*named, output])
    assert second.output_text == "It is 4."
    told: Any = [question.to_dict(), *(item.to_dict() for item in first.output), output]
    client.responses.create(**ask, input=told)
    assert engine.requests[-1].messages == engine.requests[-2].messages
    assert [message.role for message in engine.requests[-1].messages] == ["user", "assistant", "tool"]
    assert engine.requests[-1].messages[1] == Message(
        "assistant", "Let me see.", "Hm.", (ToolCall("call_1", "add", '{"a": 1}'),), keep_reasoning=True
    )
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in listed[:4]] == [question.id, *(item.id for item in first.output)]


def test_invalid_item_reference_is_rejected(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    kept = server.client.post(URL, json={"input": "x"}).json()["output"][0]["id"]
    lost = server.client.post(URL, json={"input": "x", "store": False}).json()["output"][0]["id"]
    user = {"role": "user", "content": "x"}
    for ids, status, param in (
        ([lost], 404, "input.1.id"),
        (["msg_1"], 404, "input.1.id"),
        ([f"{kept}00"], 404, "input.1.id"),
        ([kept, kept], 400, "input.2.id"),
        ([5], 400, "input.1.id"),
    ):
        names = [{"type": "item_reference", "id": id} for id in ids]
        for path in (URL, f"{URL}/input_tokens"):
            answer = server.client.post(path, json={"input": [user, *names]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_item_references_are_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine()).ready()
    monkeypatch.setattr("notso.web.api.responses.request.MAX_REFERENCED_RESPONSES", 1)
    ids = [server.client.post(URL, json={"input": "x"}).json()["output"][0]["id"] for _ in range(2)]
    names = [{"type": "item_reference", "id": id} for id in ids]
    assert server.client.post(URL, json={"input": names}).status_code == 400
    monkeypatch.setattr("notso.web.api.responses.request.MAX_REFERENCED_CHARACTERS", 5)
    assert server.client.post(URL, json={"input": names[:1]}).status_code == 400


def test_input_items_are_listed_in_pages(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    client = client_of(server)
    items: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": "Yes?"},
        {"type": "reasoning", "id": "rs_mine", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    response = client.responses.create(model="scripted", input=items)
    # the client fetches page after page
    listed = list(client.responses.input_items.list(response.id, limit=2, order="asc"))
    assert [item.type for item in listed] == [item.get("type", "message") for item in items]
    assert len({item.id for item in listed}) == 6 and listed[3].id == "rs_mine"
    assert listed[0].to_dict() == {
        "id": listed[0].id,
        "type": "message",
        "role": "system",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Be kind."}],
    }
    assert listed[2].to_dict()["content"] == [
        {"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}
    ]
    page = client.responses.input_items.list(response.id)
    assert [item.id for item in page.data] == [item.id for item in reversed(listed)] and not page.has_more
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"before": "x"}):
        answer = server.client.get(f"{URL}/{response.id}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_nobody")


def test_input_tokens_matches_response_usage(served: Any) -> None:
    client = client_of(served)
    first = client.responses.create(model="notso-demo", input="Hello", max_output_tokens=5)
    more: list[dict[str, Any]] = [
        {},
        {"instructions": "Be kind."},
        {"tools": [TOOL]},
        {"reasoning": {"effort": "none"}},
        {"previous_response_id": first.id},
    ]
    for fields in more:
        counted = client.responses.input_tokens.count(model="notso-demo", input="And?", **fields)
        answered = client.responses.create(model="notso-demo", input="And?", max_output_tokens=1, **fields)
        assert answered.usage and counted.input_tokens == answered.usage.input_tokens, fields
    assert counted.object == "response.input_tokens"
    for bad, param in (({}, "input"), ({"input": "x", "tools": 5}, "tools")):
        answer = served.client.post(f"{URL}/input_tokens", json=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# In the background


def polled(server: Any, client: openai.OpenAI, id: str, *statuses: str) -> Any:
    server.wait(lambda: client.responses.retrieve(id).status in statuses)
    return client.responses.retrieve(id)


def test_background_response_can_be_polled(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("one two three"))
    engine.gate.clear()
    server = start(engine).ready()
    client = client_of(server)
    begun = client.responses.create(model="scripted", input="Hello", background=True)
    waiting = client.responses.create(model="scripted", input="Hello", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    polled(server, client, begun.id, "in_progress")
    assert client.responses.retrieve(waiting.id).status == "queued"
    assert [item.type for item in client.responses.input_items.list(waiting.id).data] == ["message"]
    engine.gate.set()
    whole = polled(server, client, begun.id, "completed")
    assert whole.output_text == "one two three" and whole.usage and whole.usage.output_tokens > 0
    polled(server, client, waiting.id, "completed")
    after = client.responses.create(model="scripted", input="On", previous_response_id=begun.id)
    assert after.output_text and [message.content for message in engine.requests[-1].messages][:2] == [
        "Hello",
        "one two three",
    ]
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_background_stream_resumes_after_event(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("one two three four", "Hm."))
    engine.gate.clear()
    server = start(engine).ready()
    client = client_of(server)
    seen: list[Any] = []
    with client.responses.create(model="scripted", input="Hello", background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.in_progress":
                break
    assert [event.type for event in seen] == ["response.created", "response.queued", "response.in_progress"]
    engine.gate.set()
    id = seen[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number))
    again = list(client.responses.retrieve(id, stream=True))
    assert [event.to_dict() for event in [*seen, *rest]] == [event.to_dict() for event in again]
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert again[-1].type == "response.completed" and again[-1].response.output_text == "one two three four"
    with client.responses.stream(response_id=id) as helper:
        assert helper.get_final_response().output_text == "one two three four"


def test_background_response_can_be_cancelled(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 2000, piece=5), pace_seconds=0.005)
    server = start(engine).ready()
    client = client_of(server)
    begun = client.responses.create(model="scripted", input="Hello", background=True)
    waiting = client.responses.create(model="scripted", input="Hello", background=True)
    polled(server, client, begun.id, "in_progress")
    assert client.responses.cancel(waiting.id).status == "cancelled"
    server.wait(lambda: client.responses.retrieve(begun.id).output)
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled" and cancelled.output_text and cancelled.incomplete_details is None
    assert client.responses.cancel(begun.id) == client.responses.retrieve(begun.id) == cancelled
    server.wait(lambda: engine.stats().running == 0)
    third = client.responses.create(model="scripted", input="Hello", background=True)
    client.responses.delete(third.id)
    server.wait(lambda: engine.stats().running == 0)
    assert server.client.get(f"{URL}/{third.id}").status_code == 404


def test_failed_background_response_reports_error(start: Start) -> None:
    server = start(ScriptedEngine(failure=EngineError("a logit was not finite"))).ready()
    client = client_of(server)
    begun = client.responses.create(model="scripted", input="Hello", background=True)
    failed = polled(server, client, begun.id, "failed")
    assert failed.error.message == "a logit was not finite"
    server.on_loop(lambda: server.api.resumable_streams.forget("local", begun.id))
    assert client.responses.retrieve(begun.id) == failed, "the failed response is stored"
    assert [item.type for item in client.responses.input_items.list(begun.id).data] == ["message"]
    answer = server.client.post(URL, json={"input": "On", "previous_response_id": begun.id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    client.responses.delete(begun.id)
    assert server.client.get(f"{URL}/{begun.id}").status_code == 404


def test_background_response_fails_if_its_events_cannot_be_converted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(resumable, "serialize_event", refuse)
    server = start(ScriptedEngine(lambda messages, thinking: say("So."))).ready()
    client = client_of(server)
    begun = client.responses.create(model="scripted", input="Hello", background=True)
    failed = polled(server, client, begun.id, "failed")
    assert failed.error.message == "no thread can be started at the moment"
    server.on_loop(lambda: server.api.resumable_streams.forget("local", begun.id))
    assert client.responses.retrieve(begun.id) == failed, "the failed response is stored"


def test_background_response_that_cannot_be_stored_is_forgotten(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: object) -> None:
        raise StorageFullError("the disk is full")

    engine = ScriptedEngine(lambda messages, thinking: say("word " * 1000), pace_seconds=0.01)
    server = start(engine).ready()
    monkeypatch.setattr(server.shared.store.records, "add_unfinished_response", refuse)
    answer = server.client.post(URL, json={"input": "Hello", "background": True})
    assert answer.status_code >= 500 and "the disk is full" in answer.json()["error"]["message"]
    server.wait(lambda: engine.stats().running == 0 and not server.api.background._own_ids)


def test_background_response_whose_storing_failed_late_is_not_continued(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 1000), pace_seconds=0.01)
    server = start(engine).ready()
    records, background = server.shared.store.records, server.api.background
    add = records.add_unfinished_response

    async def lose_reply(*arguments: Any) -> None:
        await add(*arguments)
        raise StorageError("the connection was lost after the commit")

    monkeypatch.setattr(records, "add_unfinished_response", lose_reply)
    assert server.client.post(URL, json={"input": "Hello", "background": True}).status_code == 503
    server.wait(lambda: engine.stats().running == 0 and not background._own_ids)
    assert server.on_loop(lambda: records.claim_unfinished_response(background._holder, [], 0)) is None


def test_background_operations_on_plain_response_are_rejected(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    client = client_of(server)
    plain = client.responses.create(model="scripted", input="Hello")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(plain.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_nobody")
    for query, param in (
        ({"stream": "true"}, "stream"),
        ({"stream": "yes"}, "stream"),
        ({"starting_after": 1}, "starting_after"),
        ({"whole": "true"}, "whole"),
    ):
        answer = server.client.get(f"{URL}/{plain.id}", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    kept = client.responses.with_raw_response.retrieve(plain.id, include=["message.output_text.logprobs"])
    assert kept.headers["x-notso-ignored"] == "include[]" and kept.parse() == plain
    answer = server.client.post(URL, json={"input": "x", "background": True, "store": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
    named = server.client.post(URL, json={"input": "x", "background": True}, headers={"X-Conversation-Id": "c"})
    assert (named.status_code, named.json()["error"]["param"]) == (400, "x-conversation-id")


def test_background_response_is_regenerated_after_crash(start: Start, tmp_path: Path) -> None:
    """The response is generated again from its request and seed, so its text and id stay the same."""
    gate = threading.Event()

    def held(messages: object, thinking: bool) -> Iterator[Event]:
        yield Event("text", text="one ")
        assert gate.wait(60)
        yield Event("text", text="two")

    server = start(ScriptedEngine(held)).ready()
    client = client_of(server)
    body = json.dumps({"input": "Hello", "background": True}).encode("utf-16")
    answer = server.client.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    begun = client.responses.retrieve(answer.json()["id"])
    dropped = client.responses.create(model="scripted", input="Hello", background=True)
    client.responses.cancel(dropped.id)
    server.wait(lambda: client.responses.retrieve(begun.id).status == "in_progress")
    # the store as a crash would leave it
    shutil.copytree(tmp_path / "data", tmp_path / "after", ignore=shutil.ignore_patterns("*lock*"))
    gate.set()
    loading = threading.Event()

    def load() -> ScriptedEngine:
        assert loading.wait(60)
        return engine

    engine = ScriptedEngine(held)
    again = start(load, data_dir=tmp_path / "after")
    other = client_of(again)
    assert other.responses.retrieve(begun.id).status == "queued", "the response can be retrieved while the model loads"
    loading.set()
    again.wait(lambda: other.responses.retrieve(begun.id).status == "completed")
    found = other.responses.retrieve(begun.id)
    assert (found.output_text, found.created_at) == ("one two", begun.created_at)
    assert len(engine.requests) == 1, "the cancelled response is not run again"
    again.wait(lambda: again.on_loop(lambda: again.shared.store.records.unfinished_response("local", begun.id)) is None)


@pytest.mark.parametrize("error", [EngineUnavailableError("no engine"), RuntimeError("can't start new thread")])
def test_cached_prompt_of_deleted_response_is_cleared_when_the_engine_is_reachable(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    client = client_of(server)
    kept, deleted = (client.responses.create(model="scripted", input="Hello").id for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "clear_cache", Mock(side_effect=error))
        client.responses.delete(deleted)
    for each, status in ((kept, 200), (deleted, 404)):
        assert server.client.get(f"{URL}/{each}").status_code == status
    for _ in range(2):
        server.on_loop(lambda: clear_stale_caches(server.shared.store, server.shared.engine))
    assert engine.cleared == [("local", deleted)]
