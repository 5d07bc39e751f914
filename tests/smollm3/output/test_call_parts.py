"""Arguments of tool calls are streamed: with any chunking, the parts are a prefix of the complete arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notso.smollm3.output.tool_parser import ToolCallParser, ToolCallPart
from notso.smollm3.values.messages import ToolCall

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(['"', "\\", "</tool_call>", "}\n", "{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), VALUES, max_size=4)),
    min_size=1,
    max_size=3,
)


def written(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls in the form that a grammar produces."""
    bodies = (
        f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {json.dumps(given, ensure_ascii=False)}}}'
        for name, given in calls
    )
    return "Well.\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def parsed(text: str, cuts: list[int]) -> list[Any]:
    parser, pieces, last = ToolCallParser(in_parts=True), [], 0
    for cut in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        pieces += parser.push(text[last:cut])
        last = cut
    return [*pieces, *parser.finish()]


@given(CALLS, st.lists(st.integers(min_value=0), max_size=40))
def test_call_parts_are_a_prefix_of_the_arguments_in_any_chunking(
    calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    pieces = parsed(written(calls), cuts)
    whole = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in whole] == calls
    assert len({call.id for call in whole}) == len(calls)
    for call in whole:
        parts = [piece for piece in pieces if isinstance(piece, ToolCallPart) and piece.id == call.id]
        assert call.arguments.startswith("".join(part.text for part in parts))
        assert all(part.name == call.name for part in parts)
        assert all(pieces.index(part) < pieces.index(call) for part in parts)
    known = {call.id for call in whole}
    assert all(piece.id in known for piece in pieces if isinstance(piece, ToolCallPart))
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "Well."


@given(CALLS, st.integers(min_value=0))
def test_truncated_calls_give_parts_of_their_arguments(calls: list[tuple[str, dict[str, Any]]], cut: int) -> None:
    """This includes a truncated call, of which nothing else remains."""
    text = written(calls)
    begun = text[: cut % len(text)]
    pieces = parsed(begun, list(range(len(begun))))
    closed = sum(isinstance(piece, ToolCall) for piece in pieces)
    parts: dict[str, str] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallPart):
            parts[piece.id] = parts.get(piece.id, "") + piece.text
    for told, (_, arguments) in zip(parts.values(), calls, strict=False):
        assert json.dumps(arguments, ensure_ascii=False).startswith(told)
    assert closed <= len(parts) <= closed + 1
    if len(parts) > closed:
        assert not isinstance(pieces[-1], str) or pieces[-1] == "Well."


@pytest.mark.parametrize("cut", range(len('<tool_call>\n{"name": "x", "arguments": {"a": 1}}')))
def test_beginning_of_a_truncated_call_is_not_shown(cut: int) -> None:
    text = 'Well.\n<tool_call>\n{"name": "x", "arguments": {"a": 1}}'[: len("Well.\n<tool_call>") + cut]
    shown = "".join(piece for piece in parsed(text, [3, 9, 14]) if isinstance(piece, str))
    assert shown == "Well."


@pytest.mark.parametrize("text", ['<tool_call>\n{"arguments": {}, "name": "x"}\n</tool_call>', "<tool_call>no"])
def test_text_outside_the_call_grammar_gives_no_parts(text: str) -> None:
    """No call is announced before its arguments begin in the position that a grammar enforces."""
    pieces = parsed(text, [3, 9, 14])
    assert not any(isinstance(piece, ToolCallPart) for piece in pieces)
    plain = ToolCallParser()
    expected = [*plain.push(text), *plain.finish()]
    assert [getattr(piece, "arguments", piece) for piece in pieces] == [getattr(e, "arguments", e) for e in expected]
