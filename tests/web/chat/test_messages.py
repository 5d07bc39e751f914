"""Message operations: versions, editing, continuing and summaries. A chat is a tree, and no operation loses a
message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Message
from notso.web.turns.prompt import SUMMARY_HEADING, SUMMARY_REQUEST
from notso.web.values.ids import new_id
from notso.web.values.wording import words

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


def counting() -> Callable[[Sequence[Message], bool], Iterator[Event]]:
    """Each answer contains its number and the newest message of its prompt."""
    number = 0

    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        nonlocal number
        number += 1
        yield from say(f"answer {number} to {messages[-1].content}")

    return script


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine(counting())).ready()


def press(server: Any, asked: Any, verb: str, **fields: str) -> Any:
    """Send a message's action as htmx does."""
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}/{verb}"
    answer = server.client.post(url, data={"key": new_id()} | fields, headers=FRAGMENT)
    assert answer.status_code == 200, answer.text
    return answer


def act(server: Any, asked: Any, verb: str, **fields: str) -> Any:
    """Send a message's action and wait until no answer is running."""
    answer = press(server, asked, verb, **fields)
    server.wait(lambda: server.chat.turns.unfinished == 0)
    return answer


def shown(server: Any, chat_id: str) -> list[str]:
    """Return the texts on the page, in order."""
    page = server.client.get(f"/chats/{chat_id}").text
    bubbles = r'<div class="bubble" dir="auto" hx-ignore>(.*?)</div>|-answer-closed">(?:<p>(.*?)</p>)?'
    return [
        "".join(groups) for groups in re.findall(bubbles, page.partition('id="turns"')[2], re.DOTALL) if any(groups)
    ]


def question_of(server: Any, asked: Any) -> Any:
    message = server.stored(asked)
    return replace(asked, message_id=message.parent_id)


def test_regenerated_answer_is_a_selectable_version(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    engine = server.shared.engine.engine
    engine.gate.clear()  # Otherwise the answer might end before the fragment is rendered.
    fragment = press(server, asked, "regenerate").text
    assert fragment.count("<article") == 2 and 'hx-sse:connect="/generations/' in fragment
    engine.gate.set()
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert "2/2" in server.client.get(f"/chats/{asked.chat_id}").text
    assert shown(server, asked.chat_id) == ["one", "answer 2 to one"]
    act(server, asked, "choose")
    assert shown(server, asked.chat_id) == ["one", "answer 1 to one"]
    server.finished(server.ask("two", asked.chat_id))
    assert shown(server, asked.chat_id) == ["one", "answer 1 to one", "two", "answer 3 to two"]
    read = [message.content for message in server.shared.engine.engine.requests[-1].messages]
    assert read == ["one", "answer 1 to one", "two"], "the prompt follows the branch on the page"


def test_edited_question_starts_a_branch_and_each_keeps_its_selection(server: Any) -> None:
    first = server.ask("one")
    server.finished(first)
    second = server.ask("two", first.chat_id)
    server.finished(second)
    question = question_of(server, first)
    act(server, question, "edit", text="one, but better")
    assert shown(server, first.chat_id) == ["one, but better", "answer 3 to one, but better"]
    act(server, question, "choose")
    assert shown(server, first.chat_id) == ["one", "answer 1 to one", "two", "answer 2 to two"]
    act(server, second, "regenerate")
    act(server, server.last(first.chat_id), "choose")
    act(server, question_of(server, second), "edit", text="two again")
    assert shown(server, first.chat_id)[-2:] == ["two again", "answer 5 to two again"]
    assert len(server.on_loop(lambda: server.shared.store.messages("local", first.chat_id))) == 9


def test_edited_answer_is_marked_and_used_in_the_prompt(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    form = server.client.get(f"/chats/{asked.chat_id}/messages/{asked.message_id}/edit", headers=FRAGMENT).text
    assert "answer 1 to one</textarea>" in form
    fragment = act(server, asked, "edit", text="**my** words").text
    assert "<strong>my</strong> words" in fragment and ">edited<" in fragment
    server.finished(server.ask("two", asked.chat_id))
    assert server.shared.engine.engine.requests[-1].messages[1].content == "**my** words"
    empty = server.client.post(f"/chats/{asked.chat_id}/messages/{asked.message_id}/edit", data={"text": " "})
    assert empty.status_code == 400


def test_repeated_key_regenerates_once(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    key = new_id()
    for _ in range(2):
        act(server, asked, "regenerate", key=key)
    assert len(server.on_loop(lambda: server.shared.store.messages("local", asked.chat_id))) == 3


def test_question_with_the_key_of_another_chat_is_shown_again(server: Any) -> None:
    other, key = server.ask("Hi"), new_id()
    server.finished(other)
    server.finished(server.ask("My draft", key=key))
    question = server.on_loop(lambda: server.shared.store.messages("local", other.chat_id))[0]
    url = f"/chats/{other.chat_id}/messages"
    for each in (url, f"{url}/{question.id}/edit"):
        refused = server.client.post(each, data={"text": "My draft", "key": key})
        assert refused.status_code == 400 and "My draft</textarea>" in refused.text


def test_refused_edit_of_an_answer_is_shown_again(start: Start) -> None:
    engine = ScriptedEngine(counting())
    server = start(engine).ready()
    engine.gate.clear()
    running = server.ask("Hi")
    url = f"/chats/{running.chat_id}/messages/{running.message_id}/edit"
    refused = server.client.post(url, data={"text": "My draft"})
    engine.gate.set()
    assert refused.status_code == 409 and "My draft</textarea>" in refused.text


def test_stopped_answer_can_be_continued(start: Start) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].role == "assistant":
            yield from say(" and the rest.")
        else:
            yield from say("the **beginning", "thoughts")
            yield from say("x" * 10_000, piece=1)

    server = start(ScriptedEngine(script, pace_seconds=0.01)).ready()
    asked = server.ask("one")
    server.wait(lambda: "beginning" in server.stored(asked).content)
    server.client.post(f"/generations/{asked.generation_id}/stop", data={})
    before = server.finished(asked)
    assert before.state == "stopped"
    act(server, asked, "continue")
    after = server.stored(asked)
    assert after.content == before.content + " and the rest." and after.state == "done"
    assert after.reasoning == before.reasoning == "thoughts"
    assert after.generation_id != before.generation_id
    assert after.numbers.completion_tokens > before.numbers.completion_tokens
    request = server.shared.engine.engine.requests[-1]
    assert request.options.continue_last and request.messages[-1].content == before.content
    assert request.messages[-1].reasoning_content == "thoughts"
    assert len(server.on_loop(lambda: server.shared.store.messages("local", asked.chat_id))) == 2


def test_continued_version_keeps_its_settings(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    act(server, asked, "regenerate", temperature="0.25")
    version = server.last(asked.chat_id)
    server.client.post(f"/chats/{asked.chat_id}/settings", data={"temperature": "1.5"})
    act(server, version, "continue")
    act(server, version, "continue")
    act(server, asked, "continue")
    engine = server.shared.engine.engine
    assert [request.params.temperature for request in engine.requests[1:]] == [0.25, 0.25, 0.25, 1.5]


@pytest.mark.parametrize("mode", ["thinking", "answer"])
def test_stopped_reasoning_can_be_continued_or_answered(start: Start, mode: str) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].role == "assistant":
            yield from say("So it is.", " more thoughts" * 20)
        else:
            yield from say("", "thoughts " * 10_000)

    server = start(ScriptedEngine(script, pace_seconds=0.005)).ready()
    asked = server.ask("one")
    server.wait(lambda: server.stored(asked).reasoning != "")
    server.client.post(f"/generations/{asked.generation_id}/stop", data={})
    before = server.finished(asked)
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert "Continue thinking" in page and words["answer_now"] in page
    act(server, asked, "continue", mode=mode)
    after = server.stored(asked)
    assert after.content == "So it is."
    assert after.reasoning.startswith(before.reasoning)
    assert (" more thoughts" * 20 in after.reasoning) == (mode == "thinking")
    assert after.numbers.thinking_ms >= before.numbers.thinking_ms


def test_answer_now_ends_running_reasoning(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("So.", "hm " * 20_000), pace_seconds=0.01)).ready()
    asked = server.ask("one")
    server.wait(lambda: server.stored(asked).reasoning != "")
    url = f"/generations/{asked.generation_id}/answer-now"
    assert server.client.post(url, data={}, headers=FRAGMENT).status_code == 204
    done = server.finished(asked)
    assert done.content == "So." and len(done.reasoning) < 50_000 and done.state == "done"


def test_actions_during_a_running_answer_return_409(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    server.shared.engine.engine.gate.clear()
    running = server.ask("two", asked.chat_id)
    for verb in ("regenerate", "continue", "edit"):
        target = question_of(server, asked) if verb == "edit" else asked
        url = f"/chats/{asked.chat_id}/messages/{target.message_id}/{verb}"
        answer = server.client.post(url, data={"key": new_id(), "text": "x"}, headers=FRAGMENT)
        assert answer.status_code == 409 and "<html" not in answer.text, verb
    assert server.client.post(f"/chats/{asked.chat_id}/summarize", data={"key": new_id()}).status_code == 409
    server.shared.engine.engine.gate.set()
    assert server.finished(running).state == "done"


def test_summary_replaces_earlier_messages_until_removed(server: Any) -> None:
    server.client.post("/tools", data={"tool-clock": "on"})
    first = server.ask("one")
    server.finished(first)
    answer = server.client.post(f"/chats/{first.chat_id}/summarize", data={"key": new_id()}, headers=FRAGMENT)
    assert answer.status_code == 200 and "summary-card" in answer.text
    server.wait(lambda: server.chat.turns.unfinished == 0)
    engine = server.shared.engine.engine
    before, asked = engine.requests
    assert asked.messages[-1].content == SUMMARY_REQUEST and asked.options.tool_choice == "none"
    asked_thinking, asked_tools = asked.options.thinking, asked.options.tools
    same = (before.options.thinking, before.options.tools)
    assert (asked_thinking, asked_tools) == same, "equal options let the summary reuse the cached prompt"
    assert asked_tools and asked.params.thinking_budget == 0
    summary = server.last(first.chat_id)
    server.finished(server.ask("two", first.chat_id))
    read = [(message.role, message.content) for message in engine.requests[-1].messages]
    assert read == [("system", f"{SUMMARY_HEADING}\nanswer 2 to {SUMMARY_REQUEST}"), ("user", "two")]
    assert len(shown(server, first.chat_id)) == 5, "the page still shows all messages"
    again = server.client.post(
        f"/chats/{first.chat_id}/messages/{summary.message_id}/regenerate", data={"key": new_id()}
    )
    assert again.status_code == 404, "a summary cannot be regenerated like an answer"
    act(server, summary, "unsummarize")
    assert shown(server, first.chat_id) == ["one", "answer 1 to one", "two", "answer 3 to two"]
    server.finished(server.ask("three", first.chat_id))
    assert [message.content for message in engine.requests[-1].messages][:2] == ["one", "answer 1 to one"]


def test_summarizing_twice_returns_400(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/summarize"
    server.client.post(url, data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert server.client.post(url, data={"key": new_id()}).status_code == 400


def test_attachments_are_shown_escaped_and_kept_when_editing(server: Any) -> None:
    fields = {"text": "What is it?", "file-1-name": "a <b>.txt", "file-1-text": "<script>1</script>\n"}
    answer = server.client.post("/chats", data=fields | {"key": new_id()})
    asked = server.last(answer.headers["location"].removeprefix("/chats/"))
    server.finished(asked)
    question = question_of(server, asked)
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert "a &lt;b&gt;.txt" in page and "&lt;script&gt;1" in page and "<script>1" not in page
    act(server, question, "edit", text="And now?")
    text = server.shared.engine.engine.requests[-1].messages[0].content
    assert text.startswith("--- a <b>.txt ---\n<script>1</script>\n---") and text.endswith("And now?")
    only = {
        "file-1-name": "b.md",
        "file-1-text": "alone",
        "file-2-name": "empty.md",
        "file-2-text": "",
        "text": "",
        "key": new_id(),
    }
    sent = server.client.post("/chats", data=only)
    assert sent.status_code == 303 and "empty.md" in server.client.get(sent.headers["location"]).text
    many = {f"file-{number}-text": "x" for number in range(1, 10)} | {"text": "x", "key": new_id()}
    assert server.client.post("/chats", data=many).status_code == 400


def test_question_with_sixteen_imported_attachments_can_be_edited(server: Any) -> None:
    files = [{"name": f"{number}.txt", "text": f"text {number}"} for number in range(16)]
    message = {"id": "q", "parent_id": None, "role": "user", "content": "What are they?", "attachments": files}
    chat = {"title": "Files", "prompt_date": "2026-01-01", "messages": [message]}
    data = {"format": "notso-chats", "version": 3, "chats": [chat]}
    chat_id = server.client.post("/import", json=data).headers["location"].removeprefix("/chats/")
    url = f"/chats/{chat_id}/messages/{server.last(chat_id).message_id}/edit"
    more = {"file-17-name": "17.txt", "file-1-name": "more.txt", "file-1-text": "more"}
    assert server.client.post(url, data={"text": "Which?", "key": new_id()} | more).status_code == 400
    assert server.client.post(url, data={"text": "Which?", "key": new_id()}).status_code == 303
    question = question_of(server, server.last(chat_id))
    assert [each.name for each in server.stored(question).attachments] == [each["name"] for each in files]


def test_message_text_is_returned_unformatted(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("**bold** <b>", "hm"))).ready()
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}/text"
    answer = server.client.get(url)
    assert answer.text == "**bold** <b>" and answer.headers["content-type"].startswith("text/plain")
    assert server.client.get(url + "?part=reasoning").text == "hm"
    assert server.client.get(url + "?part=all").text == "<think>\nhm\n</think>\n\n**bold** <b>"
    assert server.client.get(url + "?part=other").status_code == 400


def test_unknown_message_ids_return_404(server: Any) -> None:
    one, other = server.ask("one"), server.ask("other")
    server.finished(one), server.finished(other)
    for message in (other.message_id, new_id(), "x"):
        for verb in ("regenerate", "continue", "choose", "edit", "unsummarize"):
            url = f"/chats/{one.chat_id}/messages/{message}/{verb}"
            assert server.client.post(url, data={"key": new_id(), "text": "x"}).status_code == 404, url


def test_message_actions_work_without_scripts(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}"
    assert "<!doctype html>" in server.client.get(url + "/edit").text
    for verb in ("regenerate", "choose"):
        answer = server.client.post(f"{url}/{verb}", data={"key": new_id()})
        assert (answer.status_code, answer.headers["location"]) == (303, f"/chats/{asked.chat_id}")
        server.wait(lambda: server.chat.turns.unfinished == 0)


def test_number_of_dropped_messages_is_shown_under_the_answer(start: Start) -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        yield Event("trimmed", dropped_messages=4)
        yield from say("Fine.")

    server = start(ScriptedEngine(script)).ready()
    asked = server.ask("one")
    assert server.finished(asked).dropped_messages == 4
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert "4 older messages no longer fit in the context and were left out." in page
