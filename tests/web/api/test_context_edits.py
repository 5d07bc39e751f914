"""Context edits: parts of long conversations that Anthropic's clients ask the server to drop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import ContextLengthError, Message
from notso.web.api.messages.fields import CLEARED, apply_edits
from notso.web.api.messages.request import parse_message_request

Start = Callable[..., Any]
URL = "/v1/messages"
TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "write")]
NAMES = ("read", "write", "read", "read", "read")
RESULT = "word " * 20


def conversation(*, asks_between: bool = False) -> Any:
    """Build a question and five tool calls, each with a thought before it and a result after it."""
    turns: list[Any] = [{"role": "user", "content": "Hello"}]
    for number, name in enumerate(NAMES):
        call = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"path": "a b c"}}
        thought = {"type": "thinking", "thinking": f"thought {number} " * 5, "signature": ""}
        turns.append({"role": "assistant", "content": [thought, call]})
        turns.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{number}", "content": RESULT}]}
        )
        if asks_between:
            turns += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And?"}]
    return turns


def asked(server: Any, *edits: dict[str, Any], asks_between: bool = False, stream: bool = False) -> Any:
    """Send the conversation with Anthropic's client and return the edits that were applied."""
    client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    ask: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 50,
        "messages": conversation(asks_between=asks_between),
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": list(edits)},
    }
    counted = client.beta.messages.count_tokens(**{name: value for name, value in ask.items() if name != "max_tokens"})
    if stream:
        with client.beta.messages.stream(**ask) as events:
            message = events.get_final_message()
    else:
        message = client.beta.messages.create(**ask)
    applied = message.context_management.applied_edits if message.context_management else []
    cleared = sum(edit.cleared_input_tokens for edit in applied)
    assert (
        counted.context_management
        and counted.context_management.original_input_tokens == counted.input_tokens + cleared
    )
    return applied


def results(engine: ScriptedEngine) -> list[bool]:
    """For each tool call, return whether its result was still in the last prompt."""
    return [message.content == RESULT for message in engine.requests[-1].messages if message.role == "tool"]


def tool_uses(**fields: Any) -> dict[str, Any]:
    return {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 2}, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_old_tool_results_are_cleared(start: Start, stream: bool) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    (edit,) = asked(server, tool_uses(), stream=stream)
    assert results(engine) == [False, False, True, True, True]
    assert (edit.type, edit.cleared_tool_uses) == ("clear_tool_uses_20250919", 2)
    read = engine.requests[-1].messages
    assert edit.cleared_input_tokens == 2 * (len(RESULT.split()) - len(CLEARED.split()))
    assert [message.content for message in read if message.role == "tool"][:2] == [CLEARED, CLEARED]
    assert {call.arguments for message in read for call in message.tool_calls} == {'{"path": "a b c"}'}


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"keep": {"type": "tool_uses", "value": 1}}, [False, False, False, False, True]),
        ({"keep": {"type": "tool_uses", "value": 0}}, [False] * 5),
        ({"keep": {"type": "tool_uses", "value": 9}}, [True] * 5),
        ({"exclude_tools": ["write"]}, [False, True, True, True, True]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [True] * 5),
        ({"trigger": {"type": "input_tokens", "value": 100}}, [False, False, True, True, True]),
        ({"trigger": {"type": "input_tokens", "value": 3000}}, [True] * 5),
        ({"trigger": None}, [True] * 5),
        ({"clear_at_least": {"type": "input_tokens", "value": 20}}, [False, False, True, True, True]),
        ({"clear_at_least": {"type": "input_tokens", "value": 50}}, [True] * 5),
    ],
)
def test_edit_options_select_cleared_tool_results(start: Start, fields: dict[str, Any], read: list[bool]) -> None:
    engine = ScriptedEngine()
    applied = asked(start(engine).ready(), tool_uses(**fields))
    assert results(engine) == read
    assert sum(edit.cleared_tool_uses for edit in applied) == read.count(False)


@pytest.mark.parametrize(("inputs", "cleared"), [(True, [0, 1]), (["write"], [1]), (False, [])])
def test_clear_tool_inputs_clears_selected_inputs(start: Start, inputs: Any, cleared: list[int]) -> None:
    engine = ScriptedEngine()
    asked(start(engine).ready(), tool_uses(clear_tool_inputs=inputs))
    calls = [call for message in engine.requests[-1].messages for call in message.tool_calls]
    assert [number for number, call in enumerate(calls) if call.arguments == "{}"] == cleared


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(None, 0), ({"type": "thinking_turns", "value": 3}, 2), ("all", 5), ({"type": "all"}, 5)],
)
def test_clear_thinking_keeps_requested_turns(start: Start, keep: Any, kept: int) -> None:
    engine = ScriptedEngine()
    applied = asked(start(engine).ready(), {"type": "clear_thinking_20251015", "keep": keep}, asks_between=True)
    thoughts = [each for each in engine.requests[-1].messages if each.reasoning_content]
    assert [each.keep_reasoning for each in thoughts] == [False] * (5 - kept) + [True] * kept
    assert [edit.cleared_thinking_turns for edit in applied] == ([5 - kept] if kept < 5 else [])


def test_repeated_tool_use_edits_are_applied_in_order(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    writes_stay = tool_uses(keep={"type": "tool_uses", "value": 1}, exclude_tools=["write"])
    first, second = asked(server, writes_stay, tool_uses())
    assert results(engine) == [False, False, False, False, True]
    assert (first.cleared_tool_uses, second.cleared_tool_uses) == (3, 1)
    # The second edit clears nothing that the first has left.
    (only,) = asked(server, tool_uses(), writes_stay | {"keep": {"type": "tool_uses", "value": 3}})
    assert results(engine) == [False, False, True, True, True] and only.cleared_tool_uses == 2


def test_a_later_edit_clears_the_inputs_of_cleared_results() -> None:
    asking = parse_message_request(
        {
            **{"max_tokens": 1, "messages": conversation()},
            "context_management": {"edits": [tool_uses(), tool_uses(clear_tool_inputs=["write"])]},
        }
    )
    assert asking.management is not None

    def characters(messages: Sequence[Message]) -> int:
        return sum(len(each.content) + sum(len(call.arguments) for call in each.tool_calls) for each in messages)

    messages, applied = apply_edits(asking.messages, asking.management, characters)
    saved = len(asking.messages[3].tool_calls[0].arguments) - len("{}")
    assert [call.arguments for each in messages for call in each.tool_calls].index("{}") == 1
    assert [each["cleared_tool_uses"] for each in applied] == [2, 1] and applied[1]["cleared_input_tokens"] == saved


@pytest.mark.parametrize("keep", [("all", 3, 4), (4, 3, "all"), (3,)])
def test_strictest_of_several_thinking_edits_applies(start: Start, keep: tuple[Any, ...]) -> None:
    engine = ScriptedEngine()
    kept = [each if each == "all" else {"type": "thinking_turns", "value": each} for each in keep]
    (edit,) = asked(
        start(engine).ready(),
        *({"type": "clear_thinking_20251015", "keep": each} for each in kept),
        asks_between=True,
    )
    thoughts = [each.keep_reasoning for each in engine.requests[-1].messages if each.reasoning_content]
    assert thoughts == [False] * 3 + [True] * 2 and edit.cleared_thinking_turns == 3


def test_thinking_of_unfinished_tool_turn_is_kept(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    assert asked(server, {"type": "clear_thinking_20251015"}) == []
    messages = [each for each in engine.requests[-1].messages if isinstance(each, Message)]
    assert [each.keep_reasoning for each in messages if each.tool_calls] == [True] * 5


def test_unsupported_edits_are_reported_or_rejected(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    short: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}

    def post(*edits: Any) -> Any:
        return server.client.post(URL, json=short | {"context_management": {"edits": list(edits)}})

    named = post({"type": "compact_20260112"})
    assert named.status_code == 200 and named.headers["x-notso-ignored"] == "context_management.edits.type"
    assert named.json()["context_management"] == {"applied_edits": []}
    assert "context_management" not in server.client.post(URL, json=short).json()
    for edit in ({"type": "clear_pictures"}, {"type": "clear_thinking_20251015", "keep": "some"}, tool_uses(keep=3)):
        answer = post(edit)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("context_management.edits.0"), answer.text


def test_results_of_empty_and_repeated_ids_are_not_cleared() -> None:
    messages: list[Any] = [{"role": "user", "content": "q"}]
    for id in ("", "", "same", "same", "one", "two"):
        messages += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "read", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "result " * 99}]},
        ]
    edits = {"edits": [tool_uses(keep={"type": "tool_uses", "value": 1})]}
    asking = parse_message_request({"max_tokens": 1, "messages": messages, "context_management": edits})
    assert asking.management is not None
    after, applied = apply_edits(asking.messages, asking.management, lambda shown: sum(len(e.content) for e in shown))
    assert [each["cleared_tool_uses"] for each in applied] == [1]
    results = [each for each in after if each.role == "tool"]
    assert [each.tool_call_id for each in results if each.content != "result " * 99] == ["one"]


def test_only_large_prompts_far_beyond_the_context_are_not_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    monkeypatch.setattr(engine, "estimate", lambda *_: (_ for _ in ()).throw(ContextLengthError(9, 8, at_least=True)))
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    for words, status in ((100_000, 200), (900_000, 400)):
        turns = [*conversation(), *({"role": "user", "content": "word " * 100_000},) * (words // 100_000)]
        body = {"messages": turns, "tools": TOOLS, "context_management": edits}
        answer = server.client.post(f"{URL}/count_tokens", json=body)
        assert answer.status_code == status, answer.text
        assert status == 400 or answer.json()["input_tokens"] > words
