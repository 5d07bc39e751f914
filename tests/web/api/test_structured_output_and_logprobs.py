"""Structured output and log probabilities on the demo model, parsed by the helpers of the clients."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from notso.smollm3 import Engine

HELLO: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
CHAT = "/v1/chat/completions"
AT_ONCE: dict[str, Any] = {"model": "notso-demo", "messages": HELLO, "reasoning_effort": "none"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("paint", colour={"enum": ["red", "blue"]})]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("held"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


class Sum(BaseModel):
    """The requested object. Its numbers are bounded, because a small model might never end one."""

    model_config = ConfigDict(extra="forbid")
    left: Annotated[int, Field(ge=0, le=99)]
    sign: Literal["+", "-"]
    right: Annotated[int, Field(ge=0, le=99)]


@pytest.mark.parametrize("effort", ["none", "low"])
def test_openai_parse_helpers_return_requested_model(served: Any, effort: Literal["none", "low"]) -> None:
    client = client_of(served)
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="notso-demo", messages=HELLO, response_format=Sum, seed=seed, reasoning_effort=effort
        )
        assert isinstance(answer.choices[0].message.parsed, Sum) and answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="notso-demo", input="2 + 3", text_format=Sum, reasoning={"effort": effort})
    assert isinstance(response.output_parsed, Sum)


def test_streamed_json_matches_schema_and_whole_answer(served: Any) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    ask: dict[str, Any] = AT_ONCE | {"response_format": wanted, "seed": 5}
    whole = client_of(served).chat.completions.create(**ask).choices[0].message.content
    chunks = client_of(served).chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    listed = json.loads(whole or "")
    assert 2 <= len(listed) <= 4 and set(listed) <= {"a", "b"}


def test_json_object_format_returns_object_unless_truncated(served: Any) -> None:
    for seed in range(4):
        ask = AT_ONCE | {"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 200}
        choice = client_of(served).chat.completions.create(**ask).choices[0]
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


def test_anthropic_output_format_and_tool_choice_are_enforced(served: Any) -> None:
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
    schema = Sum.model_json_schema()
    message = client.messages.create(
        model="notso-demo",
        max_tokens=200,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    (block,) = message.content
    assert block.type == "text" and Sum.model_validate_json(block.text)
    called = client.messages.create(
        model="notso-demo",
        max_tokens=200,
        messages=HELLO,
        tools=[{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
        tool_choice={"type": "any"},
    )
    assert called.stop_reason == "tool_use"
    assert all(block.type == "tool_use" and block.input.keys() == {"a", "b"} for block in called.content)


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_choice_returns_valid_call(served: Any, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "paint"}}
    for choice, names in (("required", {"add", "paint"}), (named, {"paint"})):
        ask: dict[str, Any] = AT_ONCE | {"tools": TOOLS, "tool_choice": choice, "seed": 1, "max_tokens": 300}
        ask["parallel_tool_calls"] = False
        if stream:
            chunks = list(client_of(served).chat.completions.create(**ask, stream=True))
            call, *more = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            call.function.arguments += "".join(part.function.arguments for part in more)
            assert call.id and not any(part.id or part.function.name for part in more)
            reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
            assert reasons == ["tool_calls"]
        else:
            answer = client_of(served).chat.completions.create(**ask).choices[0]
            (call,) = answer.message.tool_calls or []
            assert answer.finish_reason == "tool_calls" and not answer.message.content
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        expected = {"add": {"a", "b"}, "paint": {"colour"}}[call.function.name]
        assert arguments.keys() == expected and arguments.get("colour", "red") in ("red", "blue")


def test_unenforceable_schema_error_names_field(served: Any) -> None:
    def schema(source: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": source}}}

    deep: dict[str, Any] = {}
    for _ in range(17):
        deep = {"properties": {"a": deep}}
    bad_tool = [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}]
    rows: list[tuple[dict[str, Any], str]] = [
        (schema({"type": "foo"}), "response_format"),
        (schema({"$dynamicRef": "#x"}), "response_format"),
        (schema(deep), "response_format.json_schema.schema"),
        (schema({"type": "string", "pattern": "(((((((((("}), "response_format"),
        ({"tools": bad_tool, "tool_choice": "required"}, "tools"),
    ]
    for fields, param in rows:
        error = served.client.post(CHAT, json=AT_ONCE | fields)
        assert error.status_code == 400 and error.json()["error"]["param"] == param, error.text


def test_error_about_begun_answer_names_field_with_messages(served: Any) -> None:
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "5"}]
    schema = {"type": "object"}
    asked: dict[str, Any] = {
        CHAT: {"messages": begun, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "/v1/messages": {
            "messages": begun,
            "max_tokens": 9,
            "output_format": {"type": "json_schema", "schema": schema},
        },
        "/v1/responses": {"input": begun, "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
    }
    for path, body in asked.items():
        error = served.client.post(path, json=body).json()["error"]
        assert error["param"] == ("input" if path == "/v1/responses" else "messages")
        assert error["message"] == "the text so far does not match the grammar"


def test_logprobs_are_model_probabilities_before_logit_bias(served: Any) -> None:
    ask: dict[str, Any] = AT_ONCE | {"logprobs": True, "top_logprobs": 5, "max_tokens": 12}
    answer = client_of(served).chat.completions.create(**ask, temperature=0)
    greedy = answer.choices[0]
    assert greedy.logprobs and greedy.logprobs.content
    said = b"".join(bytes(entry.bytes or []) for entry in greedy.logprobs.content)
    assert said.decode() == f"{greedy.message.content}<|im_end|>", "the end-of-answer token has an entry too"
    assert answer.usage and len(greedy.logprobs.content) == answer.usage.completion_tokens
    for entry in greedy.logprobs.content:
        assert len(entry.top_logprobs) == 5 and entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1.0001
    biased = (
        client_of(served)
        .chat.completions.create(**ask | {"max_tokens": 1}, temperature=0, logit_bias={"5": 100})
        .choices[0]
    )
    assert biased.logprobs and biased.logprobs.content and biased.logprobs.content[0].logprob < -5, "before logit bias"


def test_streamed_logprobs_match_whole_answer(served: Any) -> None:
    ask: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "seed": 2, "max_tokens": 80}
    whole = served.client.post(CHAT, json=ask).json()["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for chunk in client_of(served).chat.completions.create(model="notso-demo", **ask, stream=True):
        told = chunk.choices[0].to_dict().get("logprobs") or {}
        for name, listed in streamed.items():
            listed += told.get(name) or []  # type: ignore[attr-defined]
    assert streamed["content"] == whole["content"] and streamed["reasoning_content"] == whole["reasoning_content"]
    assert whole["reasoning_content"] and whole["content"][-1]["token"] == "<|im_end|>"


def test_reasoning_has_one_logprob_entry_per_token(served: Any) -> None:
    """Reasoning has one entry per token, including its end tag. The Responses API returns entries only for the other
    tokens."""
    ask: dict[str, Any] = {"model": "notso-demo", "temperature": 0}
    told = served.client.post(CHAT, json=ask | {"messages": HELLO, "logprobs": True, "max_tokens": 200}).json()
    logprobs, usage = told["choices"][0]["logprobs"], told["usage"]
    thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(logprobs["reasoning_content"]) == thoughts > 1 and logprobs["content"]
    assert len(logprobs["content"]) == usage["completion_tokens"] - thoughts
    asked = ask | {"input": HELLO, "include": ["message.output_text.logprobs"], "max_output_tokens": 200}
    told = served.client.post("/v1/responses", json=asked).json()
    [part] = next(item["content"] for item in told["output"] if item["type"] == "message")
    usage = told["usage"]
    assert len(part["logprobs"]) == usage["output_tokens"] - usage["output_tokens_details"]["reasoning_tokens"]


def test_text_completion_has_one_logprob_entry_per_token(served: Any) -> None:
    answer = client_of(served).completions.create(model="notso-demo", prompt="2 + 3", logprobs=3, temperature=0)
    told = answer.choices[0].logprobs
    assert told and told.tokens and told.token_logprobs and told.top_logprobs
    assert "".join(told.tokens) == f"{answer.choices[0].text}<|im_end|>"
    assert answer.usage and len(told.tokens) == answer.usage.completion_tokens
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())


def test_parallel_tool_calls_false_limits_answer_to_one_call(served: Any) -> None:
    for seed in range(3):
        ask: dict[str, Any] = AT_ONCE | {"tools": TOOLS, "parallel_tool_calls": False, "seed": seed, "max_tokens": 100}
        assert len(client_of(served).chat.completions.create(**ask).choices[0].message.tool_calls or []) <= 1
