"""A plugin's declarations and answers are validated when they are read: an invalid entry affects only itself."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plugins.false_plugin import ANY, PACKETS

from notso.plugins import wire
from notso.plugins.errors import PluginError
from notso.plugins.offers import MAX_ENTRIES, is_valid_result, validate_offer
from notso.plugins.process import PluginProcess

Started = Callable[[str], PluginProcess]
CALLED_IN = {"owner": "local", "chat_id": "c", "attachments": {}}


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "arguments": {}, "called_in": CALLED_IN}


def test_invalid_entries_are_skipped_and_valid_ones_work(started: Started) -> None:
    process = started("mistaken")
    assert process.state == "on", process.failure
    names = {kind: [row.get("name", row.get("path")) for row in process.offer[kind]] for kind in ("tools", "pages")}
    assert names == {"tools": ["right"], "pages": ["right"]}
    assert [row["name"] for row in process.offer["slash_commands"]] == ["right"]
    assert process.offer["logits_processors"] == []
    assert len(process.left_out) == 12
    assert process.left_out[0] == "tool 1 was left out: seconds must be a number above 0"
    assert "page 2 was left out: path must be words" in "\n".join(process.left_out)
    assert process.call("tool", tool("right"), "tool right", 30) == "fine"
    with pytest.raises(PluginError, match="page right: TypeError"):
        process.call("page", {"method": "GET", "path": "right"}, "page right", 30)


@pytest.mark.parametrize("name", PACKETS)
def test_forged_packet_disables_the_plugin_and_fails_its_calls(started: Started, name: str) -> None:
    process = started("forger")
    assert process.state == "on" and len(process.offer["tools"]) == len(PACKETS)
    future = process.ask("tool", tool(name), f"tool {name}", 3_600.0)
    with pytest.raises(PluginError, match="disabled"):
        future.result(60)
    assert process.state == "off" and process.failure


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open more descriptors than `select` supports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1_300:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1_300), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1_100:
        taken.append(os.dup(taken[0]))
    yield
    for each in taken:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_plugin_starts_with_more_descriptors_than_select_supports(started: Started) -> None:
    process = started("kind")
    assert process.state == "on", process.failure
    assert process.call("command", {"name": "shout", "argument": "a"}, "command", 30) == "A"


def test_entries_beyond_the_limit_are_skipped() -> None:
    rows = [{"name": f"n{n}", "description": "", "parameters": ANY, "seconds": 1} for n in range(MAX_ENTRIES + 3)]
    offer, left_out = validate_offer({"tools": rows, "more": 5})
    assert offer["tools"] == rows[:MAX_ENTRIES] and len(left_out) == 3


@pytest.mark.parametrize("seconds", [0, -1, True, "1", None, 10**400, float("nan"), float("inf")])
def test_tool_with_invalid_time_limit_is_skipped(seconds: object) -> None:
    rows = [{"name": "n", "description": "", "parameters": ANY, "seconds": seconds}]
    assert validate_offer({"tools": rows})[1] == ["tool 1 was left out: seconds must be a number above 0"]


@pytest.mark.parametrize("given", [None, [], {"tools": 5}, {"pages": {}}])
def test_invalid_offer_is_refused(given: object) -> None:
    with pytest.raises(ValueError):
        validate_offer(given)


def test_result_types_are_validated() -> None:
    page = {"body": "x", "media_type": "text/html", "status": 200}
    right = {"tool": "x", "command": "", "page": page, "logits": 5, "sign_in": None}
    assert all(is_valid_result(kind, given) for kind, given in right.items())
    wrong: dict[str, list[Any]] = {
        "tool": [None, 5, "x" * (1 << 21)],
        "page": ["x", page | {"status": True}, page | {"body": None}, {"body": "x"}],
        "logits": [True, 5.0],
        "sign_in": [5, ["a"]],
    }
    assert not [(kind, each) for kind, givens in wrong.items() for each in givens if is_valid_result(kind, each)]


def test_packet_with_too_many_values_is_refused() -> None:
    unpacker = wire.Unpacker(wire.MAX_ANSWER_BYTES, wire.ANSWER_LIMITS)
    with pytest.raises(ValueError, match="too many values"):
        unpacker.feed(wire.encode_packet([[]] * 100_000))
    assert wire.Unpacker(wire.MAX_ANSWER_BYTES, wire.ANSWER_LIMITS).feed(wire.encode_packet("[,{" * 100_000))
