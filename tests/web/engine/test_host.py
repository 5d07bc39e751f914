"""Loading and switching an engine, and the requests that wait meanwhile."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scripted_engine import ScriptedEngine, say

from notso.smollm3 import ModelFileError
from notso.web.engine.port import Request
from notso.web.values.ids import new_id

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true"}


def endless() -> Callable[[object, bool], Any]:
    return lambda messages, thinking: say("word " * 5000, piece=5)


def test_chats_run_concurrently_and_excess_chat_is_queued(start: Start) -> None:
    engine = ScriptedEngine(endless(), pace_seconds=0.01, slots=3)
    server = start(engine).ready()
    asked = []
    for number in range(4):  # Send one at a time: two threads submit requests, so one request could overtake another.
        asked.append(server.ask(str(number)))
        server.wait(lambda: engine.stats().running + engine.stats().waiting == len(asked))
    server.wait(lambda: all(server.stored(each).content for each in asked[:3]))
    assert server.chat.turns.unfinished == 4 and server.on_loop(lambda: server.shared.requests.waiting) == 1
    assert "Queued (#1)" in server.stream(asked[3], until=lambda event: "Queued (#1)" in event.data)[-1].data
    for each in asked:
        server.client.post(f"/generations/{each.generation_id}/stop", data={})
    assert {server.finished(each).state for each in asked} == {"stopped"}


def test_reload_of_an_idle_model_keeps_the_server_healthy(start: Start) -> None:
    """A load balancer would otherwise remove a server whose next request loads the model again."""
    first, gate, sources = ScriptedEngine(), threading.Event(), []

    def load() -> ScriptedEngine:
        sources.append(first if not sources else ScriptedEngine())
        assert sources[-1] is first or gate.wait(60)
        return sources[-1]

    server = start(load, keep_alive_seconds=0.0)
    host = server.shared.engine
    server.wait(lambda: first.closed and host.state == "unloaded")
    asked = server.ask("one")
    server.wait(lambda: len(sources) == 2)
    assert host.state == "loading"
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/v1/models").json()["data"], "the model's names stay known"
    gate.set()
    assert server.finished(asked).state == "done"


def test_model_switch_keeps_running_and_waiting_chats(start: Start) -> None:
    old = ScriptedEngine(endless(), pace_seconds=0.01, name="Old")
    gate, order = threading.Event(), []

    def load() -> ScriptedEngine:
        order.append(("loading", old.closed))
        assert gate.wait(60)
        return ScriptedEngine(lambda messages, thinking: say("New words."), name="New")

    server = start(old).ready()
    running = server.ask("one")
    server.wait(lambda: server.stored(running).content != "")
    server.on_loop(lambda: server.shared.engine.switch(load))
    assert server.client.get("/health").status_code == 503
    waiting = server.ask("two")
    assert server.stored(waiting).active and server.stored(running).active, "one continues, the new one waits"
    seen = server.stream(waiting, until=lambda event: "Loading" in event.data)
    assert "Loading" in seen[-1].data, "the status says that a model is loading"
    assert order == [], "without a plan for two models, the new one is not loaded beside the old one"
    server.client.post(f"/generations/{running.generation_id}/stop", data={})
    assert server.finished(running).state == "stopped"
    gate.set()
    assert server.finished(waiting).content == "New words."
    assert order == [("loading", True)], "the old engine is closed before the new one is loaded"
    assert server.client.get("/health").json()["model"] == "New"
    answer = server.ask("three", running.chat_id)
    assert server.finished(answer).content == "New words."


def test_failed_model_load_keeps_server_running(start: Start) -> None:
    def broken() -> ScriptedEngine:
        raise ModelFileError("not a SmolLM3")

    server = start(ScriptedEngine(name="Old")).ready()
    asked = server.ask("one")
    server.finished(asked)
    server.on_loop(lambda: server.shared.engine.switch(broken))
    server.wait(lambda: server.shared.engine.state == "failed")
    assert server.client.get(f"/chats/{asked.chat_id}").status_code == 200
    assert "not a SmolLM3" in server.client.get("/").text
    server.on_loop(lambda: server.shared.engine.switch(ScriptedEngine))
    assert server.finished(server.ask("two", asked.chat_id)).state == "done"


def test_last_of_two_concurrent_switches_wins(start: Start) -> None:
    engines = [ScriptedEngine(name=name) for name in ("A", "B")]
    server = start(ScriptedEngine(name="Old")).ready()

    def switch_twice() -> None:
        for engine in engines:
            server.shared.engine.switch(lambda engine=engine: engine)

    server.on_loop(switch_twice)
    server.wait(lambda: server.shared.engine.state == "ready")
    assert server.shared.engine.info.name == "B"
    server.wait(lambda: not server.shared.engine._tasks)
    assert server.shared.engine.engine is engines[1] and not engines[1].closed


def test_stop_cancels_message_waiting_for_model(start: Start) -> None:
    gate = threading.Event()

    def load() -> ScriptedEngine:
        assert gate.wait(60)
        return engine

    engine = ScriptedEngine()
    server = start(load)
    asked = server.ask("one")
    server.client.post(f"/generations/{asked.generation_id}/stop", data={})
    assert server.finished(asked).state == "stopped"
    gate.set()
    server.ready()
    assert engine.requests == []


def without_trace(request: Request) -> Request:
    """Return the request without fields that only record its answer: the seed and the token ids."""
    return replace(
        request, params=replace(request.params, seed=None), options=replace(request.options, token_ids=False)
    )


def test_draft_prefill_matches_sent_request(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("one two three"))
    server = start(engine).ready()
    server.client.post("/settings", data={"system_prompt": "Be brief.", "tools": "clock", "max_tokens": "99"})

    def typed(url: str, **fields: str) -> None:
        assert server.client.post(f"{url}/estimate", data=fields, headers=FRAGMENT).status_code == 200

    typed("", text="\na question\n", thinking="on")
    asked = server.ask("\na question\n")
    server.finished(asked)
    first = without_trace(engine.requests[0])  # the chat did not exist while the text was being typed
    nameless = replace(first, options=replace(first.options, conversation=None))
    server.wait(lambda: engine.drafts == [nameless])
    url = f"/chats/{asked.chat_id}"
    server.client.post(f"{url}/settings", data={"when_full": "drop_oldest", "keep_thinking": "on"})
    typed(url, text="more", **{"file-1-name": "f", "file-1-text": "x y z"})
    fields = {"text": "more", "key": new_id(), "file-1-name": "f", "file-1-text": "x y z"}
    assert server.client.post(f"{url}/messages", data=fields, headers=FRAGMENT).status_code == 200
    server.finished(server.last(asked.chat_id))
    server.wait(lambda: len(engine.drafts) == 2)
    draft, sent = engine.drafts[-1], without_trace(engine.requests[-1])
    options = draft.options
    assert draft == sent and options.when_full == "drop_oldest" and not options.thinking and options.tools
    assert draft.messages[-1].content.startswith("--- f ---\nx y z")


def test_draft_prefill_is_skipped_when_unusable_or_disabled(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("one two three"))
    server = start(engine).ready()

    def typed(url: str, text: str) -> None:
        assert server.client.post(f"{url}/estimate", data={"text": text}, headers=FRAGMENT).status_code == 200

    typed("", "")
    typed("", " \n ")
    engine.gate.clear()
    asked = server.ask("a question")
    url = f"/chats/{asked.chat_id}"
    typed(url, "while it is being answered")
    engine.gate.set()
    server.finished(asked)
    typed(url, "first")
    server.client.post(f"{url}/settings", data={"speculative_prefill": "off"})
    typed(url, "where it is switched off")
    typed(url, "w " * 5000)
    typed("", "last")
    server.wait(lambda: len(engine.drafts) >= 2)
    assert [draft.messages[-1].content for draft in engine.drafts] == ["first", "last"]


def test_token_meter_counts_chat_draft_and_attachments(start: Start) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("one two three"))).ready()

    def measured(url: str, **fields: str) -> tuple[int, dict[str, int]]:
        page = server.client.post(url, data=fields, headers=FRAGMENT).text
        used = int(re.findall(r'aria-valuenow="(\d+)"', page)[0])
        return used, dict(re.findall(r"<dt>([^<]*)</dt><dd>([\d,]*)</dd>", page))  # type: ignore[arg-type]

    used, parts = measured("/estimate", text="four words are here")
    assert used == 24 and parts["Draft"] == "4"
    asked = server.ask("a question")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}"
    server.client.post(f"{url}/settings", data={"system_prompt": "be very brief"})
    used, parts = measured(f"{url}/estimate", text="more words", **{"file-1-name": "f", "file-1-text": "x y z"})
    assert used == 20 + 3 + 5 + 2 + 3 + 8, "the count includes the file name, which stands before and after the text"
    assert (parts["Draft"], parts["Messages"], parts["Attachments"]) == ("2", "5", "11")
    assert measured(f"{url}/estimate")[0] == 28
    assert (
        "Message too long" in server.client.post(f"{url}/estimate", data={"text": "w " * 5000}, headers=FRAGMENT).text
    )


def test_checked_options_reach_engine_unchanged(start: Start) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    server = start(engine).ready()
    asked = server.ask("one")
    server.wait(lambda: len(engine.requests) == 1)
    turn = server.on_loop(lambda: server.chat.turns.find(asked.generation_id))
    assert engine.requests[0].options == turn.request.options
    engine.gate.set()
    server.finished(asked)
