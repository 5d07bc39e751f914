"""Stored responses, through OpenAI's client and through plain HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Engine, EngineError, Event, Message, ToolCall, ToolName
from notso.web.api.responses import stream
from notso.web.api.responses.request import parse_response_request
from notso.web.api.shared.api_request import IGNORED
from notso.web.store.sql import store
from notso.web.values.settings import Settings

Start = Callable[..., Any]
URL = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
TEXT = 'one\n\ndata: {"forged": true}\r\nevent: response.completed\u2028\x85two \u00e9\U0001f600\n\n'


def within(*tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "files", "description": "On disk.", "tools": [*tools]}


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def tricky(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say(TEXT, "Hm, \n\nlet me see." if thinking else "", piece=3)


def calls(messages: Sequence[Message], thinking: bool) -> list[Event]:
    if messages[-1].role == "tool":
        return say("It is 4.")
    first, second = ToolCall("call_1", "add", '{"a": 1}'), ToolCall("call_2", "sub", "{}")
    return [*say("Let me see."), Event("tool_call", tool_call=first), Event("tool_call", tool_call=second)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("responses"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


# OpenAI's client with the real engine


def test_openai_client_gets_response(served: Any) -> None:
    response = client_of(served).responses.create(model="notso-demo", input="Hello", temperature=0, metadata={"a": "b"})
    assert response.output_text and response.status == "completed" and response.id.startswith("resp_")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage and response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert response.metadata == {"a": "b"} and response.temperature == 0 and response.error is None


def test_previous_response_id_continues_conversation(served: Any) -> None:
    client = client_of(served)
    ask: dict[str, Any] = {"model": "notso-demo", "temperature": 0, "reasoning": {"effort": "none"}}
    first = client.responses.create(**ask, input="What is 2 + 3?")
    second = client.responses.create(**ask, input="And 4 + 4?", previous_response_id=first.id)
    conversation: list[Any] = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And 4 + 4?"},
    ]
    spelt_out = client.responses.create(**ask, input=conversation)
    assert second.output_text == spelt_out.output_text and second.previous_response_id == first.id
    assert second.usage and spelt_out.usage and second.usage.input_tokens == spelt_out.usage.input_tokens
    chat = client.chat.completions.create(
        model="notso-demo", temperature=0, reasoning_effort="none", messages=conversation
    )
    assert chat.choices[0].message.content == second.output_text, "both APIs must give the same answer"


def test_stream_matches_whole_response(served: Any) -> None:
    client = client_of(served)
    ask: dict[str, Any] = {"model": "notso-demo", "input": "Hello", "temperature": 0}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ends = [event.type for event in events if event.type in ("response.completed", "response.incomplete")]
    assert ends == ["response.completed"] and events[-1].type == "response.completed"
    stored = client.responses.retrieve(streamed.id)
    assert (stored.output_text, stored.usage, stored.status) == (streamed.output_text, streamed.usage, "completed")


def test_stored_response_can_be_retrieved_and_deleted(served: Any) -> None:
    client = client_of(served)
    kept = client.responses.create(model="notso-demo", input="Hello", max_output_tokens=5)
    assert kept.status == "incomplete" and kept.incomplete_details
    assert kept.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    client.responses.delete(kept.id)
    for lost in (kept.id, "resp_nobody", "x" * 300):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(lost)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="notso-demo", input="x", previous_response_id=lost[:200])
        assert caught.value.param == "previous_response_id"
    cleared = client.responses.create(model="notso-demo", input="Hello", max_output_tokens=5, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(cleared.id)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"type": "item_reference"}]}, "input.0.id"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
    ),
    ({"input": "x " * 9000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": True}, "temperature"),
    ({"background": "yes"}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"include": ["everything"]}, "include"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
    ({"tools": [{"type": "file_search"}]}, "tools.0.vector_store_ids"),
    ({"tools": [within(TOOL | {"type": "custom"})]}, "tools.0.tools.0.type"),
    ({"tools": [TOOL, within(*(TOOL | {"name": str(at)} for at in range(128)))]}, "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "sub"}, "tools": [TOOL]}, "tool_choice"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "middle"}, "truncation"),
    ({"seed": "one"}, "seed"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"messages": [{}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_request_error_names_field(served: Any, fields: dict[str, Any], param: str) -> None:
    answer = served.client.post(URL, json={"input": "Hello"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# Plain HTTP with a scripted engine


def test_input_items_are_converted_to_engine_request(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "add",
            "arguments": "{}",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    body = {"input": items, "instructions": "Be kind.", "tools": [TOOL], "truncation": "auto", "max_output_tokens": 9}
    choice = {"type": "function", "name": "add"}
    answer = server.client.post(URL, json=body | {"tool_choice": choice, "reasoning": {"effort": "low"}})
    assert answer.status_code == 200, answer.text
    asked = engine.requests[0]
    system, user, said, result = asked.messages
    assert (system.role, system.content, user.content) == ("system", "Be kind.", "one\ntwo")
    assert (said.content, said.reasoning_content, said.tool_calls) == ("Wait.", "Hm", (ToolCall("c1", "add", "{}"),))
    assert said.keep_reasoning, "reasoning stays in the prompt while its tool call is being answered"
    server.client.post(URL, json=body | {"input": [*items, {"role": "user", "content": "And?"}]})
    assert not any(message.keep_reasoning for message in engine.requests[-1].messages)
    assert (result.role, result.content, result.tool_call_id) == ("tool", "4", "c1")
    options = asked.options
    assert (options.tool_choice, options.when_full, options.priority) == (ToolName("add"), "drop_oldest", "api")
    assert (asked.params.thinking_budget, asked.params.max_tokens) == (256, 9)
    assert answer.json()["tool_choice"] == choice and answer.json()["tools"] == [TOOL | {"description": None}]


def test_response_has_all_fields_that_strict_clients_require(start: Start) -> None:
    """OpenRouter's clients and the types of Open Responses reject responses without them."""
    server = start(ScriptedEngine(tricky)).ready()
    bare = {"type": "function", "name": "add"}
    group = {"type": "namespace", "name": "files", "description": "Files.", "tools": [bare]}
    body = {"input": "Hi", "tools": [bare, group], "prompt_cache_key": "a", "safety_identifier": "b"}
    whole = server.client.post(URL, json=body).json()
    lines = re.findall(r"^data: (.*)$", server.client.post(URL, json=body | {"stream": True}).text, re.MULTILINE)
    first, last = (json.loads(lines[at])["response"] for at in (0, -1))
    assert first["completed_at"] is None
    for each in (whole, last):
        assert each["completed_at"] >= each["created_at"]
    for each in (whole, first, last):
        assert (each["frequency_penalty"], each["presence_penalty"], each["top_logprobs"]) == (0, 0, 0)
        assert (each["prompt_cache_key"], each["safety_identifier"], each["user"]) == ("a", "b", None)
        assert (each["temperature"], each["top_p"]) == (0.6, 0.95)
        tool = bare | {"description": None, "parameters": None, "strict": None}
        assert each["tools"] == [tool, group | {"tools": [tool]}]


def test_response_repeats_all_fields_of_its_format(start: Start) -> None:
    server = start(ScriptedEngine(lambda *_: say("{}"))).ready()
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    for given, repeated in (({}, (None, False)), ({"description": "An x.", "strict": True}, ("An x.", True))):
        body = {"input": "Hi", "text": {"format": format | given}}
        found = server.client.post(URL, json=body).json()["text"]["format"]
        assert found == format | dict(zip(("description", "strict"), repeated, strict=True))


def test_response_reports_sampling_defaults_of_model_file(start: Start) -> None:
    engine = ScriptedEngine()
    engine.info = replace(engine.info, sampling={"temperature": 0.25})
    found = start(engine).ready().client.post(URL, json={"input": "Hi", "top_p": 0.5}).json()
    assert (found["temperature"], found["top_p"]) == (0.25, 0.5)


def test_completed_at_is_when_response_ended_even_after_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage of a continued response covers only the process that ends it. A client that resumes a stream gets the
    same time again."""
    request = parse_response_request({"input": "Hi"})

    async def save(*_: object) -> None: ...

    monkeypatch.setattr(stream, "current_ms", lambda: 90_999)
    first = stream.ResponseSerializer(request, ScriptedEngine().info, "resp_1", save, 5)
    copies = first, first.fresh_copy()
    for each in copies:
        assert each.body()["completed_at"] is None
        list(each.feed(0, Event("end", finish_reason="stop")))
        assert (each.body()["created_at"], each.body()["completed_at"]) == (5, 90)
        monkeypatch.setattr(stream, "current_ms", lambda: 200_000)


def test_function_call_output_continues_from_tool_call(start: Start) -> None:
    engine = ScriptedEngine(calls)
    client = client_of(start(engine).ready())
    ask: dict[str, Any] = {"model": "scripted", "tools": [TOOL]}
    first = client.responses.create(**ask, input="2 + 2?", instructions="Be kind.")
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    call = first.output[1]
    assert call.type == "function_call" and (call.call_id, call.name, call.arguments) == ("call_1", "add", '{"a": 1}')
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
    with client.responses.stream(**ask, input=output, previous_response_id=first.id) as stream:
        list(stream)
        assert stream.get_final_response().output_text == "It is 4."
    roles = [message.role for message in engine.requests[-1].messages]
    assert roles == ["user", "assistant", "tool"], "instructions are not inherited from the previous response"
    assert [call.id for call in engine.requests[-1].messages[1].tool_calls] == ["call_1", "call_2"]


def test_namespace_is_returned_with_function_calls(start: Start) -> None:
    call = ToolCall("call_1", "files.add", '{"a": 1}')
    engine = ScriptedEngine(lambda messages, thinking: [Event("tool_call", tool_call=call)])
    client = client_of(start(engine).ready())
    described = TOOL | {"description": "Adds.", "strict": True}
    ask: dict[str, Any] = {"model": "scripted", "tools": [TOOL, within(described)]}
    with client.responses.stream(**ask, input="Add.") as stream:
        events = list(stream)
    (item,) = stream.get_final_response().output
    assert item.type == "function_call" and (item.name, item.namespace) == ("add", "files")
    begun = next(event.item for event in events if event.type == "response.output_item.added")
    assert begun.type == "function_call" and (begun.name, begun.namespace) == ("add", "files")
    whole = client.responses.create(**ask, input="Add.").output[0].to_dict()
    result = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
    past: Any = [{"role": "user", "content": "Add."}, whole, result]
    client.responses.create(**ask, input=past)
    asked = engine.requests[-1]
    assert asked.messages[1].tool_calls == (call,) and asked.options.strict_tools == ("files.add",)
    plain, ours = (each["function"] for each in asked.options.tools or ())
    assert (plain["name"], ours["name"]) == ("add", "files.add")
    assert ours["description"] == "On disk.\nAdds." and ours["parameters"] == plain["parameters"]


def test_unavailable_web_search_tool_is_ignored(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    search = {"type": "web_search", "external_web_access": True}
    for tools, offered in (([search], None), ([TOOL, search], ["add"])):
        answer = server.client.post(URL, json={"input": "Hello", "tools": tools})
        assert (answer.status_code, answer.headers[IGNORED]) == (200, "tools.type")
        given = engine.requests[-1].options.tools
        assert (given and [each["function"]["name"] for each in given]) == offered


def test_input_of_past_web_searches_is_answered_and_stored(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("Done."))
    server = start(engine).ready()
    ask = {"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}], "instructions": "Be brief."}
    answer = server.client.post(URL, json=ask)
    assert answer.status_code == 200, answer.text
    assert server.client.get(f"{URL}/{answer.json()['id']}").json()["status"] == "completed"
    server.client.post(URL, json={"input": "Next", "previous_response_id": answer.json()["id"]})
    assert [(each.role, each.content) for each in engine.requests[-1].messages] == [
        ("assistant", "Done."),
        ("user", "Next"),
    ]


def test_generated_text_cannot_forge_sse_events(start: Start) -> None:
    server = start(ScriptedEngine(tricky)).ready()
    with client_of(server).responses.stream(model="scripted", input="x") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == TEXT
        assert stream.get_final_response().output_text == TEXT
    text = server.client.post(URL, json={"input": "x", "stream": True}).text
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert names.count("response.completed") == 1 and names[-1] == "response.completed"
    for name, data in re.findall(r"^event: (.*)\ndata: (.*)$", text, re.MULTILINE):
        assert json.loads(data)["type"] == name


def test_output_text_includes_logprobs_on_request(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("Hello you", piece=3))).ready()
    whole = server.client.post(URL, json={"input": "x", "top_logprobs": 2}).json()
    (entry, *_) = listed = whole["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in listed] == ["Hel", "lo ", "you"] and len(entry["top_logprobs"]) == 2
    own = server.client.post(URL, json={"input": "x", "include": ["message.output_text.logprobs"]}).json()
    assert [each["top_logprobs"] for each in own["output"][0]["content"][0]["logprobs"]] == [[], [], []]


def test_engine_failure_ends_stream_with_failed_event(start: Start) -> None:
    server = start(ScriptedEngine(tricky, failure=EngineError("a logit was not finite"))).ready()
    text = server.client.post(URL, json={"input": "x", "stream": True}).text
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert names[-1] == "response.failed" and "response.completed" not in names
    failed = json.loads(text.rstrip().rpartition("\ndata: ")[2])["response"]
    assert failed["status"] == "failed" and failed["error"]["message"] == "a logit was not finite"
    assert server.client.get(f"{URL}/{failed['id']}").status_code == 404
    assert server.client.post(URL, json={"input": "x"}).status_code == 500


def test_named_conversation_response_is_stored_after_disconnect(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 60, piece=5), pace_seconds=0.01)
    server = start(engine).ready()
    text = ""
    with (
        httpx.Client(base_url=server.address, timeout=20) as client,
        client.stream("POST", URL, json={"input": "x", "stream": True}, headers={"X-Conversation-Id": "c1"}) as answer,
    ):
        for chunk in answer.iter_text():
            text += chunk
            if "output_text.delta" in text:
                break
    id = re.findall(r'"id":"(resp_\w+)"', text)[0]
    server.wait(lambda: server.client.get(f"{URL}/{id}").status_code == 200)
    assert server.client.get(f"{URL}/{id}").json()["output"][0]["content"][0]["text"] == "word " * 60
    assert server.client.get("/v1/stream?conv_id=c1").text.count("event: response.completed") == 1
    assert server.client.delete(f"{URL}/{id}").status_code == 200
    assert server.client.get("/v1/stream?conv_id=c1").text.count("event: response.completed") == 1
    assert server.client.get(f"{URL}/{id}").status_code == 404, "reading the stream again must not restore it"


def test_truncated_messages_stay_dropped_in_response_chain(start: Start) -> None:
    def script(messages: Any, thinking: bool) -> Any:
        if len(messages) > 5:
            yield Event("trimmed", dropped_messages=2)
        yield from say(f"answer {messages[-1].content}")

    engine = ScriptedEngine(script)
    server = start(engine).ready()
    by_item, by_field = [{"role": "system", "content": "Brief."}], {"instructions": "Brief."}
    for items, fields in ((by_item, {}), ([], by_field)):
        id = None
        for number in range(6):
            body = {"input": [*items, {"role": "user", "content": str(number)}], "truncation": "auto", **fields}
            id = server.client.post(URL, json=body | {"previous_response_id": id}).json()["id"]
            items = []
        read = [message.content for message in engine.requests[-1].messages]
        assert read == ["Brief.", "3", "answer 3", "4", "answer 4", "5"]


def test_continued_message_is_one_message_in_response_chain(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say(" sky is blue."))
    server = start(engine).ready()
    items = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because the"}]
    id = server.client.post(URL, json={"input": items}).json()["id"]
    server.client.post(URL, json={"input": "And at night?", "previous_response_id": id})
    read = [(message.role, message.content) for message in engine.requests[-1].messages]
    assert read == [("user", "Why?"), ("assistant", "Because the sky is blue."), ("user", "And at night?")]


def test_stored_responses_survive_restart_and_are_limited(
    start: Start, tmp_path: Path, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_RESPONSES", 3)
    settings = Settings(port=0, data_dir=tmp_path / "kept")
    first = type(shared)(ScriptedEngine, settings).ready()
    ids = [first.client.post(URL, json={"input": f"{number}"}).json()["id"] for number in range(5)]
    bodies = [first.client.get(f"{URL}/{id}") for id in ids]
    assert [body.status_code for body in bodies] == [404, 404, 200, 200, 200]
    first.close()
    engine = ScriptedEngine()
    second = type(shared)(lambda: engine, settings).ready()
    assert second.client.get(f"{URL}/{ids[-1]}").json() == bodies[-1].json()
    second.client.post(URL, json={"input": "more", "previous_response_id": ids[-1]})
    assert [message.content for message in engine.requests[0].messages][::2] == ["4", "more"]
    second.close()
