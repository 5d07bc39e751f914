"""Tool calls are extracted from an answer, and other text is unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.qtensor import GGUFFile
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.output.output_processor import OutputProcessor
from notso.smollm3.output.tool_parser import ToolCallParser, parse_call
from notso.smollm3.strict_json import is_json_object
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.messages import ToolCall

Seen = str | tuple[str, str]  # text, or name and arguments of a call

CALL = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
FOUND = ("get_weather", '{"city": "Köln"}')


def read(pieces: list[str]) -> list[Seen]:
    parser = ToolCallParser()
    found: list[str | ToolCall] = []
    for piece in pieces:
        found += parser.push(piece)
    found += parser.finish()
    assert parser.finish() == []
    seen: list[Seen] = []
    for part in found:
        if isinstance(part, ToolCall):
            seen.append((part.name, part.arguments))
        elif seen and isinstance(seen[-1], str):
            seen[-1] += part
        else:
            assert part
            seen.append(part)
    return seen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello.", ["Hello."]),
        (f"<tool_call>\n{CALL}\n</tool_call>", [FOUND]),
        (f"<tool_call>{CALL}</tool_call>", [FOUND]),
        (f"<tool_call> {CALL} \n\n</tool_call>\n", [FOUND]),
        (f"Let me look.\n\n<tool_call>\n{CALL}\n</tool_call>", ["Let me look.", FOUND]),
        (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", [FOUND, FOUND]),
        (f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", [FOUND, FOUND]),
        (f"a\n<tool_call>{CALL}</tool_call>\n\nb\n", ["a", FOUND, "b\n"]),
        (f"<tool_call>\n{CALL}", [FOUND]),  # without the closing tag
        ('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
        ('<tool_call>{"arguments":{"a":[1,2.50,1e3]},"name":"f"}</tool_call>', [("f", '{"a":[1,2.50,1e3]}')]),
        ('<tool_call>{"name": "f", "arguments": {"t": "</tool_call>"}}</tool_call>', [("f", '{"t": "</tool_call>"}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"t": "\\"</tool_call>"}}</tool_call>x',
            [("f", '{"t": "\\"</tool_call>"}'), "x"],
        ),
        ('<tool_call>{"name": "f", "arguments": {"t": "<tool_call>"}}</tool_call>', [("f", '{"t": "<tool_call>"}')]),
        ('<tool_call>{"name": "f", "arguments": {"t": "\\ud800"}}</tool_call>', [("f", '{"t": "\\ud800"}')]),
    ],
)
def test_tool_calls_are_extracted(text: str, expected: list[Seen]) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected


BAD = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>\n",
    "<tool_call>not json</tool_call>",
    "<tool_call>[1]</tool_call>",
    '<tool_call>"x"</tool_call>',
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": ""}</tool_call>',
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": null}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
    '<tool_call>{"name": "f"} {"name": "g"}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>\n{"name": "f", "argum',
    "<tool_call>{'name': 'f'}</tool_call>",
    "</tool_call>",
    "<tool_cal",
    "a <tool_call or two",
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 5000 + "</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": 1' + "0" * 5000 + "}}</tool_call>",
]


@pytest.mark.parametrize("bad", BAD)
def test_invalid_calls_are_returned_as_text_unchanged(bad: str) -> None:
    for text in (bad, f"before\n\n{bad}"):
        assert read([text]) == [text]
        assert read(list(text)) == [text]


def test_valid_call_after_an_invalid_one_is_extracted() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": "x}}}}\n</tool_call>\n<tool_call>{CALL}</tool_call>'
    assert read([text]) == ['<tool_call>{"name": "f", "arguments": {"a": "x}}\n</tool_call>', FOUND]
    assert read([f"<tool_call>oh</tool_call> <tool_call>{CALL}</tool_call>"]) == ["<tool_call>oh</tool_call> ", FOUND]


def test_text_is_streamed_and_calls_are_emitted_when_complete() -> None:
    parser = ToolCallParser()
    assert parser.push("Let me") == ["Let me"]
    assert parser.push(" look.\n") == [" look."]
    assert parser.push("<tool") == []
    assert parser.push("_call>") == []
    assert parser.push(CALL) == []
    [call] = parser.push("</tool_call>")
    assert isinstance(call, ToolCall)
    assert parser.push("\n") == []
    assert parser.push("<b>") == ["<b>"]
    assert parser.push("<tool_call>x") == ["<tool_call>x"]  # returned as soon as it cannot become a call
    assert parser.finish() == []


def test_call_ids_are_unique() -> None:
    calls = [parse_call(CALL) for _ in range(1000)]
    ids = {call.id for call in calls if call is not None}
    assert len(ids) == 1000
    assert all(name.startswith("call_") and int(name[5:], 16) >= 0 for name in ids)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(
    name=st.text(min_size=1, max_size=10),
    arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    escape=st.booleans(),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_any_call_is_extracted_at_any_chunk_boundaries(
    name: str, arguments: Any, escape: bool, indent: int | None, data: Any
) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escape, indent=indent)
    text = f"<tool_call>\n{body}\n</tool_call>"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    [(found, written)] = read(pieces)
    assert found == name
    assert json.loads(written) == arguments
    assert written in body


TAGGED = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", CALL, "\n", "x", '"', "{", "}", "<", "tool_", ' {"name": "f"}']),
    max_size=10,
)


@settings(max_examples=500)
@given(pieces=TAGGED)
def test_chunk_boundaries_do_not_matter_and_other_text_is_kept(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = read([text])
    assert read(pieces) == whole
    assert read(list(text)) == whole
    shown = "".join(part for part in whole if isinstance(part, str))
    if not any(isinstance(part, tuple) for part in whole):
        assert shown == text
    assert shown.count("x") == text.count("x")


def test_is_json_object_is_strict() -> None:
    for text in ("{}", ' {"a": 1}\n', '{"a": {"b": [1, null]}}'):
        assert is_json_object(text)
    for text in (
        "",
        "[]",
        "1",
        "null",
        "{",
        '{"a": NaN}',
        '{"a": Infinity}',
        "{'a': 1}",
        "{} {}",
        None,
        3,
        '{"a":' * 10**5,
    ):
        assert not is_json_object(text)


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_tags_are_read_whatever_their_kind_in_the_model_file(kind: int) -> None:
    """Fine-tuning scripts add them as special tokens, which become control tokens."""
    with GGUFFile.open(demo_path()) as file:
        entries = dict(file.metadata)
    kinds = list(entries["tokenizer.ggml.token_type"])
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        kinds[entries["tokenizer.ggml.tokens"].index(tag)] = kind
    tokenizer = Tokenizer.from_gguf(entries | {"tokenizer.ggml.token_type": kinds})
    output = OutputProcessor(tokenizer, [], [], find_tool_calls=True)
    written = '<think>\nhm\n</think>\nSo:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    events = [event for token in tokenizer.encode(written, control=True) for event in output.push(token)]
    events += output.finish("stop")
    assert "".join(event.text for event in events if event.kind == "text") == "So:"
    assert [event.tool_call.name for event in events if event.tool_call is not None] == ["f"]
