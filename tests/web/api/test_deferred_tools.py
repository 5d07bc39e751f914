"""Deferred tools enter the prompt only after the agent has searched for them; until then the prompt is shorter."""

from __future__ import annotations

from typing import Any

import pytest

from notso.web.api.messages.request import FOUND_TOOL, parse_message_request
from notso.web.edge.errors import ApiError


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


def found(*names: str, id: str = "call_1") -> list[dict[str, Any]]:
    """A tool search and the tools it found."""
    blocks = [{"type": "tool_reference", "tool_name": name} for name in names]
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": blocks}]},
    ]


HELLO = {"role": "user", "content": "Hello"}
TOOLS = [tool("fetch", defer_loading=True), tool("search"), tool("stop", defer_loading=True, strict=True), tool("read")]


def asked(*messages: Any, **more: Any) -> Any:
    return parse_message_request({"max_tokens": 5, "tools": TOOLS, "messages": [HELLO, *messages], **more})


def offered(*messages: Any) -> list[str]:
    return [each["function"]["name"] for each in asked(*messages).options.tools]


def test_deferred_tool_is_offered_after_search_finds_tool() -> None:
    assert offered() == ["search", "read"]
    assert offered(*found("stop")) == ["search", "read", "stop"]
    assert offered(*found("stop"), *found("fetch", "stop", id="call_2")) == ["search", "read", "stop", "fetch"]
    assert offered(*found("nothing", "search")) == ["search", "read"]


def test_tool_reference_is_rendered_in_tool_result() -> None:
    result = asked(*found("stop", "fetch")).messages[-1]
    assert result.role == "tool"
    assert result.content == "\n".join(FOUND_TOOL.format(name=name) for name in ("stop", "fetch"))


def test_tool_choice_and_strict_apply_only_to_offered_tools() -> None:
    choice = {"tool_choice": {"type": "tool", "name": "stop"}}
    with pytest.raises(ApiError) as refused:
        asked(**choice)
    assert refused.value.param == "tool_choice"
    assert asked().options.strict_tools == ()
    options = asked(*found("stop"), **choice).options
    assert options.tool_choice.name == "stop" and options.strict_tools == ("stop",)


def test_no_tools_are_offered_when_all_are_deferred() -> None:
    assert asked(tools=TOOLS[:1]).options.tools is None


def test_deferred_tools_do_not_count_toward_the_limit_of_tools() -> None:
    """Agents list the tools of all MCP servers."""
    many = [tool(f"f{number}", defer_loading=True) for number in range(1_000)]
    assert [each["function"]["name"] for each in asked(tools=[*TOOLS, *many]).options.tools] == ["search", "read"]
    for tools in ([tool(f"f{number}") for number in range(129)], [tool(f"f{number}") for number in range(1_025)]):
        with pytest.raises(ApiError) as refused:
            asked(tools=tools)
        assert refused.value.param == "tools"
        assert "validation" not in refused.value.body["error"]["message"], "pydantic's `after validation` is removed"
