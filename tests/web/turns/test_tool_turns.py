"""Turns with tool calls: requested, approved, run, returned to the model, shown, stopped, and kept across restarts."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Message, ToolCall
from notso.web.chat import submit
from notso.web.chat.html_cache import with_html
from notso.web.chat.templates import pretty_json
from notso.web.store.protocol import ChatStore, StoredMessage, ToolUse
from notso.web.tools.calculator import CALCULATOR
from notso.web.tools.chat_tool import ChatTool, ToolContext
from notso.web.tools.toolbox import Toolbox
from notso.web.turns import tool_calls
from notso.web.turns.prompt import NO_RESULT, answer_messages, split_at_tool_calls
from notso.web.turns.tool_calls import MAX_CALLS, MAX_ROUNDS, ToolCalls, ToolOffer
from notso.web.turns.turn_consumer import TurnConsumer
from notso.web.values import visible_text
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true"}


class Others:
    """A source of one additional tool."""

    def left_out(self) -> tuple[()]:
        return ()

    def __init__(self, tool: ChatTool) -> None:
        self.tool = tool

    def tools(self) -> list[ChatTool]:
        return [self.tool]

    def failures(self) -> dict[str, str]:
        return {}

    async def ready(self) -> None:
        return None


def call(name: str = "calculator", arguments: str = '{"expression": "6 * 7"}', number: int = 1) -> Event:
    return Event("tool_call", tool_call=ToolCall(f"call_{number:024x}", name, arguments))


def calculating(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
    """Call the calculator for each line of the question in turn, then state the last result."""
    at = max(i for i, each in enumerate(messages) if each.role == "user")
    results = [each.content for each in messages[at:] if each.role == "tool"]
    lines = messages[at].content.splitlines()
    if len(results) < len(lines):
        yield from say(f"**Part {len(results)}**", "I need a tool." if thinking else "")
        yield call(arguments=json.dumps({"expression": lines[len(results)]}), number=len(results) + 1)
    else:
        yield from say(f"It is `{results[-1] if results else ''}`.", "There it is." if thinking else "")


@pytest.fixture
def using(start: Start) -> Callable[..., Any]:
    """Return a function that starts a server whose new chats may use the calculator or the named tools."""

    def begin(script: Any = calculating, *tools: str, toolbox: Toolbox | None = None, **settings: Any) -> Any:
        server = start(ScriptedEngine(script), **settings).ready()
        if toolbox is not None:
            server.chat.toolbox = toolbox
        fields = {f"tool-{name}": "on" for name in tools or ("calculator",)}
        assert server.client.post("/tools", data=fields).status_code == 303
        return server

    return begin


def asked(server: Any, turn: Any) -> ToolUse:
    """Wait until a call needs approval, and return it."""
    server.wait(lambda: server.chat.turns.asking(turn.generation_id) is not None)
    use: ToolUse = server.chat.turns.asking(turn.generation_id)
    return use


def permit(server: Any, turn: Any, answer: str = "once", use: ToolUse | None = None) -> Any:
    use = use or asked(server, turn)
    fields = {"call": use.id, "answer": answer}
    return server.client.post(f"/generations/{turn.generation_id}/permission", data=fields, headers=FRAGMENT)


def engine_of(server: Any) -> ScriptedEngine:
    engine: ScriptedEngine = server.shared.engine.engine
    return engine


def test_approved_call_is_run_and_its_result_sent_to_the_model(using: Callable[..., Any], screen: Any) -> None:
    server = using()
    turn = server.ask("6 * 7")
    use = asked(server, turn)
    page = server.client.get(f"/chats/{turn.chat_id}").text
    assert "needs approval" in page and f'value="{use.id}"' in page
    assert server.stored(turn).tool_uses == (use,) and use.state == "waiting", "a call awaiting approval is stored"
    assert permit(server, turn).status_code == 200
    events = server.stream(turn)
    answer = server.finished(turn)
    for event in events:
        screen.apply(event)
    assert (answer.state, answer.content) == ("done", "**Part 0**\n\nIt is `42`.")
    assert answer.reasoning == "I need a tool.\n\nThere it is."
    (use,) = answer.tool_uses
    assert (use.state, use.result, use.name, use.round) == ("done", "42", "calculator", 0) and use.duration_ms > 0
    first, second = engine_of(server).requests
    assert [tool["function"]["name"] for tool in first.options.tools or ()] == ["calculator"]
    assert first.options.tools == second.options.tools
    assert second.messages == (
        *first.messages,
        Message("assistant", "**Part 0**", tool_calls=(ToolCall(use.id, use.name, use.arguments),)),
        Message("tool", "42", tool_call_id=use.id),
    )
    page = server.client.get(f"/chats/{turn.chat_id}").text
    html = re.findall(r'-answer-closed">(.*?)</div><div id="msg-[^"]*-answer-tail">', page, re.DOTALL)[0]
    assert html.index("<strong>Part 0</strong>") < html.index('<details class="tool-card"') < html.index("<code>42<")
    assert html == server.chat.pages.answer_html(answer) == server.chat.pages.answer_html(with_html(answer))
    said = ("**Part 0**", "It is `42`.", "I need a tool.", "There it is.")
    assert answer.numbers.completion_tokens == sum(-(-len(text) // 4) for text in said), "the count covers both parts"
    assert "permission card" not in page


def test_stream_shows_tool_cards_in_order_and_signals_approval(using: Callable[..., Any], screen: Any) -> None:
    server = using()
    turn = server.ask("1 + 1\n2 + 2", thinking=False)
    first = asked(server, turn)
    seen = server.stream(turn, until=lambda event: event.event == "tool")
    assert json.loads(seen[-1].data)["call"] == first.id
    status = next(event for event in reversed(seen) if event.event == "status")
    assert json.loads(status.data) | {"message": ""} == {
        "message": "",
        "state": "asking",
        "label": "Needs your approval",
    }
    permit(server, turn)
    server.wait(lambda: asked(server, turn).id != first.id)
    middle = server.stream(turn, until=lambda event: event.event == "tool")
    permit(server, turn)
    late = server.stream(turn)
    answer = server.finished(turn)
    whole = str(server.chat.pages.answer_html(answer))
    for event in late:
        screen.apply(event)
    assert screen.html(turn.message_id, "answer").count("<details class") == 2
    assert [use.result for use in answer.tool_uses] == ["2", "4"] and [use.round for use in answer.tool_uses] == [0, 1]
    # A reader that reconnects in the middle with its last event id ends up with the same page and no duplicates.
    other = type(screen)()
    last = max(int(event.id) for event in middle if event.event == "message")
    for event in [*middle, *server.stream(turn, str(last))]:
        other.apply(event)
    blocks = re.compile(r'<p>|<details class="tool-card"')
    assert len(blocks.findall(other.html(turn.message_id, "answer"))) == len(blocks.findall(whole))
    assert not re.search(r"\shx-(?!target|swap)", "".join(event.data for event in late)), "no htmx controls in streams"


def test_calls_can_be_denied_allowed_per_chat_and_asked_again(using: Callable[..., Any]) -> None:
    server = using()
    turn = server.ask("1 + 1", thinking=False)
    permit(server, turn, "deny")
    answer = server.finished(turn)
    assert answer.tool_uses[0].state == "denied" and "denied" in engine_of(server).requests[-1].messages[-1].content
    turn = server.ask("2 + 2\n3 + 3", turn.chat_id, thinking=False)
    permit(server, turn, "chat")
    assert [use.state for use in server.finished(turn).tool_uses] == ["done", "done"], "the approval covers both calls"
    turn = server.ask("4 + 4", turn.chat_id, thinking=False)
    assert server.finished(turn).tool_uses[0].result == "8", "the approval also covers the next turn"
    page = server.client.get(f"/chats/{turn.chat_id}/tools").text
    assert "always allowed in this chat" in page
    copy = server.client.post(f"/chats/{turn.chat_id}/messages/{turn.message_id}/branch").headers["location"]
    assert "always allowed in this chat" not in server.client.get(f"{copy}/tools").text
    other = server.ask("7 + 7", copy.removeprefix("/chats/"), thinking=False)
    assert asked(server, other).arguments == '{"expression": "7 + 7"}', "a copy of the chat needs its own approval"
    permit(server, other, "deny")
    server.finished(other)
    server.client.post(f"/chats/{turn.chat_id}/tools", data={"tool-calculator": "on", "ask-again": "on"})
    turn = server.ask("5 + 5", turn.chat_id, thinking=False)
    permit(server, turn, "deny")
    assert server.finished(turn).tool_uses[0].state == "denied"
    other = server.ask("6 + 6", thinking=False)
    assert asked(server, other).arguments == '{"expression": "6 + 6"}', "another chat needs its own approval"
    permit(server, other, "deny")
    server.finished(other)


def test_version_with_its_own_settings_keeps_no_withdrawn_permission(using: Callable[..., Any]) -> None:
    calls = [True, False]  # whether the next request for an answer ends with a call

    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        yield from [call()] if messages[-1].role != "tool" and calls.pop(0) else say("Fine.")

    server = using(script)
    turn = server.ask("6 * 7", thinking=False)
    permit(server, turn, "chat")
    server.finished(turn)
    path = f"/chats/{turn.chat_id}/messages"
    server.client.post(f"{path}/{turn.message_id}/regenerate", data={"key": new_id(), "temperature": "0.7"})
    version = server.last(turn.chat_id)
    assert server.finished(version).content == "Fine."
    server.client.post(f"/chats/{turn.chat_id}/tools", data={"tool-calculator": "on", "ask-again": "on"})
    calls.append(True)
    server.client.post(f"{path}/{version.message_id}/continue")
    version = server.last(turn.chat_id)
    turns = server.chat.turns
    server.wait(lambda: turns.asking(version.generation_id) is not None or not server.stored(version).active)
    assert turns.asking(version.generation_id) is not None, "the permission was withdrawn for the chat"
    permit(server, version, "deny")
    server.finished(version)


def test_permissions_granted_during_other_changes_are_kept(
    using: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permission is stored after another request has read the settings, and before it stores them."""
    server = using()
    turn = server.ask("6 * 7", thinking=False)
    permit(server, turn, "deny")
    server.finished(turn)
    read, path = server.shared.store.chat, f"/chats/{turn.chat_id}"

    async def read_and_grant(owner: str, chat_id: str) -> Any:
        chat = await read(owner, chat_id)
        monkeypatch.setattr(server.shared.store, "chat", read)
        await submit._grant(server.shared.store, owner, chat_id, CALCULATOR)
        return chat

    for action, fields in (
        ("tools", {"tool-calculator": "on", "tool-clock": "on"}),
        ("settings", {"temperature": "0.5"}),
    ):
        server.client.post(f"{path}/tools", data={"tool-calculator": "on", "ask-again": "on"})
        assert "always allowed" not in server.client.get(f"{path}/tools").text
        monkeypatch.setattr(server.shared.store, "chat", read_and_grant)
        assert server.client.post(f"{path}/{action}", data=fields).is_redirect
        assert "always allowed" in server.client.get(f"{path}/tools").text, action
    settings = server.on_loop(lambda: read("local", turn.chat_id)).settings
    assert settings["temperature"] == 0.5


def test_summary_and_new_version_are_prepared_with_tools_that_were_starting(using: Callable[..., Any]) -> None:
    class Starting(Others):
        is_ready = True

        def tools(self) -> list[ChatTool]:
            return [self.tool] if self.is_ready else []

        async def ready(self) -> None:
            self.is_ready = True

    source = Starting(ChatTool("far__echo", "Echo.", {"type": "object"}, nothing, "far"))
    server = using(lambda *_: say("Done."), "far__echo", toolbox=Toolbox(source))
    turn = server.ask("go", thinking=False)
    server.finished(turn)
    engine, prepared = engine_of(server), list[Any]()
    prepare = engine.prepare

    def record(messages: Any, params: Any = None, options: Any = None) -> Any:
        prepared.append(options.tools)
        return prepare(messages, params, options)

    engine.prepare = record  # type: ignore[method-assign]
    for action in (f"messages/{turn.message_id}/regenerate", "summarize"):
        source.is_ready = False
        assert server.client.post(f"/chats/{turn.chat_id}/{action}", data={"key": new_id()}).is_redirect, action
        server.on_loop(server.chat.turns.wait_for_all)
    assert len(prepared) == 2 and all(prepared)
    message = f"/chats/{turn.chat_id}/messages"
    for path in (f"{message}/{turn.message_id}/continue", message, "/chats"):
        source.is_ready = False
        count = len(engine.requests)
        assert server.client.post(path, data={"key": new_id(), "text": "go"}).is_redirect, path
        server.on_loop(server.chat.turns.wait_for_all)
        assert len(engine.requests) == count + 1 and engine.requests[-1].options.tools, path


async def nothing(arguments: Mapping[str, Any], context: ToolContext) -> str:
    return "done"


def test_permission_ends_when_the_tool_definition_changes(using: Callable[..., Any]) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        return [call("far__echo", "{}")] if messages[-1].role == "user" else say("Done.")

    tool = ChatTool("far__echo", "Echo a text.", {"type": "object"}, nothing, "far")
    others = Others(tool)
    server = using(script, "far__echo", toolbox=Toolbox(others))
    turn = server.ask("one", thinking=False)
    permit(server, turn, "chat")
    server.finished(turn)
    for changed, is_asked in (
        (tool, False),
        (replace(tool, description="Delete all files."), True),
        (replace(tool, parameters={"type": "object", "properties": {"path": {"type": "string"}}}), True),
        (replace(tool, origin="near"), True),
        (replace(tool, remote_name="echo!"), True),
        (tool, False),
    ):
        others.tool = changed
        turn = server.ask("more", turn.chat_id, thinking=False)
        if is_asked:
            assert "always allowed in this chat" not in server.client.get(f"/chats/{turn.chat_id}/tools").text
            permit(server, turn, "deny")
        assert server.finished(turn).tool_uses[0].state == ("denied" if is_asked else "done"), changed


def test_two_calls_with_the_same_id_need_separate_approval(using: Callable[..., Any]) -> None:
    ran: list[str] = []

    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        ran.append(arguments["text"])
        return "done"

    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        texts = ("harmless", "harm") if messages[-1].role == "user" else ()
        return [call("far__echo", json.dumps({"text": each})) for each in texts] or say("Done.")

    box = Toolbox(Others(ChatTool("far__echo", "Echo.", {"type": "object"}, run, "far")))
    server = using(script, "far__echo", toolbox=box)
    turn = server.ask("go", thinking=False)
    first = asked(server, turn)
    permit(server, turn, "once", first)
    server.wait(lambda: (now := server.chat.turns.asking(turn.generation_id)) is not None and now.id != first.id)
    permit(server, turn, "once", first)  # repeated, as by a double click
    assert ran == ["harmless"]
    permit(server, turn, "deny")
    uses = server.finished(turn).tool_uses
    assert [use.state for use in uses] == ["done", "denied"] and ran == ["harmless"]
    assert len({use.id for use in uses}) == 2
    told = [each.tool_call_id for each in engine_of(server).requests[-1].messages if each.role == "tool"]
    assert told == [use.id for use in uses]


UNSEEN = ("\u202e", "\u200b", "\u2066", "\ufe0f", "\u00ad", "\u2028", "\u3164", "\U000e0069", "\U000e0101")


def test_invisible_characters_are_escaped_in_tool_text(using: Callable[..., Any]) -> None:
    hidden = {f"a{each}b": f"moc.{each}live" for each in UNSEEN}

    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        arguments = json.dumps(hidden, ensure_ascii=False)
        return [call("far__echo", arguments)] if messages[-1].role == "user" else say("Done.")

    said = "Echo." + "".join(UNSEEN)
    box = Toolbox(Others(ChatTool("far__echo", said, {"type": "object"}, nothing, "far")))
    server = using(script, "far__echo", toolbox=box)
    turn = server.ask("go", thinking=False)
    asked(server, turn)
    permission = server.client.get(f"/generations/{turn.generation_id}/permission").text
    permit(server, turn)
    server.finished(turn)
    for page in (
        permission,
        server.client.get(f"/chats/{turn.chat_id}").text,
        server.client.get("/tools").text,
    ):
        assert not [each for each in UNSEEN if each in page]
        assert all(f"\\u{{{ord(each):x}}}" in page for each in UNSEEN)


def test_each_different_character_of_a_text_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(character: str) -> bool:
        seen.append(character)
        return character != UNSEEN[0]

    monkeypatch.setattr(visible_text, "is_visible", look)
    assert visible_text.visible(f"a{UNSEEN[0]}\n" + "ab" * 1000) == "a\\u{202e}\n" + "ab" * 1000
    assert sorted(seen) == ["a", "b", UNSEEN[0]]


def test_unanswered_approval_is_denied_after_timeout(
    using: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_calls, "PERMISSION_SECONDS", 0.2)
    server = using()
    answer = server.finished(server.ask("1 + 1", thinking=False))
    assert (answer.state, answer.tool_uses[0].state) == ("done", "denied")
    assert answer.tool_uses[0].result.startswith("denied: no reply")


def test_all_tools_are_off_until_enabled(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("Hello."))).ready()
    turn = server.ask("Hi")
    assert server.finished(turn).tool_uses == () and engine_of(server).requests[-1].options.tools is None
    page = server.client.get("/tools", headers=FRAGMENT).text
    assert "No tools enabled" in page and "10 tokens" in page and " checked" not in page
    page = server.client.post(
        f"/chats/{turn.chat_id}/tools", data={"tool-clock": "on", "tool-calculator": "on"}, headers=FRAGMENT
    ).text
    assert "Together they add 20 tokens" in page and page.count(" checked") == 2
    server.finished(server.ask("Hi", turn.chat_id))
    names = [tool["function"]["name"] for tool in engine_of(server).requests[-1].options.tools or ()]
    assert names == ["calculator", "clock"]
    assert "No tools enabled" in server.client.get("/tools", headers=FRAGMENT).text, "new chats still have no tools"
    server.client.post("/tools", data={"tool-clock": "on"})
    server.client.post(f"/chats/{turn.chat_id}/tools", data={})
    server.finished(server.ask("Hi", turn.chat_id))
    assert engine_of(server).requests[-1].options.tools is None, "this chat has no tools, although new chats have one"


def test_call_of_unknown_tool_fails_without_approval(using: Callable[..., Any]) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        yield from say("So.") if messages[-1].role == "tool" else [call("rm", "{}")]

    server = using(script)
    answer = server.finished(server.ask("Go"))
    assert answer.content == "So." and answer.tool_uses[0].state == "failed"
    assert answer.tool_uses[0].result == "error: unknown tool; available tools: calculator"


def test_disabled_tool_is_not_run(using: Callable[..., Any]) -> None:
    server = using(calculating, "clock")
    answer = server.finished(server.ask("1 + 1", thinking=False))
    assert answer.tool_uses[0].state == "failed" and "available tools: clock" in answer.tool_uses[0].result


def test_calls_per_round_are_run_in_order_and_limited(using: Callable[..., Any]) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].role == "tool":
            yield from say("Done.")
            return
        for number in range(1, MAX_CALLS + 3):
            yield call(arguments=json.dumps({"expression": f"{number} * 10"}), number=number)
            yield from say(f"After {number}. ")

    server = using(script)
    turn = server.ask("Go")
    for _ in range(2):
        permit(server, turn, "once", use := asked(server, turn))
        server.wait(lambda use=use: getattr(server.chat.turns.asking(turn.generation_id), "id", "") != use.id)
    permit(server, turn, "chat")
    answer = server.finished(turn)
    assert [use.result for use in answer.tool_uses][:MAX_CALLS] == [f"{n}0" for n in range(1, MAX_CALLS + 1)]
    assert [use.state for use in answer.tool_uses][MAX_CALLS:] == ["failed", "failed"]
    assert [each.strip() for each in split_at_tool_calls(answer)][1:3] == ["After 1.", "After 2."]
    sent = engine_of(server).requests[-1].messages
    assert [each.role for each in sent[-MAX_CALLS - 3 :]] == ["assistant"] + ["tool"] * (MAX_CALLS + 2)
    assert len(sent[-MAX_CALLS - 3].tool_calls) == MAX_CALLS + 2
    assert answer.content.endswith("After 10. \n\nDone.") and split_at_tool_calls(answer)[-1].startswith("After 10.")
    page = server.client.get(f"/chats/{turn.chat_id}").text
    assert "<p>After 10.</p>\n<p>Done.</p>" in page
    assert server.chat.pages.answer_html(answer) == server.chat.pages.answer_html(with_html(answer))
    server.finished(server.ask("More", turn.chat_id))
    sent = engine_of(server).requests[-2].messages
    assert sent[-2:] == (Message("assistant", "Done."), Message("user", "More")), "the rest belongs to the calls"


def test_number_of_tool_call_rounds_is_limited(using: Callable[..., Any]) -> None:
    numbers = iter(range(1, 1000))
    server = using(lambda messages, thinking: [call(number=next(numbers))])
    turn = server.ask("Go")
    permit(server, turn, "chat")
    answer = server.finished(turn)
    assert answer.state == "done" and "rounds of tool calls" in answer.note
    assert len(engine_of(server).requests) == MAX_ROUNDS + 2
    assert [use.state for use in answer.tool_uses] == ["done"] * MAX_ROUNDS + ["failed", "interrupted"]


def test_answer_stopped_during_approval_can_be_continued(using: Callable[..., Any]) -> None:
    server = using()
    turn = server.ask("1 + 1", thinking=False)
    asked(server, turn)
    server.client.post(f"/generations/{turn.generation_id}/stop")
    answer = server.finished(turn)
    assert (answer.state, answer.tool_uses[0].state) == ("stopped", "interrupted")
    page = server.client.get(f"/chats/{turn.chat_id}").text
    assert "data-continue" in page and "permission card" not in page and "interrupted" in page
    late = server.client.post(
        f"/generations/{turn.generation_id}/permission", data={"call": answer.tool_uses[0].id, "answer": "once"}
    )
    assert late.status_code == 303 and server.stored(turn).tool_uses == answer.tool_uses, "it is too late to approve"
    server.client.post(f"/chats/{turn.chat_id}/messages/{turn.message_id}/continue")
    turn = server.last(turn.chat_id)
    permit(server, turn)
    answer = server.finished(turn)
    assert (answer.state, answer.content) == ("done", "**Part 0**\n\nIt is `2`.")
    assert [use.result for use in answer.tool_uses] == ["2"]


def _slow(entered: list[str]) -> ChatTool:
    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        entered.append(context.chat_id)
        try:
            await asyncio.sleep(60)
        finally:
            entered.append("left")
        return ""

    return replace(CALCULATOR, name="slow", run=run, seconds=100, parameters={"type": "object", "properties": {}})


def test_stop_immediately_after_approval_prevents_the_call() -> None:
    """The stop arrives before the turn has noticed the approval."""
    ran: list[object] = []

    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        ran.append(arguments)
        return "done"

    async def finalize() -> bool:
        async def changed(use: ToolUse, waits_for: str) -> None: ...

        offer = ToolOffer((replace(CALCULATOR, run=run),), ToolContext("", "", cast(ChatStore, None)))
        calls = ToolCalls(offer, [], changed)
        use = calls.add(ToolCall("call_1", "calculator", '{"expression": "1"}'), 0, 0)
        finalizing = asyncio.create_task(calls.finalize(0))
        while calls.asking is None:
            await asyncio.sleep(0)
        assert calls.permit(use.id, "once")
        calls.stop()
        return await finalizing

    assert not asyncio.run(finalize())
    assert not ran


def test_stop_interrupts_a_running_tool(using: Callable[..., Any]) -> None:
    entered: list[str] = []
    slow = _slow(entered)
    server = using(lambda *_: [call("slow", "{}")], "slow", toolbox=Toolbox(Others(slow)))
    turn = server.ask("Go")
    permit(server, turn)
    server.wait(lambda: bool(entered))
    page = server.client.get(f"/chats/{turn.chat_id}").text
    assert "running" in page and "permission card" not in page
    server.client.post(f"/generations/{turn.generation_id}/stop")
    answer = server.finished(turn)
    assert (answer.state, answer.tool_uses[0].state, entered[-1]) == ("stopped", "interrupted", "left")


def test_answer_stopped_as_its_tool_call_arrives_can_be_continued(
    using: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = TurnConsumer._restore_unreplayed

    def stop(self: TurnConsumer) -> None:  # after the end of the engine request and before its call runs
        restore(self)
        self.turn.cancelled = True
        self.stop("user")

    monkeypatch.setattr(TurnConsumer, "_restore_unreplayed", stop)
    server = using()
    turn = server.ask("What is 6 * 7?")
    message = server.finished(turn)
    assert (message.state, [use.state for use in message.tool_uses]) == ("stopped", ["interrupted"])


def test_answer_stopped_after_a_tool_call_continues_its_last_part(using: Callable[..., Any]) -> None:
    server = using()
    engine = engine_of(server)
    turn = server.ask("1 + 1", thinking=False)
    asked(server, turn)
    engine.pace_seconds = 0.05
    engine.script = lambda *_: say("It is rather long, so that somebody may stop it in the middle of it. " * 20)
    permit(server, turn)
    server.wait(lambda: "It is" in (server.stored(turn).content or ""))
    server.client.post(f"/generations/{turn.generation_id}/stop")
    answer = server.finished(turn)
    assert (
        answer.state == "stopped"
        and answer.tool_uses[0].state == "done"
        and split_at_tool_calls(answer)[1].startswith("It is")
    )
    engine.pace_seconds, engine.script = 0.0, lambda *_: say(" - so.")
    server.client.post(f"/chats/{turn.chat_id}/messages/{turn.message_id}/continue")
    whole = server.finished(server.last(turn.chat_id))
    assert whole.content == answer.content + " - so." and whole.tool_uses == answer.tool_uses
    request = engine.requests[-1]
    assert request.options.continue_last and request.messages[-1] == Message(
        "assistant", split_at_tool_calls(answer)[1]
    )
    assert [each.role for each in request.messages] == ["user", "assistant", "tool", "assistant"]


def test_pending_approval_survives_a_crash(using: Callable[..., Any], start: Start, tmp_path: Path) -> None:
    server = using()
    turn = server.ask("1 + 1", thinking=False)
    use = asked(server, turn)
    # the store as a crash would leave it
    shutil.copytree(tmp_path / "data", tmp_path / "after", ignore=shutil.ignore_patterns("*lock*"))
    again = start(ScriptedEngine(calculating), data_dir=tmp_path / "after").ready()
    answer = again.stored(turn)
    assert answer.state == "running" and answer.tool_uses == (use,)
    assert asked(again, turn).id == use.id
    permit(again, turn)
    assert again.finished(turn).content == "**Part 0**\n\nIt is `2`."
    server.client.post(f"/generations/{server.last(turn.chat_id).generation_id}/stop")


def test_shutdown_does_not_wait_for_an_approval(using: Callable[..., Any], tmp_path: Path) -> None:
    server = using(drain_seconds=120)
    turn = server.ask("1 + 1", thinking=False)
    asked(server, turn)
    server.begin_close()
    server._thread.join(60)
    assert not server._thread.is_alive(), "the shutdown must not wait for the approval's timeout"


def test_invalid_or_repeated_approvals_have_no_effect(using: Callable[..., Any]) -> None:
    server = using()
    turn = server.ask("1 + 1\n2 + 2", thinking=False)
    use = asked(server, turn)
    url = f"/generations/{turn.generation_id}/permission"
    for fields, status in (({"call": use.id}, 400), ({"call": "x", "answer": "once"}, 409), ({"answer": "all"}, 400)):
        assert server.client.post(url, data=fields, headers=FRAGMENT).status_code == status
    assert server.client.post("/generations/" + "0" * 32 + "/permission", data={}).status_code == 404
    assert asked(server, turn).id == use.id
    assert permit(server, turn, "once", use).status_code == 200
    server.wait(lambda: asked(server, turn).id != use.id)
    again = permit(server, turn, "chat", use)
    assert again.status_code == 200 and asked(server, turn).id != use.id, "approval must not apply to the next call"
    permit(server, turn, "deny")
    assert [each.state for each in server.finished(turn).tool_uses] == ["done", "denied"]


def test_hostile_tool_names_arguments_and_results_are_escaped(using: Callable[..., Any], screen: Any) -> None:
    evil = '<img src=x onerror=alert(1)><hx-partial hx-target="body">"\u202e</pre>'

    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        return evil + "\n\ndata: x\nevent: done\n"

    tool = replace(CALCULATOR, name="odd", run=run, parameters={"type": "object", "properties": {"a": {}}})

    def script(messages: Sequence[Message], thinking: bool) -> list[Event]:
        last = messages[-1].role
        odd = [call("odd", json.dumps({"a": evil}), 1), call(f"{evil}\x00\n", "{}", 2)]
        return odd if last == "user" else say("Fine.")

    server = using(script, "odd", toolbox=Toolbox(Others(tool)))
    turn = server.ask("Go")
    asked(server, turn)
    form = server.client.get(f"/generations/{turn.generation_id}/permission", headers=FRAGMENT).text
    permit(server, turn)
    events = server.stream(turn)
    server.finished(turn)
    page = server.client.get(f"/chats/{turn.chat_id}").text
    exported = server.client.get(f"/chats/{turn.chat_id}/export/html").text
    for text in (form, page, exported, "".join(event.data for event in events)):
        assert "<img src" not in text and '<hx-partial hx-target="body"' not in text and "&lt;img" in text
    assert [event.event for event in events].count("done") == 1


def test_deeply_nested_arguments_are_not_indented() -> None:
    assert pretty_json('{"a": [1, "é"]}') == '{\n  "a": [\n    1,\n    "é"\n  ]\n}'
    nested = '{"a":' + "[" * 60 + ",".join(["1"] * 1000) + "]" * 60 + "}"
    assert pretty_json(nested) == nested, "with indentation, it would be sixty times as long"
    wide = '{"a":[' + ",".join(["1234"] * 1000) + "]}"
    assert pretty_json(wide).count("\n") == 1003


def test_long_tool_result_is_truncated(using: Callable[..., Any]) -> None:
    async def run(arguments: Mapping[str, Any], context: ToolContext) -> str:
        return "word " * 10_000

    tool = replace(CALCULATOR, name="long", run=run)
    script = lambda messages, thinking: say("Fine.") if messages[-1].role == "tool" else [call("long")]  # noqa: E731
    server = using(script, "long", toolbox=Toolbox(Others(tool)))
    turn = server.ask("Go")
    permit(server, turn)
    answer = server.finished(turn)
    assert len(answer.tool_uses[0].result) < 8_100 and "[cut: 8,000 of 50,000 characters]" in answer.tool_uses[0].result
    assert (
        f"Show all ({len(answer.tool_uses[0].result):,} characters)" in server.client.get(f"/chats/{turn.chat_id}").text
    )


def test_export_and_import_preserve_tool_calls(using: Callable[..., Any]) -> None:
    server = using()
    turn = server.ask("6 * 7", thinking=False)
    permit(server, turn, "chat")
    answer = server.finished(turn)
    text = server.client.get(f"/chats/{turn.chat_id}/export/md").text
    order = [text.index(piece) for piece in ("**Part 0**", "Tool: calculator (done)", '"6 * 7"', "42", "It is `42`.")]
    assert order == sorted(order)
    body = server.client.get(f"/chats/{turn.chat_id}/export/json").json()
    assert body["version"] == 3 and "tools_allowed" not in json.dumps(body)
    headers = {"Content-Type": "application/json"}
    imported = server.client.post("/import", content=json.dumps(body), headers=headers)
    assert imported.status_code in (200, 303), imported.text
    chats = server.on_loop(lambda: server.shared.store.chats("local"))
    copy = next(chat for chat in chats if chat.id != turn.chat_id)
    (_, again) = server.on_loop(lambda: server.shared.store.messages("local", copy.id))
    assert again.tool_uses[0].id != answer.tool_uses[0].id
    assert [replace(use, id="") for use in again.tool_uses] == [replace(use, id="") for use in answer.tool_uses]
    assert (again.content, split_at_tool_calls(again)) == (answer.content, split_at_tool_calls(answer))
    old = json.loads(json.dumps(body))
    old["version"] = 1
    del old["chats"][0]["messages"][1]["tool_uses"]
    assert server.client.post("/import", content=json.dumps(old), headers=headers).status_code in (200, 303)
    for wrong in ("[1]", "{", '{"a": NaN}', '"x"', "{" + '"a":[' * 100):
        body["chats"][0]["messages"][1]["tool_uses"][0]["arguments"] = wrong
        assert server.client.post("/import", content=json.dumps(body), headers=headers).status_code == 400
    body["chats"][0]["messages"][1]["tool_uses"] = [
        {"id": "a", "name": "x", "arguments": "{}", "state": "running", "round": 3, "content_at": 999, "result": "r"},
        {"id": "a", "name": "y", "arguments": "{}", "state": "done", "round": 0, "content_at": 2},
    ]
    assert server.client.post("/import", content=json.dumps(body), headers=headers).status_code in (200, 303)


def test_later_turns_edits_and_summaries_handle_tool_calls(using: Callable[..., Any]) -> None:
    server = using()
    turn = server.ask("6 * 7", thinking=False)
    permit(server, turn)
    answer = server.finished(turn)
    found = server.client.get("/search?q=Part", headers=FRAGMENT).text
    assert turn.message_id in found, "text around tool calls is searchable"
    engine_of(server).script = lambda *_: say("Noted.")
    server.finished(server.ask("And now?", turn.chat_id, thinking=False))
    sent = engine_of(server).requests[-1].messages
    assert sent[1:4] == tuple(answer_messages(answer)) and sent[3] == Message("assistant", "It is `42`.")
    edited = server.client.post(
        f"/chats/{turn.chat_id}/messages/{turn.message_id}/edit", data={"text": "My own words."}, headers=FRAGMENT
    )
    assert edited.status_code == 200
    stored = server.stored(turn)
    assert split_at_tool_calls(stored) == ["", "My own words."] and len(answer_messages(stored)) == 3
    server.client.post(f"/chats/{turn.chat_id}/summarize", headers=FRAGMENT)
    summary = server.finished(server.last(turn.chat_id))
    assert (summary.kind, summary.state) == ("summary", "done")
    server.finished(server.ask("Next", turn.chat_id, thinking=False))
    assert [each.role for each in engine_of(server).requests[-1].messages] == ["system", "user"]


def test_context_meter_counts_tools_and_results(using: Callable[..., Any]) -> None:
    server = using()
    turn = server.ask("6 * 7", thinking=False)
    permit(server, turn)
    server.finished(turn)
    text = server.client.post(f"/chats/{turn.chat_id}/estimate", data={}, headers=FRAGMENT).text
    parts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([\d,]+)</dd>", text))
    assert parts["Tools"] == "10" and parts["Tool calls and results"] == "1"
    counted = sum(int(parts[name].replace(",", "")) for name in parts if name != "Free")
    assert f"{counted} / 4,096" in text


def test_prompt_too_long_after_tool_result_fails_and_keeps_text(using: Callable[..., Any]) -> None:
    from notso.smollm3 import ContextLengthError

    server = using()
    turn = server.ask("6 * 7", thinking=False)
    use = asked(server, turn)
    engine_of(server).refusal = ContextLengthError(9120, 8192)
    permit(server, turn, "once", use)
    answer = server.finished(turn)
    assert answer.state == "failed" and "9,120" in answer.note
    assert answer.tool_uses[0].result == "42" and answer.content == "**Part 0**"


def test_interrupted_call_is_sent_to_the_model_without_result() -> None:
    use = ToolUse("call_1", "clock", "{}", "interrupted")
    message = StoredMessage("m", "c", "assistant", "", "", "stopped", 1, tool_uses=(use,))
    sent = answer_messages(message)
    assert [each.content for each in sent] == ["", NO_RESULT] and sent[0].tool_calls[0].name == "clock"
