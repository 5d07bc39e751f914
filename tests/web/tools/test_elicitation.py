"""Questions of MCP servers to the user: forms built from schemas, validation of replies, and isolation between
calls."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from web.tools.test_mcp import NOWHERE, Use, with_servers

from notso.web.tools import mcp_servers
from notso.web.tools.calculator import CALCULATOR
from notso.web.tools.chat_tool import ToolContext
from notso.web.tools.elicitation import CANCELLED, DECLINED, Elicitation, Reply, parse_form, parse_question
from notso.web.tools.mcp_config import McpServerConfig
from notso.web.tools.mcp_servers import McpServers
from notso.web.tools.toolbox import use
from notso.web.values.errors import Problem, ToolError

HOSTILE = str(Path(__file__).with_name("hostile_mcp_server.py"))
FORMS = {"elicitation": {"form": {}}}

TITLED = [{"const": "#f00", "title": "Red"}, {"const": "#0f0"}]
PROPERTIES: dict[str, Any] = {
    "name": {"type": "string", "title": "Your\nname", "minLength": 2, "maxLength": 5, "default": "Ada"},
    "mail": {"type": "string", "format": "email"},
    "page": {"type": "string", "format": "uri"},
    "day": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150, "default": 7},
    "height": {"type": "number", "description": "in metres"},
    "agreed": {"type": "boolean", "default": True},
    "size": {"type": "string", "enum": ["s", "l"], "enumNames": ["Small"], "default": "l"},
    "colour": {"type": "string", "oneOf": TITLED},
    "colours": {"type": "array", "items": {"anyOf": TITLED}, "minItems": 1, "maxItems": 1, "default": ["#0f0", []]},
}


def asking(*required: str, **properties: Any) -> Elicitation:
    schema = {"type": "object", "properties": properties or PROPERTIES, "required": [*required]}
    return parse_question("far", "Well?", schema)


def test_schema_properties_become_form_fields() -> None:
    fields = {each.name: each for each in asking("name").fields}
    assert (fields["name"].title, fields["name"].default, fields["name"].is_required) == ("Your name", "Ada", True)
    assert (fields["age"].lowest, fields["age"].highest, fields["age"].default) == (0, 150, 7)
    assert [fields[name].kind for name in ("mail", "page", "day", "time")] == ["email", "uri", "date", "date-time"]
    assert (fields["size"].choices, fields["size"].default) == ((("s", "Small"), ("l", "l")), "l")
    assert fields["colour"].choices == (("#f00", "Red"), ("#0f0", "#0f0")) == fields["colours"].choices
    assert fields["agreed"].default is True and fields["colours"].default == ()
    assert parse_question("far", "Sure?", {"type": "object", "properties": {}}).fields == ()
    odd = {"type": "string", "format": "shoe", "title": 5, "default": "a\nb", "maxLength": 1e400, "pattern": "(a+)+$"}
    (field,) = asking(odd=odd).fields
    assert (field.kind, field.title, field.default, field.highest) == ("text", "odd", None, None)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"properties": []},
        {"properties": {"a": "string"}},
        {"properties": {"": {"type": "string"}}},
        {"properties": {"a": {}}},
        {"properties": {"a": {"type": ["string", "null"]}}},
        {"properties": {"a": {"type": "object", "properties": {}}}},
        {"properties": {"a": {"type": "array", "items": {"type": "string"}}}},
        {"properties": {"a": {"type": "array", "items": {"type": "object"}}}},
        {"properties": {"a": {"type": "string", "enum": [1, 2]}}},
        {"properties": {"a": {"type": "string", "enum": ["x"] * 65}}},
        {"properties": {"a": {"type": "string", "enum": ["x" * 201]}}},
        {"properties": {f"a{n}": {"type": "string"} for n in range(25)}},
        {"properties": {n: {"type": "array", "items": {"enum": [*map(str, range(13))]}} for n in "ab"}},
        {"properties": {}, "required": "a"},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_unsupported_form_schema_is_rejected(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolError):
        parse_question("far", "Well?", schema)


def form(question: Elicitation, **typed: str) -> dict[str, str]:
    """Return form values by the names of the fields; `colours_1` is choice 1 of the field `colours`."""
    at = {each.name: number for number, each in enumerate(question.fields)}
    named = [(*name.partition("_"), text) for name, text in typed.items()]
    return {f"value-{at[name]}{'-' if choice else ''}{choice}": text for name, _, choice, text in named}


def test_submitted_form_becomes_typed_values() -> None:
    question = asking("name")
    typed = form(question, name=" Ada ", mail="a@b", page="https://b", day="2026-01-31", time="2026-01-31T12:00:00Z")
    typed |= form(question, age="+42", height="1.5e0", agreed="on", size="1", colour="0", colours_1="on")
    assert parse_form(question, typed) == {
        **{"name": "Ada", "mail": "a@b", "page": "https://b", "day": "2026-01-31", "time": "2026-01-31T12:00:00Z"},
        **{"age": 42, "height": 1.5, "agreed": True, "size": "l", "colour": "#f00", "colours": ["#0f0"]},
    }
    assert parse_form(question, form(question, name="Ada", age=" ")) == {"name": "Ada", "agreed": False}


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ({}, "Your name is required."),
        ({"name": "A"}, "Your name has an invalid length (minimum: 2, maximum: 5 characters)."),
        ({"name": "A" * 6}, "Your name has an invalid length (minimum: 2, maximum: 5 characters)."),
        ({"mail": "a b@c"}, "mail must be an email address."),
        ({"page": "nowhere"}, "page must be a URL, such as https://example.org."),
        ({"page": "http://[x"}, "page must be a URL, such as https://example.org."),
        ({"day": "31.1.2026"}, "day must be a date, such as 2026-01-31."),
        ({"day": "20260131"}, "day must be a date, such as 2026-01-31."),
        ({"time": "2026-01-31T12:00:00"}, "time must be a date and time with time zone, such as 2026-01-31T12:00:00Z."),
        ({"age": "4.5"}, "age must be a whole number."),
        ({"age": "9" * 41}, "age must be a whole number."),
        ({"age": "151"}, "age is outside the allowed range (minimum: 0, maximum: 150)."),
        ({"height": "nan"}, "height must be a number."),
        ({"height": "1e999"}, "height must be a number."),
        ({"height": "tall"}, "height must be a number."),
        ({"size": "2"}, "size must be one of the options."),
        ({"size": "s"}, "size must be one of the options."),
        ({"colours_0": "on", "colours_1": "on"}, "colours: select a valid number of options (minimum: 1, maximum: 1)."),
    ],
    ids=str,
)
def test_invalid_form_value_returns_400(typed: dict[str, str], sentence: str) -> None:
    question = asking("name")
    given = form(question, **({"name": "Ada"} | typed if typed else {}))
    with pytest.raises(Problem) as caught:
        parse_form(question, given)
    assert (caught.value.status, caught.value.sentence) == (400, sentence)


def test_text_without_max_length_is_still_limited() -> None:
    question = asking(story={"type": "string"})
    with pytest.raises(Problem):
        parse_form(question, form(question, story="a" * 2_001))


# Servers


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 120.0)
    monkeypatch.setattr(mcp_servers, "CALL_SECONDS", 120.0)


def test_elicitation_reply_reaches_mcp_server() -> None:
    """The newest protocol returns the question as a result and calls the tool again with the reply."""
    asked: list[Elicitation] = []
    replies = [Reply("accept", {"people": 4, "outside": True}), DECLINED, CANCELLED]

    async def ask(question: Elicitation) -> Reply:
        asked.append(question)
        return replies[len(asked) - 1]

    async def work(servers: McpServers, called: Use) -> None:
        for said in ("Vienna, 4, outside", "decline", "cancel"):
            outcome = await called("little__book", asking=ask, place="Vienna")
            assert (outcome.state, outcome.text) == ("done", said)

    with_servers(work)
    assert [(each.server, each.message) for each in asked] == [("little", "A table at Vienna")] * 3
    assert [(each.kind, each.title, each.lowest) for each in asked[0].fields] == [
        ("integer", "How many", 1),
        ("boolean", "Outside", None),
    ]


def test_elicitation_without_user_is_declined() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        assert (await called("little__book", place="Vienna")).text == "decline"

    with_servers(work)


def answered(case: str, *replies: Reply) -> tuple[Any, list[Elicitation]]:
    """Return the last reply that a hostile server received, and the questions that reached the user."""
    asked: list[Elicitation] = []
    left = list(replies)

    async def ask(question: Elicitation) -> Reply:
        asked.append(question)
        return left.pop(0) if left else CANCELLED

    texts: list[str] = []

    async def work(servers: McpServers, called: Use) -> None:
        texts.append((await called("bad__poke", asking=ask)).text)

    with_servers(work, McpServerConfig("bad", sys.executable, (HOSTILE, case)))
    return (json.loads(texts[0]) if texts[0] != "poked" else texts[0]), asked


def test_message_is_sanitized_and_only_forms_are_offered() -> None:
    told, (question,) = answered("asks", Reply("accept", {"name": "Ada"}))
    assert told == [{"action": "accept", "content": {"name": "Ada"}}, FORMS]
    assert question.message == "Who? [2J <b>" and question.server == "bad"


def test_endless_elicitation_is_cancelled() -> None:
    told, asked = answered("asks for ever", *[DECLINED] * 20)
    assert told[0] == {"action": "cancel"} and len(asked) == 21


@pytest.mark.parametrize("case", ["asks for a nest", "asks much", "sends away"])
def test_invalid_elicitation_returns_error_without_asking_user(case: str) -> None:
    told, asked = answered(case)
    assert told[0]["code"] == -32602 and asked == []


def test_elicitation_is_cancelled_during_concurrent_calls() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        both = asyncio.gather(*(called("bad__poke", asking=never) for _ in range(2)), return_exceptions=True)
        texts = [json.loads(each.text)[0] for each in await both if not isinstance(each, BaseException)]
        assert {"action": "cancel"} in texts

    async def never(question: Elicitation) -> Reply:
        raise AssertionError("the user must not be asked")

    with_servers(work, McpServerConfig("bad", sys.executable, (HOSTILE, "asks twice")))


@pytest.mark.parametrize("case", ["asks", "asks and forgets"])
def test_elicitation_is_cancelled_until_a_cancelled_call_is_answered(case: str) -> None:
    """The server may still ask for the canceled call, and the running call may be another user's."""

    async def work(servers: McpServers, called: Use) -> None:
        async def ask(question: Elicitation) -> Reply:
            first.cancel()
            return DECLINED

        async def accept(question: Elicitation) -> Reply:
            return Reply("accept", {"name": "Ada"})

        first = asyncio.ensure_future(called("bad__poke", asking=ask))
        with pytest.raises(asyncio.CancelledError):
            await first
        [server] = servers._servers
        while case == "asks" and server._transport is not None and server._transport.unanswered:
            await asyncio.sleep(0)
        action = json.loads((await called("bad__poke", asking=accept)).text)[0]["action"]
        assert action == ("accept" if case == "asks" else "cancel")
        await server.stop()  # a new process cannot ask for an old call
        first = asyncio.ensure_future(called("bad__poke", asking=ask))
        with pytest.raises(asyncio.CancelledError):
            await first

    with_servers(work, McpServerConfig("bad", sys.executable, (HOSTILE, case)))


def test_concurrent_elicitations_of_the_newest_protocol_reach_their_callers() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        asked = 0
        both_asked = asyncio.Event()

        async def book(people: int) -> str:
            async def ask(question: Elicitation) -> Reply:
                nonlocal asked
                asked += 1
                if asked == 2:
                    both_asked.set()
                await both_asked.wait()
                return Reply("accept", {"people": people, "outside": False})

            return (await called("little__book", asking=ask, place="Vienna")).text

        assert await asyncio.gather(book(2), book(3)) == ["Vienna, 2, inside", "Vienna, 3, inside"]

    with_servers(work)


def test_tool_time_limit_pauses_during_elicitation() -> None:
    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        assert context.ask is not None
        first = asyncio.ensure_future(context.ask(Elicitation("far", "Well?", ())))
        await asyncio.sleep(0)
        second = await context.ask(Elicitation("far", "And?", ()))
        said = f"{(await first).action}, {second.action}"
        await asyncio.sleep(60)
        return said

    async def ask(question: Elicitation) -> Reply:
        await asyncio.sleep(0.5)
        replies.append(question.message)
        return DECLINED

    replies: list[str] = []
    tool = replace(CALCULATOR, name="odd", run=run, parameters={"type": "object"}, seconds=0.2)
    outcome = asyncio.run(use(tool, "{}", replace(NOWHERE, ask=ask)))
    assert replies == ["Well?"], "time spent on a question is not tool time, and only one question is open at once"
    assert outcome.text == "error: odd did not respond within 0.2 s", "the time limit applies again after the question"
