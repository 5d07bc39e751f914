"""The built-in tools: results, refusals, and limits on time and size."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notso.web.store.protocol import Attachment, Chat, StoredMessage
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.tools.built_in import (
    ATTACHMENT_READER,
    BUILT_IN_TOOLS,
    CHAT_SEARCH,
    CLOCK,
    MAX_LINES,
    attachment_excerpt,
    format_time,
)
from notso.web.tools.calculator import CALCULATOR, MAX_BITS, calculate
from notso.web.tools.chat_tool import ChatTool, ToolContext
from notso.web.tools.toolbox import MAX_RESULT_CHARACTERS, Toolbox, ToolResult, use
from notso.web.values.errors import ToolError

NOWHERE = ToolContext("local", "", None)  # type: ignore[arg-type]


def called(tool: ChatTool, context: ToolContext = NOWHERE, **arguments: Any) -> ToolResult:
    return asyncio.run(use(tool, json.dumps(arguments), context))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("27 + 48", "75"),
        ("1234 * 77 =", "95018"),
        ("0.1 + 0.2", "0.3"),
        ("-2^2", "-4"),
        ("2**3**2", "512"),
        ("(1 + 2) × 3 − 4 ÷ 8", "8.5"),
        ("7 // 2 + 7 % 4", "6"),
        ("-7 // 2", "-4"),
        ("1/3", "0.33333333333333333333 (rounded; exactly 1/3)"),
        ("1/8", "0.125"),
        ("-1/8", "-0.125"),
        ("2^0.5", "1.4142135623730950488 (rounded)"),
        ("sqrt(2) * sqrt(2)", "2 (rounded)"),
        ("sqrt(9/4)", "1.5"),
        ("pi", "3.1415926535897932385 (rounded)"),
        ("1e3 + .5", "1000.5"),
        ("2^-2", "0.25"),
        ("0^0", "1"),
        ("max(1, 2, 3) + min(4, 5) + gcd(12, 18) + lcm(4, 6)", "25"),
        ("round(2.567, 2) + round(2.5) + floor(-1.5) + ceil(1.2)", "4.57"),
        ("factorial(20)", "2432902008176640000"),
        ("1e40 * 3", "3" + "0" * 40),
        ("1 / 7e30", "1.4285714285714285714E-31 (rounded)"),
    ],
)
def test_calculator_evaluates_expression(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "the expression is empty"),
        ("1 +", "the expression is incomplete"),
        ("(1", "')' is missing"),
        ("1 2", "not expected"),
        ("*1", "misplaced"),
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0^-1", "division by zero"),
        ("sqrt(-1)", "negative"),
        ("2^(1/3)", "integer powers"),
        ("sqrt(1, 2)", "does not take 2"),
        ("gcd(1.5, 2)", "integers are required"),
        ("factorial(501)", "factorial takes"),
        ("round(1, 99)", "round takes"),
        ("__import__('os')", "is not supported"),
        ("os.system", "is not supported"),
        ("exit()", "'exit' is not supported"),
        ("9**9**9**9", "too large"),
        ("1e999999999", "too large"),
        ("10^9999", "too large"),
        ("factorial(500)^100", "too large"),
        ("(" * 200 + "1" + ")" * 200, "nested"),
        ("-" * 200 + "1", "nested"),
        ("1+" * 600 + "1", "longer than"),
    ],
)
def test_calculator_rejects_invalid_expression(expression: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%^().,eE spqrtmaxn", max_size=60))
def test_calculator_handles_random_input_quickly(expression: str) -> None:
    started = time.thread_time()
    try:
        assert len(calculate(expression)) < MAX_BITS
    except ToolError as error:
        assert "\n" not in str(error)
    assert time.thread_time() - started < 5


def test_calculator_agrees_with_fractions() -> None:
    chance = random.Random(11)
    for _ in range(300):
        numbers = [chance.randrange(-999, 999) for _ in range(4)]
        signs = [chance.choice("+-*") for _ in range(3)]
        text = f"({numbers[0]}) {signs[0]} ({numbers[1]}) {signs[1]} ({numbers[2]}) {signs[2]} ({numbers[3]})"
        assert Fraction(calculate(text)) == Fraction(eval(text))  # noqa: S307 - the test's own sum


NOON = datetime(2026, 2, 28, 12, 0, 30, tzinfo=UTC)


def test_clock_accepts_time_zones_and_cities() -> None:
    assert format_time("Europe/Paris", NOON) == "Saturday, 28 February 2026, 13:00:30 (Europe/Paris, UTC+01:00)"
    assert format_time("new york", NOON) == "Saturday, 28 February 2026, 07:00:30 (America/New_York, UTC-05:00)"
    assert format_time("asia/KOLKATA", NOON).endswith("17:30:30 (Asia/Kolkata, UTC+05:30)")
    assert format_time("utc", NOON).endswith("12:00:30 (UTC, UTC+00:00)")
    assert (
        "28 February 2026" in format_time("", NOON)
        or "27 February" in format_time("", NOON)
        or "1 March" in format_time("", NOON)
    )


@pytest.mark.parametrize("zone", ["Atlantis", "../../etc/passwd", "x" * 5000, "Europe/"])
def test_unknown_time_zone_is_rejected(zone: str) -> None:
    with pytest.raises(ToolError, match=r"unknown time zone|there is no zone"):
        format_time(zone, NOON)


def test_misspelled_time_zone_error_suggests_match() -> None:
    with pytest.raises(ToolError, match="Europe/Paris"):
        format_time("Europe/Pariss", NOON)


def test_clock_returns_current_year() -> None:
    outcome = called(CLOCK)
    assert outcome.state == "done" and str(datetime.now().year) in outcome.text


FILES = (Attachment("old.txt", "first"), Attachment("notes.txt", "\n".join(f"line {n}" for n in range(1, 1001))))


def test_attachment_is_read_in_parts() -> None:
    assert attachment_excerpt(FILES, "old.txt", 1) == "old.txt, lines 1 to 1 of 1:\nfirst"
    text = attachment_excerpt(FILES, "notes.txt", 301)
    assert text.startswith(f"notes.txt, lines 301 to {300 + MAX_LINES} of 1000:\nline 301\n")
    assert text.endswith(f"line {300 + MAX_LINES}")
    for name, line, reason in (("no.txt", 1, "old.txt, notes.txt"), ("old.txt", 2, "from 1 to 1")):
        with pytest.raises(ToolError, match=reason):
            attachment_excerpt(FILES, name, line)
    assert called(ATTACHMENT_READER, name="x").text == "error: this chat has no files"


def test_document_of_the_library_is_read_as_attachment() -> None:
    async def text(owner: str, document_id: str) -> Any:
        return SimpleNamespace(text="page one\npage two") if (owner, document_id) == ("local", "kept") else None

    store: Any = SimpleNamespace(documents=SimpleNamespace(text=text))
    files = (Attachment("book.pdf", "", "kept"), Attachment("old.pdf", "", "deleted"))
    context = ToolContext("local", "chat", store, files)
    read = called(ATTACHMENT_READER, context, name="book.pdf", first_line=2)
    assert read.text == "book.pdf, lines 2 to 2 of 2:\npage two"
    assert called(ATTACHMENT_READER, context, name="old.pdf").text == "error: this document was deleted"


def test_chat_search_finds_only_chats_of_owner(tmp_path: Path) -> None:
    async def search(query: str, owner: str = "local") -> str:
        store = SQLiteStore(tmp_path)
        await store.open()
        try:
            context = ToolContext(owner, "here", store)
            return (await use(CHAT_SEARCH, json.dumps({"query": query}), context)).text
        finally:
            await store.close()

    async def fill() -> None:
        store = SQLiteStore(tmp_path)
        await store.open()
        for owner, chat_id, title in (("local", "here", "This"), ("local", "there", "Baking"), ("other", "x", "Hers")):
            chat = Chat(chat_id, title, False, date(2026, 1, 1), 1, 1)
            message = StoredMessage(f"m-{chat_id}", chat_id, "user", f"my secret bread\nrecipe {title}", "", "done", 1)
            await store.add_chat(owner, chat, [message])
        await store.close()

    asyncio.run(fill())
    assert asyncio.run(search("bread recipe")) == '1. Chat "Baking": my secret bread recipe Baking'
    assert asyncio.run(search("baking")).splitlines()[0] == '1. Chat "Baking"'
    assert asyncio.run(search("bread", "other")).count("\n") == 0
    assert asyncio.run(search("pizza")).startswith("nothing found")
    assert asyncio.run(search(" ")).startswith("error: the query needs")
    assert "error" not in asyncio.run(search('"*( OR NEAR'))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "expression is missing"),
        ({"expression": 3}, "must be text"),
        ({"expression": "1", "base": 2}, "unknown argument base"),
        ({"expression": "1" * 5000}, "longer than"),
    ],
)
def test_invalid_tool_arguments_are_rejected(arguments: dict[str, Any], reason: str) -> None:
    outcome = called(CALCULATOR, **arguments)
    assert outcome.state == "failed" and outcome.text.startswith("error: ") and reason in outcome.text


def test_integer_argument_rejects_other_types() -> None:
    for wrong in ("1", True, 1.5):
        assert "must be an integer" in called(ATTACHMENT_READER, name="a", first_line=wrong).text


def _tool(run: Any, seconds: float = 5.0) -> ChatTool:
    return replace(CALCULATOR, name="odd", run=run, parameters={"type": "object"}, seconds=seconds)


def test_tool_failure_timeout_and_long_output_are_handled() -> None:
    async def breaks(arguments: Mapping[str, Any], context: ToolContext) -> str:
        raise RuntimeError("secret detail")

    async def hangs(arguments: Mapping[str, Any], context: ToolContext) -> str:
        await asyncio.sleep(60)
        return ""

    async def babbles(arguments: Mapping[str, Any], context: ToolContext) -> str:
        return "x\x00\ud800" * MAX_RESULT_CHARACTERS

    broken = called(_tool(breaks))
    assert broken == ToolResult("failed", "error: odd failed", broken.duration_ms)
    assert called(_tool(hangs, 0.05)).text == "error: odd did not respond within 0.05 s"
    long = called(_tool(babbles))
    assert long.state == "done" and len(long.text) < MAX_RESULT_CHARACTERS + 100 and "[cut: 8,000 of" in long.text
    assert "\x00" not in long.text and long.text.encode()


def test_toolbox_keeps_order_and_ignores_unknown_names() -> None:
    box = Toolbox()
    assert [tool.name for tool in box.chosen(["clock", "nothing", "calculator"])] == ["calculator", "clock"]
    assert box.chosen(["calculator", "rm"]) == (CALCULATOR,)
    assert box.all() == BUILT_IN_TOOLS
    for tool in BUILT_IN_TOOLS:
        assert tool.definition["function"]["name"] == tool.name
        json.dumps(tool.definition)
