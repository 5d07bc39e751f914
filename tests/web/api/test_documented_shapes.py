"""Documented fields and shapes that clients send, and that have the same meaning in every API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from notso.smollm3 import Message, ToolName
from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.completions.fields import parse_text_request
from notso.web.api.llama_cpp.request import parse_native_request
from notso.web.api.messages.request import parse_message_request
from notso.web.api.ollama.fields import parse_chat as parse_ollama_chat
from notso.web.api.ollama.fields import parse_generate
from notso.web.api.responses.request import normalize_input, parse_response_request
from notso.web.edge.errors import ApiError

ASK: Any = {"role": "user", "content": "Hello"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TYPED: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
TOOLS: Any = [{"type": "function", "name": name} for name in ("f", "g")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}

ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (ChatCompletion, "/v1/chat/completions", {"messages": [ASK], "logprobs": True, "top_logprobs": 1}),
        (Completion, "/v1/completions", {"prompt": "Hello", "logprobs": 1}),
        (Response, "/v1/responses", {"input": "Hello", "include": ["message.output_text.logprobs"]}),
        (Response, "/v1/responses", {"input": "Hello", "background": True}),
        (
            anthropic.types.Message,
            "/v1/messages",
            {"messages": [ASK], "max_tokens": 9, "thinking": {"type": "adaptive"}},
        ),
        (CreateEmbeddingResponse, "/v1/embeddings", {"input": "Hello"}),
        (Model, "/v1/models/scripted", None),
        (anthropic.types.ModelInfo, "/v1/models/scripted", None),
    ],
)
def test_bodies_have_required_fields_of_clients(shared: Any, kind: Any, path: str, body: Any) -> None:
    """The clients do not validate bodies, so that reading a field that is missing raises AttributeError."""
    headers = ANTHROPIC if kind.__module__.startswith("anthropic") else {}
    found = shared.client.post(path, json=body) if body else shared.client.get(path, headers=headers)
    kind.model_validate(found.json())


def chat(*messages: Any) -> tuple[Message, ...]:
    return parse_chat_request({"messages": list(messages)}).messages


def responses(*items: Any, **fields: Any) -> Any:
    return parse_response_request({"input": list(items) or "Hello", **fields})


def message(**fields: Any) -> Any:
    return parse_message_request({"messages": [ASK], "max_tokens": 9, **fields})


def test_refusal_part_is_kept_in_prompt() -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    _, said, _ = chat(ASK, {"role": "assistant", "content": [{"type": "text", "text": "Well:"}, refusal]}, ASK)
    assert (said.role, said.content) == ("assistant", "Well:\nNo.")
    given = {"type": "message", "role": "assistant", "content": [refusal]}
    asked = responses(ASK, given, ASK)
    assert asked.messages[1].content == "No." and asked.hints == ()
    assert normalize_input(asked.items, "resp_0")[1]["content"] == [refusal]


def test_empty_content_list_is_empty_text() -> None:
    answer, result = {"role": "assistant", "content": [], "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1"}
    assert [each.content for each in chat(ASK, answer, result | {"content": []})] == ["Hello", "", ""]
    asked = responses(ASK, TYPED, {"type": "function_call_output", "call_id": "c1", "output": []})
    assert (asked.messages[-1].role, asked.messages[-1].content) == ("tool", "")
    for parse in (chat, responses):
        with pytest.raises(ApiError):
            parse({"role": "user", "content": []})


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": list(tools)}}


def test_responses_allowed_tools_limits_offered_tools() -> None:
    search = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    only_g = {"type": "function", "name": "g"}
    for mode, choice in (("auto", "auto"), ("required", "required")):
        asked = responses(tools=[*TOOLS, search], **allowed(mode, only_g))
        assert [tool["function"]["name"] for tool in asked.options.tools] == ["g"]
        assert asked.options.tool_choice == choice and asked.search is None
    both = responses(tools=[*TOOLS, search], **allowed("auto", only_g, {"type": "file_search"}))
    assert both.search is not None and len(both.options.tools) == 1
    searches = responses(tools=[*TOOLS, search], **allowed("required", {"type": "file_search"}))
    assert searches.search is not None and searches.options.tools is None and searches.options.tool_choice == "auto"
    assert responses(tools=TOOLS, tool_choice=only_g).options.tool_choice == ToolName("g")
    for wrong in ({"type": "function", "name": "h"}, {"type": "file_search"}, {"type": "mcp", "server_label": "x"}):
        with pytest.raises(ApiError) as error:
            responses(tools=TOOLS, **allowed("auto", wrong))
        assert str(error.value.param).startswith("tool_choice")


def test_past_web_search_call_is_left_out_of_prompt() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    asked = responses(ASK, search, {"role": "assistant", "content": "Found."}, ASK)
    assert [each.content for each in asked.messages] == ["Hello", "Found.", "Hello"] and asked.hints == ()
    assert normalize_input(asked.items, "resp_0")[1]["type"] == "web_search_call"


def test_items_of_other_servers_tools_are_left_out_of_prompt_and_reported() -> None:
    items = [
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "docs", "tools": [{"name": "search"}]},
        {"type": "mcp_call", "server_label": "docs", "name": "search", "arguments": "{}", "output": "x", "error": None},
        {"type": "image_generation_call", "id": "ig_1", "result": "AAAA", "status": "completed", "size": "1024x1024"},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c", "outputs": None},
        {"type": "mcp_call", "id": "mcp_2", "server_label": "docs", "name": "search", "arguments": "{}", "output": "y"},
    ]
    asked = responses(ASK, *items, {"role": "assistant", "content": "Found."}, ASK)
    assert [each.content for each in asked.messages] == ["Hello", "Found.", "Hello"]
    left_out = ["mcp_list_tools", "mcp_call", "image_generation_call", "code_interpreter_call"]
    assert [each.name for each in asked.hints] == left_out
    assert all(each["id"] for each in normalize_input(asked.items, "resp_0"))


def test_past_calls_of_custom_tools_stay_in_prompt() -> None:
    # Codex sends them if a session that began with another model is continued.
    patch = {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** Begin Patch"}
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done."}
    asked = responses(ASK, patch | {"status": "completed"}, output, ASK)
    (call,) = asked.messages[1].tool_calls
    assert (call.id, call.name, call.arguments) == ("call_1", "apply_patch", '{"input": "*** Begin Patch"}')
    assert [(each.role, each.content) for each in asked.messages[2:]] == [("tool", "Done."), ("user", "Hello")]
    assert asked.hints == () and all(each["id"] for each in normalize_input(asked.items, "resp_0"))


def test_items_may_have_no_type_content_or_reasoning_kind() -> None:
    answer = {"type": "message", "role": "assistant", "content": [], "status": "incomplete"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "Hm."}]}
    asked = responses({"type": None, **ASK}, reasoning, answer, ASK)
    assert [(each.content, each.reasoning_content) for each in asked.messages] == [
        ("Hello", None),
        ("", "Hm."),
        ("Hello", None),
    ]
    assert asked.hints == () and normalize_input(asked.items, "resp_0")[0]["type"] == "message"


def test_compaction_is_reported_as_ignored() -> None:
    compaction = {"type": "compaction", "compact_threshold": 100_000}
    assert [each.name for each in responses(context_management=[compaction]).hints] == ["context_management"]
    edits = {"edits": [{"type": "compact_20260112"}]}
    assert [each.name for each in message(context_management=edits).hints] == ["context_management.edits.type"]
    with pytest.raises(ApiError):
        responses(context_management=[{"type": "other"}])


def test_error_names_path_of_missing_or_invalid_field() -> None:
    with pytest.raises(ApiError, match=r"tools\.0\.name is required"):
        responses(tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(ApiError, match=r"input\.0\.content\.0\.type must be input_text, .* or refusal"):
        responses({"role": "user", "content": [{"type": "input_video"}]})


def test_deprecated_output_format_sets_grammar() -> None:
    given = {"type": "json_schema", "schema": SCHEMA}
    older, newer = message(output_format=given), message(output_config={"format": given})
    assert older.options.grammar == newer.options.grammar is not None and older.hints == ()
    assert message(output_format=given, output_config={"format": given}).options == newer.options
    with pytest.raises(ApiError, match="aliases"):
        message(output_format=given, output_config={"format": given | {"schema": {}}})
    deep: Any = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ApiError) as error:
        message(output_format=given | {"schema": deep})
    assert error.value.param == "output_format.schema"


def test_input_examples_are_added_to_tool_schema() -> None:
    tool = {"name": "f", "input_schema": SCHEMA}
    asked = message(tools=[tool | {"input_examples": [{"a": True}]}])
    assert asked.options.tools[0]["function"]["parameters"] == SCHEMA | {"examples": [{"a": True}]}
    assert message(tools=[tool | {"input_examples": []}]).options == message(tools=[tool]).options


def test_direct_callers_and_global_geo_are_accepted() -> None:
    tool = {"name": "f", "input_schema": SCHEMA}
    callers = ["direct", "code_execution_20250825"]
    asked = message(tools=[tool | {"allowed_callers": callers}], inference_geo="global")
    assert asked.options == message(tools=[tool]).options and asked.hints == ()


GREEDY: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (parse_chat_request, {"messages": [ASK], "top_p": 0}),
    (parse_text_request, {"prompt": "Hello", "top_p": 0}),
    (parse_native_request, {"prompt": "Hello", "top_p": 0}),
    (parse_response_request, {"input": "Hello", "top_p": 0}),
    (parse_message_request, {"messages": [ASK], "max_tokens": 9, "top_p": 0, "top_k": 5}),
    (parse_ollama_chat, {"messages": [ASK], "options": {"top_p": 0.0, "top_k": 5}}),
]


@pytest.mark.parametrize(("parse", "body"), GREEDY)
def test_a_top_p_of_0_is_greedy_in_every_api(parse: Callable[..., Any], body: dict[str, Any]) -> None:
    (params,) = parse(body).params
    assert params.top_k == 1


@pytest.mark.parametrize(("parse", "body"), GREEDY)
def test_sampling_parameters_have_the_same_names_in_every_api(parse: Callable[..., Any], body: dict[str, Any]) -> None:
    sent: dict[str, Any] = {"seed": 7, "min_p": 0.125, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sent |= {"repeat_penalty": 1.5, "repeat_last_n": -1, "typical_p": 0.75, "top_k": -1, "top_p": 0.5}
    stop = {"stop_sequences" if parse is parse_message_request else "stop": ["x"]}
    asked = parse(body | ({"options": sent | stop} if parse is parse_ollama_chat else sent | stop))
    (params,) = asked.params
    assert (params.seed, params.min_p, params.presence_penalty, params.frequency_penalty) == (7, 0.125, 0.5, 0.25)
    assert (params.repetition_penalty, params.penalty_window, params.typical_p) == (1.5, 0, 0.75)
    assert (params.top_k, params.top_p, params.stop) == (0, 0.5, ("x",))
    assert not asked.hints


FUNCTION: Any = {"name": "f", "description": "Do it", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMESPACE: Any = {"type": "namespace", "name": "n", "description": "Do it", "tools": []}


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat_request, {"messages": [ASK], "tools": [TOOL]}),
        (parse_ollama_chat, {"messages": [ASK], "tools": [TOOL]}),
        (parse_response_request, {"input": "Hello", "tools": [{"type": "function"} | FUNCTION]}),
        (
            parse_response_request,
            {
                "input": "Hello",
                "tools": [NAMESPACE | {"tools": [{"type": "function"} | FUNCTION | {"description": None}]}],
            },
        ),
        (
            parse_message_request,
            {
                "messages": [ASK],
                "max_tokens": 9,
                "tools": [{"name": "f", "description": "Do it", "input_schema": SCHEMA}],
            },
        ),
    ],
)
def test_tools_of_every_api_have_the_order_of_fields_that_the_model_knows(parse: Any, body: Any) -> None:
    """The template prints fields in their order, and models have seen the description before the parameters."""
    (tool,) = parse(body).options.tools
    assert [*tool] == ["type", "function"] and [*tool["function"]] == ["name", "description", "parameters"]


@pytest.mark.parametrize("parse", [parse_text_request, parse_native_request])
def test_guided_decoding_backend_is_reported_as_hint(parse: Callable[..., Any]) -> None:
    asked = parse({"prompt": "Hello", "guided_choice": ["a", "b"], "guided_decoding_backend": "xgrammar"})
    assert asked.options.grammar is not None and [each.name for each in asked.hints] == ["guided_decoding_backend"]


def test_ollama_tool_call_arguments_may_be_null() -> None:
    call = {"function": {"name": "f", "arguments": None}}
    asked = parse_ollama_chat({"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
    assert json.loads(asked.prompts[0][1].tool_calls[0].arguments) == {}  # type: ignore[union-attr]


def test_ollama_raw_prompt_rejects_context() -> None:
    assert parse_generate({"prompt": "x", "raw": True, "context": []}).prompts == ("x",)
    with pytest.raises(ApiError, match="context cannot be combined with raw"):
        parse_generate({"prompt": "x", "raw": True, "context": [1]})


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens"])
def test_llama_cpp_thinking_budget_aliases_are_accepted(name: str) -> None:
    def budget(**fields: Any) -> Any:
        asked = parse_chat_request({"messages": [ASK], **fields})
        assert asked.options.thinking and asked.hints == ()
        return asked.params[0].thinking_budget

    assert (budget(**{name: 7}), budget(**{name: 0}), budget(**{name: -1})) == (7, 0, None)
    assert budget(**{name: -1, "reasoning_effort": "low"}) == 256
    with pytest.raises(ApiError):
        budget(**{name: -2})


def test_llama_cpp_special_values_keep_meaning() -> None:
    def native(**fields: Any) -> Any:
        return parse_native_request({"prompt": "x", **fields})

    for seed in (-1, 0xFFFFFFFF):  # llama.cpp's default seed, which its responses report: random
        assert native(seed=seed).params[0].seed is None
    assert native(seed=0xFFFFFFFE).params[0].seed == 0xFFFFFFFE
    assert native(stop=["", "end"]).params[0].stop == ("end",) and native(stop="").params[0].stop == ()
    assert native(image_data=[]).pieces == (("x",),)
    with pytest.raises(ApiError, match="reads text only"):
        native(image_data=[{"data": "aGk=", "id": 12}])
