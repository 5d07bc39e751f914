"""Questions that a running tool asks the user: shown, answered or declined, and removed when the call ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import say
from web.turns.test_tool_turns import FRAGMENT, Others, call, permit, using

from notso.smollm3 import Event, Message
from notso.web.tools.calculator import CALCULATOR
from notso.web.tools.chat_tool import ChatTool, ToolContext
from notso.web.tools.elicitation import MAX_QUESTIONS, Elicitation, parse_question
from notso.web.tools.toolbox import Toolbox
from notso.web.turns import tool_calls

__all__ = ["using"]  # pytest finds the imported fixture by name

EVIL = "<img src=x onerror=alert(1)>"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "title": f"Name {EVIL}"}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name"],
}


def form(message: str = f"Who? {EVIL}") -> Elicitation:
    return parse_question("far", message, SCHEMA)


def tool(run: Any) -> ChatTool:
    return replace(CALCULATOR, name="odd", run=run, seconds=100, parameters={"type": "object"}, origin="far")


async def curious(arguments: Mapping[str, Any], context: ToolContext) -> str:
    assert context.ask is not None
    reply = await context.ask(form())
    return json.dumps([reply.action, dict(reply.values)])


def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say("Fine.") if messages[-1].role == "tool" else [call("odd", "{}")]


@pytest.fixture
def begun(using: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts a server and a turn whose tool is running."""

    def begin(run: Any = curious, **settings: Any) -> tuple[Any, Any]:
        server = using(script, "odd", toolbox=Toolbox(Others(tool(run))), **settings)
        turn = server.ask("Go", thinking=False)
        assert permit(server, turn).status_code == 200
        return server, turn

    return begin


def waiting(server: Any, turn: Any, other_than: str = "") -> Elicitation:
    """Wait for a question and return it."""

    def question() -> Elicitation | None:
        found: Elicitation | None = server.chat.turns.question(turn.generation_id)
        return found if found is not None and found.id != other_than else None

    server.wait(lambda: question() is not None)
    found = question()
    assert found is not None
    return found


def answer(server: Any, turn: Any, asked: Elicitation, **fields: str) -> Any:
    fields = {"question": asked.id, "answer": "accept"} | fields
    return server.client.post(f"/generations/{turn.generation_id}/question", data=fields, headers=FRAGMENT)


def result(server: Any, turn: Any) -> Any:
    (use,) = server.finished(turn).tool_uses
    return json.loads(use.result) if use.state == "done" else use.state


def test_tool_question_is_shown_and_its_answer_reaches_the_tool(begun: Callable[..., Any]) -> None:
    server, turn = begun()
    question = waiting(server, turn)
    # The question exists a moment before the call's new state is published.
    seen = server.stream(turn, until=lambda event: event.event == "tool" and json.loads(event.data)["call"] != "")
    assert json.loads(seen[-1].data)["call"] == question.id
    status = next(json.loads(event.data) for event in reversed(seen) if event.event == "status")
    assert (status["state"], status["label"]) == ("question", "Needs your input")
    for page in (f"/chats/{turn.chat_id}", f"/generations/{turn.generation_id}/permission"):
        shown = server.client.get(page, headers=FRAGMENT if "permission" in page else {}).text
        assert f'id="question-{question.id}"' in shown and "far asks for input (tool odd):" in shown
        assert "Never enter passwords or keys" in shown and EVIL not in shown and "&lt;img" in shown
    wrong = answer(server, turn, question, **{"value-0": "Ada", "value-1": "151"})
    assert wrong.status_code == 400 and "age is outside the allowed range (minimum: none, maximum: 150)." in wrong.text
    done = answer(server, turn, question, **{"value-0": "Ada", "value-1": "36"})
    assert done.status_code == 200 and "question-" not in done.text
    assert result(server, turn) == ["accept", {"name": "Ada", "age": 36}]
    page = server.client.get(f"/chats/{turn.chat_id}").text
    assert "question-" not in page and "<form" in page
    assert answer(server, turn, question, **{"value-0": "Ada"}).status_code in (404, 409)


def test_question_can_be_declined_and_invalid_answers_are_rejected(begun: Callable[..., Any]) -> None:
    server, turn = begun()
    question = waiting(server, turn)
    assert answer(server, turn, question, question="x").status_code == 409
    assert answer(server, turn, question, answer="cancel").status_code == 400
    assert answer(server, turn, question).status_code == 400, "a name is required"
    assert not server.chat.turns.permit(turn.generation_id, question.id, "once"), "a question needs no permission"
    assert answer(server, turn, question, answer="decline").status_code == 200
    assert result(server, turn) == ["decline", {}]


def test_answer_without_scripts_redirects_to_the_chat(begun: Callable[..., Any]) -> None:
    server, turn = begun()
    fields = {"question": waiting(server, turn).id, "answer": "accept", "value-0": "Ada"}
    again = server.client.post(f"/generations/{turn.generation_id}/question", data=fields)
    assert again.status_code == 303 and again.headers["location"] == f"/chats/{turn.chat_id}"
    assert result(server, turn) == ["accept", {"name": "Ada"}]


def test_stop_cancels_the_question(begun: Callable[..., Any]) -> None:
    said: list[str] = []

    async def asks_beside(arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Ask in a separate task, as the MCP library does."""

        async def ask() -> None:
            assert context.ask is not None
            said.append((await context.ask(form())).action)

        tasks.append(asyncio.create_task(ask()))
        await asyncio.sleep(600)
        return ""

    tasks: list[Any] = []
    server, turn = begun(asks_beside)
    question = waiting(server, turn)
    server.client.post(f"/generations/{turn.generation_id}/stop")
    assert result(server, turn) == "interrupted"
    server.wait(lambda: said == ["cancel"])
    assert answer(server, turn, question, **{"value-0": "Ada"}).status_code in (404, 409)
    assert "question-" not in server.client.get(f"/chats/{turn.chat_id}").text


def test_unanswered_question_is_cancelled_after_timeout(
    begun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_calls, "QUESTION_SECONDS", 0.2)
    server, turn = begun()
    assert result(server, turn) == ["cancel", {}]


def test_question_is_cancelled_when_its_call_ends(begun: Callable[..., Any]) -> None:
    replies: list[Any] = []

    async def hasty(arguments: Mapping[str, Any], context: ToolContext) -> str:
        assert context.ask is not None
        replies.append(asyncio.create_task(context.ask(form())))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        replies.append(context.ask)
        return "0"

    server, turn = begun(hasty)
    assert result(server, turn) == 0
    server.wait(lambda: replies[0].done())
    assert replies[0].result().action == "cancel"
    late = server.on_loop(lambda: replies[1](form()))
    assert late.action == "cancel", "a question after the end of the call is cancelled at once"
    assert server.chat.turns.question(turn.generation_id) is None
    assert ">done<" in server.client.get(f"/chats/{turn.chat_id}").text.replace("</span>done", ">done<")


def test_questions_are_asked_in_turn_and_limited(begun: Callable[..., Any]) -> None:
    async def insistent(arguments: Mapping[str, Any], context: ToolContext) -> str:
        assert context.ask is not None
        return json.dumps([(await context.ask(form(f"{n}?"))).action for n in range(MAX_QUESTIONS + 2)])

    server, turn = begun(insistent)
    last = ""
    for number in range(MAX_QUESTIONS):
        question = waiting(server, turn, last)
        last = question.id
        assert question.message == f"{number}?"
        assert answer(server, turn, question, **{"value-0": "Ada"}).status_code == 200
    assert result(server, turn) == ["accept"] * MAX_QUESTIONS + ["cancel"] * 2


def test_shutdown_does_not_wait_for_an_answer(begun: Callable[..., Any]) -> None:
    server, turn = begun(drain_seconds=120)
    waiting(server, turn)
    server.begin_close()
    server._thread.join(60)
    assert not server._thread.is_alive(), "the shutdown must not wait for the question's timeout"
