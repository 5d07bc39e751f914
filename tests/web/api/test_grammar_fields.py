"""Grammar fields of llama.cpp's and vLLM's clients, and the response header that names ignored schema keywords."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from notso.smollm3 import Engine, Grammar, RequestOptions, ToolName
from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.completions.fields import parse_text_request
from notso.web.api.messages.request import parse_message_request
from notso.web.api.responses.request import parse_response_request
from notso.web.api.shared.api_request import IGNORED, MAX_NAMES, ApiRequest, ignored_headers
from notso.web.edge.errors import ApiError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
GBNF, LARK = 'root ::= "yes" | "no"', 'start: "yes" | "no"'
SPELT: list[tuple[dict[str, Any], Grammar]] = [
    ({"grammar": GBNF}, Grammar("gbnf", GBNF)),
    ({"grammar": LARK}, Grammar("lark", LARK)),
    ({"guided_grammar": GBNF}, Grammar("gbnf", GBNF)),
    ({"ebnf": GBNF}, Grammar("gbnf", GBNF)),
    ({"grammar_string": GBNF}, Grammar("gbnf", GBNF)),
    ({"json_schema": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"regex": "[0-9]{3}"}, Grammar("regex", "[0-9]{3}")),
    ({"guided_regex": "[0-9]{3}"}, Grammar("regex", "[0-9]{3}")),
    ({"choice": ["yes", "no"]}, Grammar("choice", '["yes", "no"]')),
    ({"guided_choice": ["yes", "no"]}, Grammar("choice", '["yes", "no"]')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, Grammar("regex", "[0-9]{3}")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes", "no"]')),
    ({"structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
]


@pytest.mark.parametrize(("fields", "grammar"), SPELT, ids=str)
def test_grammar_field_aliases_set_grammar(fields: dict[str, Any], grammar: Grammar) -> None:
    assert parse_chat_request({"messages": HELLO} | fields).options.grammar == grammar
    assert parse_text_request({"prompt": "a"} | fields).options.grammar == grammar


@pytest.mark.parametrize(
    "fields", [{"grammar": ""}, {"grammar": None, "json_schema": None}, {"structured_outputs": {}}]
)
def test_empty_grammar_fields_set_no_grammar(fields: dict[str, Any]) -> None:
    assert parse_chat_request({"messages": HELLO} | fields).options.grammar is None


SCHEMA_GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA_GRAMMAR),  # llama.cpp
        ({"type": "json_object", "value": SCHEMA}, SCHEMA_GRAMMAR),  # TGI; so are the next three
        ({"type": "json", "value": SCHEMA}, SCHEMA_GRAMMAR),
        ({"type": "regex", "value": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"type": "regex", "pattern": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, SCHEMA_GRAMMAR),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA_GRAMMAR),  # Together
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, SCHEMA_GRAMMAR),
    ],
    ids=str,
)
def test_response_format_variants_set_grammar(wanted: dict[str, Any], grammar: Grammar) -> None:
    assert parse_chat_request({"messages": HELLO, "response_format": wanted}).options.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": GBNF, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"choice": []}, "choice"),
        ({"choice": [5]}, "choice.0"),
        ({"guided_json": 5}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ],
    ids=str,
)
def test_conflicting_or_invalid_grammar_fields_are_rejected(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request({"messages": HELLO} | fields)
    assert caught.value.param == param


def test_strict_tools_are_passed_to_engine() -> None:
    plain, strict = ({"name": name, "parameters": SCHEMA} for name in ("plain", "strict"))
    listed = [plain, strict | {"strict": True}]
    chat = parse_chat_request(
        {"messages": HELLO, "tools": [{"type": "function", "function": function} for function in listed]}
    )
    response = parse_response_request({"input": "a", "tools": [{"type": "function"} | each for each in listed]})
    message = parse_message_request(
        {
            "messages": HELLO,
            "max_tokens": 5,
            "tools": [
                {"name": "plain", "input_schema": SCHEMA},
                {"name": "strict", "input_schema": SCHEMA, "strict": True},
            ],
        }
    )
    for asked in (chat, response, message):
        assert asked.options.strict_tools == ("strict",) and asked.options.tool_choice == "auto"
        assert asked.options.tools and all("strict" not in tool["function"] for tool in asked.options.tools)


def test_strict_tools_that_the_choice_excludes_are_not_passed_to_engine() -> None:
    functions = [{"name": name, "parameters": SCHEMA, "strict": True} for name in ("one", "two")]
    chat = {"messages": HELLO, "tools": [{"type": "function", "function": function} for function in functions]}
    response = {"input": "a", "tools": [{"type": "function"} | each for each in functions]}
    named = {"type": "function", "name": "two"}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "two"}}]}
    tools = [{"name": each["name"], "input_schema": SCHEMA, "strict": True} for each in functions]
    message = {"messages": HELLO, "max_tokens": 5, "tools": tools}
    for asked, names in (
        (parse_chat_request(chat | {"tool_choice": "none"}), ()),
        (parse_chat_request(chat | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}), ("two",)),
        (parse_response_request(response | {"tool_choice": "none"}), ()),
        (
            parse_response_request(
                response | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [named]}}
            ),
            ("two",),
        ),
        (parse_message_request(message | {"tool_choice": {"type": "none"}}), ()),
        (parse_message_request(message), ("one", "two")),
    ):
        assert asked.options.strict_tools == names


def ignored_in(asked: ApiRequest) -> str:
    return ignored_headers(asked).get(IGNORED, "")


def question(**options: Any) -> ApiRequest:
    return ApiRequest(prompts=("a",), params=(), options=RequestOptions(**options))


def test_ignored_schema_keywords_are_named_in_header() -> None:
    odd = {"properties": {"a": {"nullable": True, "format": "byte"}, "b": {"x-ü\r\n": 1}}, "nullable": 1}
    assert ignored_in(question(grammar=Grammar("json_schema", json.dumps(odd)))) == (
        "nullable, format: byte, x-%C3%BC%0D%0A"
    )
    many = {f"x{n}": n for n in range(100)} | {"y" * 1000: 1}
    *names, more = ignored_in(question(grammar=Grammar("json_schema", json.dumps(many)))).split(", ")
    assert len(names) == MAX_NAMES and more == "and 69 more"
    tools = [{"function": {"name": "a", "parameters": odd}}, {"function": {"name": "b"}}]
    # the schemas only describe the tools to the model; they constrain nothing
    assert ignored_in(question(tools=tools)) == ""
    for held in ({"strict_tools": ("a",)}, {"tool_choice": "required"}, {"tool_choice": ToolName("a")}):
        assert ignored_in(question(tools=tools, **held)).startswith("nullable, ")
    assert ignored_in(question(grammar=Grammar("regex", "a"))) == ""
    assert RequestOptions().strict_tools == ()


# ---------------------------------------------------------------- with the demo model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("grammars"))
    server = type(shared)(lambda: Engine.load(threads=1), settings)
    yield server.ready()
    server.close()


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"grammar": GBNF}, ("yes", "no")),
        ({"choice": ["left", "right"]}, ("left", "right")),
        ({"regex": "[ab]"}, ("a", "b")),
        ({"json_schema": {"enum": [1, 2], "odd": 1}}, ("1", "2")),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_answer_follows_grammar(served: Any, fields: dict[str, Any], texts: tuple[str, ...], stream: bool) -> None:
    for url, asked in ((CHAT, {"messages": HELLO, "reasoning_effort": "none"}), (TEXT, {"prompt": "It is"})):
        answer = served.client.post(url, json=asked | fields | {"stream": stream, "max_tokens": 20, "seed": 3})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-notso-ignored") == ("odd" if "json_schema" in fields else None)
        if stream:
            parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [part["choices"][0] for part in parts if part["choices"]]
            found = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
        else:
            choice = answer.json()["choices"][0]
            found = choice["text"] if url == TEXT else choice["message"]["content"]
        assert found in texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"json": {"$dynamicRef": "#x"}}}, "structured_outputs.json"),
        ({"guided_json": "no JSON"}, "guided_json"),
    ],
    ids=str,
)
def test_invalid_grammar_error_uses_requested_field_name(served: Any, fields: dict[str, Any], param: str) -> None:
    for url, asked in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "It is"})):
        answer = served.client.post(url, json=asked | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_unenforceable_strict_tool_is_rejected(served: Any) -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"multipleOf": 2}}}}
    function = {"name": "paint", "parameters": odd}
    free = {"messages": HELLO, "tools": [{"type": "function", "function": function}], "max_tokens": 3}
    assert served.client.post(CHAT, json=free).status_code == 200
    strict = free | {"tools": [{"type": "function", "function": function | {"strict": True}}]}
    refused = served.client.post(CHAT, json=strict)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "the parameters of paint cannot be enforced" in refused.json()["error"]["message"]
    held = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}
    assert served.client.post(CHAT, json=held | {"max_tokens": 20}).status_code == 200


# ---------------------------------------------------------------- streamed arguments

PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "text": {"type": "string", "minLength": 8, "maxLength": 20}},
    "required": ["colour", "text"],
    "additionalProperties": False,
}
LENGTHS = (200, 24)
"""One limit leaves room for the whole call; the other cuts it off."""


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_openai_streamed_tool_call_matches_whole(served: Any, seed: int, length: int) -> None:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "paint", "parameters": PAINT, "strict": True}}]
    asked: dict[str, Any] = {"model": "notso-demo", "messages": HELLO, "reasoning_effort": "none"}
    asked |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    asked |= {"max_tokens": length}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls or []
    pieces = [
        piece
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
    ]
    assert len(pieces) > 3 and {piece.index for piece in pieces} == {0}
    assert pieces[0].function.name == "paint" and [piece.id is None for piece in pieces] == [
        False,
        *[True] * (len(pieces) - 1),
    ]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert whole.finish_reason == ("tool_calls" if length == max(LENGTHS) else "length")
    if whole.finish_reason == "tool_calls":
        assert json.loads(call.function.arguments).keys() == {"colour", "text"}


@pytest.mark.parametrize("length", LENGTHS)
def test_anthropic_streamed_tool_call_matches_whole(served: Any, length: int) -> None:
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "notso-demo", "messages": HELLO, "max_tokens": length}
    asked |= {"tools": [{"name": "paint", "input_schema": PAINT, "strict": True}], "tool_choice": {"type": "any"}}
    asked["tool_choice"]["disable_parallel_tool_use"] = True
    asked["extra_body"] = {"temperature": 0}
    (block,) = client.messages.create(**asked).content
    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (built,) = stream.get_final_message().content
    assert block.type == built.type == "tool_use" and block.name == built.name == "paint" and len(pieces) > 3
    if length == max(LENGTHS):
        assert json.loads("".join(pieces)) == block.input == built.input
    else:
        assert block.input == {} and "".join(pieces).startswith('{"')


@pytest.mark.parametrize("length", LENGTHS)
def test_responses_streamed_tool_call_matches_whole(served: Any, length: int) -> None:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "notso-demo", "input": "Paint it", "temperature": 0, "max_output_tokens": length}
    asked |= {"tools": [{"type": "function", "name": "paint", "parameters": PAINT, "strict": True}]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "reasoning": {"effort": "none"}}
    events = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    (item,) = client.responses.create(**asked).output
    assert len(pieces) > 3 and "".join(pieces) == done.arguments == item.arguments
    assert item.status == done.status == ("completed" if length == max(LENGTHS) else "incomplete")
