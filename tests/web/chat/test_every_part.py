"""One question to every part of a document: no part is omitted, repeated or cut off, and the run can be stopped."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents.made import text_pdf
from scripted_engine import ScriptedEngine, say
from web.chat.test_documents import ask, upload

from notso.documents.passages import estimated_tokens, group_passages, split_into_passages
from notso.smollm3 import EngineError, Event, Message
from notso.smollm3.output.generation import Generation
from notso.web.chat import submit
from notso.web.engine.host import EngineHost
from notso.web.engine.port import Request
from notso.web.engine.running import RunningRequest, RunningRequests
from notso.web.turns.every_part import _COUNT, AT_ONCE, MAX_PART_TOKENS, SHARE_OF_CONTEXT, DocumentPart, answer_parts

RECORD = re.compile(r"record number (\d+)\b")
RECORDS = 102


def counting(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
    """Answer from the prompt alone with the number of records in it and their names."""
    found = RECORD.findall(messages[-1].content)
    return say(f"{len(found)} records: {', '.join(found)}")


def book(pages: int, records: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [f"Page {number}. " + "The heron waits in the reeds of the river. " * 28 for number in range(1, pages + 1)]
    for number in range(1, records + 1):
        at = rng.randrange(pages)
        place = rng.randrange(len(texts[at]) - 1)
        place = texts[at].index(" ", place - 1) if " " in texts[at][place - 1 :] else place
        texts[at] = f"{texts[at][:place]} Here is record number {number}. {texts[at][place:]}"
    return texts


@pytest.mark.parametrize("seed", range(20))
def test_volumes_contain_every_passage_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    pages = ["The stork waits. " * rng.randrange(400) for _ in range(rng.randrange(1, 30))]
    starts = [sum(map(len, pages[:number])) for number in range(len(pages))]
    text, most = "".join(pages), rng.choice([300, 1000, 5000])
    passages = list(split_into_passages(text, starts))
    volumes = list(group_passages(text, passages, most))
    held = [each for volume, _ in volumes for each in passages if volume.start <= each.start < each.end <= volume.end]
    assert held == passages
    for (volume, last), (after, _) in zip(volumes, [*volumes[1:], (None, 0)], strict=True):
        inside = [each for each in passages if volume.start <= each.start < volume.end]
        assert (volume.page, last) == (inside[0].page, inside[-1].page)
        assert sum(estimated_tokens(text[each.start : each.end]) for each in inside) <= most
        assert after is None or after.page >= last


def test_every_part_of_a_500_page_book_is_asked_exactly_once(start: Callable[..., Any]) -> None:
    engine = ScriptedEngine(counting)
    server = start(engine).ready()
    found = upload(server, "book.txt.pdf", text_pdf(*([page] for page in book(500, RECORDS, 1))))
    assert "500 pages" in found["facts"]
    asked = ask(server, "How many records are there?", found["id"], every="on")
    answer = server.stored(asked)
    assert answer.state == "done" and f"**Sum: {RECORDS}**" in answer.content
    listed = [
        int(each)
        for line in answer.content.splitlines()
        if " records: " in line
        for each in re.findall(r"\d+", line)[1:]
    ]
    assert sorted(listed) == list(range(1, RECORDS + 1))
    assert len(engine.requests) > 20 and answer.numbers.prompt_tokens >= 0
    titles = re.findall(r"\*\*book\.txt\.pdf, pages (\d+) to (\d+)\*\*", answer.content)
    assert titles[0][0] == "1" and titles[-1][1] == "500" and len(titles) == len(engine.requests)
    assert all(int(before[1]) + 1 == int(after[0]) for before, after in itertools.pairwise(titles))
    readings = {each.options.prefix.reading for each in engine.requests}
    assert len(readings) == len(engine.requests)
    server.client.headers["Accept-Language"] = "fr"
    again = ask(server, "And again?", found["id"], every="on")
    assert ", pages 1 à " in server.stored(again).content
    assert {each.options.prefix.reading for each in engine.requests} == readings, "each part is computed only once"
    assert not any(each.options.thinking for each in engine.requests)


def test_parts_stay_within_token_limit_with_dense_pages(start: Callable[..., Any]) -> None:
    engine = ScriptedEngine(counting)
    prose = "The heron waits in the reeds of the river. " * 28
    digits = "0 1 2 3 4 5 6 7 8 9 " * 60

    def tokenize(text: str) -> list[int]:
        return [0] * (len(text) // 4 + 6 * text.count("7 8"))

    engine.tokenize = tokenize  # type: ignore[method-assign, assignment]
    server = start(engine).ready()
    found = upload(server, "tables.pdf", text_pdf(*([prose] for _ in range(200)), *([digits] for _ in range(60))))
    ask(server, "How many records are there?", found["id"], every="on")
    most = int(SHARE_OF_CONTEXT * engine.info.context_tokens)
    sizes = [len(tokenize(each.messages[0].content[: each.options.prefix.characters])) for each in engine.requests]
    assert len(sizes) > 5 and max(sizes) <= min(MAX_PART_TOKENS, most) + 50  # 50 tokens for the document's name
    digits_found = sum(each.messages[0].content.count("7 8") for each in engine.requests)
    assert digits_found == 60 * 60, "no text is omitted or repeated"


def test_stopping_every_part_answer_asks_no_further_parts(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked_parts, go_on = threading.Event(), threading.Event()

    def script(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
        if "This is part 1 of" in messages[-1].content:
            return counting(messages, thinking)
        asked_parts.set()
        assert go_on.wait(60)
        return counting(messages, thinking)

    engine = ScriptedEngine(script, slots=2)
    server = start(engine).ready()
    found = upload(server, "book.pdf", text_pdf(*([page] for page in book(60, 9, 2))))
    fields = {"text": "How many?", "key": submit.new_id(), "every": "on"}
    fields |= {"file-1-name": "x", "file-1-document": found["id"]}
    chat_id = server.client.post("/chats", data=fields).headers["location"].rpartition("/")[2]
    asked = server.last(chat_id)
    assert asked_parts.wait(60)
    caplog.set_level(logging.INFO, "notso.access")
    server.client.post(f"/generations/{asked.generation_id}/stop", data={})
    go_on.set()
    answer = server.finished(asked)
    assert answer.state == "stopped" and "Sum" not in answer.content
    assert len(engine.requests) <= 5, "no parts are asked after the stop"
    server.wait(lambda: f"generation ended: stopped by the user; id {asked.generation_id}" in caplog.text)


def test_every_part_answer_can_be_stopped_while_its_model_is_loaded() -> None:
    """Requests that are stopped before they reach the engine have no events."""

    async def run() -> list[Event]:
        host = EngineHost(lambda: None)  # type: ignore[arg-type, return-value]
        host.default.state = "loading"
        parts = [DocumentPart(f"part {number}", Request((Message("user", "?"),))) for number in range(4 * AT_ONCE)]
        running: list[RunningRequest] = []
        answer = answer_parts(RunningRequests(host, 2), parts, running.append, lambda: len(running) == AT_ONCE)

        async def collect() -> list[Event]:
            return [event async for event in answer]

        collecting = asyncio.create_task(collect())
        while len(running) < AT_ONCE:
            await asyncio.sleep(0)
        for each in running:
            each.stop()
        return await asyncio.wait_for(collecting, 60)

    assert all(event.finish_reason == "cancelled" for event in asyncio.run(run()))


def test_failure_of_one_part_ends_the_answer() -> None:
    def submit(messages: Sequence[Message], *_: object) -> Generation:
        generation = Generation()
        error = Event("error", error=EngineError("a number was not finite"))
        end = Event("end", finish_reason="stop")
        generation.write([error] if messages[0].content == "0" else [*say("Fine."), end], last=True)
        return generation

    async def run() -> list[Event]:
        host = EngineHost(lambda: None)  # type: ignore[arg-type, return-value]
        host.default.state, host.default.engine = "ready", SimpleNamespace(submit=submit)  # type: ignore[assignment]
        parts = [DocumentPart(f"part {each}", Request((Message("user", str(each)),))) for each in range(2 * AT_ONCE)]
        answer = answer_parts(RunningRequests(host, 2), parts, lambda running: None, lambda: False)
        return [event async for event in answer]

    events = asyncio.run(asyncio.wait_for(run(), 60))
    assert [event.kind for event in events] == ["error"]


def test_every_part_answer_is_completed_after_a_crash(start: Callable[..., Any], tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def script(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
        if "This is part 1 of" not in messages[-1].content:
            begun.set()
            assert go_on.wait(60)
        return counting(messages, thinking)

    server = start(ScriptedEngine(script)).ready()
    found = upload(server, "book.pdf", text_pdf(*([page] for page in book(60, 9, 2))))
    fields = {"text": "How many?", "key": submit.new_id(), "every": "on"}
    fields |= {"file-1-name": "x", "file-1-document": found["id"]}
    chat_id = server.client.post("/chats", data=fields).headers["location"].rpartition("/")[2]
    asked = server.last(chat_id)
    assert begun.wait(60)

    def trace(server: Any) -> Any:
        return server.on_loop(lambda: server.shared.store.trace("local", asked.message_id))

    server.wait(lambda: trace(server).parts)
    assert (trace(server).parts, trace(server).tries) == (1, 1)
    shutil.copytree(tmp_path / "data", tmp_path / "left", ignore=shutil.ignore_patterns("*lock*"))
    go_on.set()
    whole = server.finished(asked)
    engine = ScriptedEngine(counting)
    again = start(engine, data_dir=tmp_path / "left").ready()
    answer = again.finished(asked)
    assert (answer.state, answer.content) == ("done", whole.content) and "**Sum: 9**" in whole.content
    assert (trace(again).parts, trace(again).tries) == (len(engine.requests), 1), "a finished part resets the attempts"
    seeds = {each.params.seed for each in engine.requests}
    assert seeds == {each.params.seed for each in server.shared.engine.default.engine.requests} and None not in seeds


def test_every_part_requires_documents_and_limits_the_parts(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(counting)
    server = start(engine).ready()
    refused = ask(server, "How many?", every="on")
    assert refused.status_code == 400 and "parts in total" in refused.text
    found = upload(server, "book.pdf", text_pdf(*([page] for page in book(60, 9, 2))))
    assert "Ask every part" in server.client.get(f"/documents/{found['id']}").text
    monkeypatch.setattr(submit, "MAX_PARTS", 2)
    assert ask(server, "How many?", found["id"], every="on").status_code == 400
    assert not engine.requests


def test_part_answers_without_numbers_have_no_sum(start: Callable[..., Any]) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("None that I see."))).ready()
    found = upload(server, "book.pdf", text_pdf(*([page] for page in book(60, 9, 2))))
    content = server.stored(ask(server, "Which?", found["id"], every="on")).content
    assert content.count("None that I see.") == content.count("**book.pdf") > 2 and "Sum" not in content


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ("3", 3),
        ("\n**3**\n", 3),
        ("**1,234** records", 1234),
        ("3 [[1: the heron waits]]", 3),
        ("2\n\nAlice and Bob", 2),
        ("3.", 3),
        ("**3.**", 3),
        ("12.\n[[1: twelve storks]]", 12),
        ("1. Alice\n2. Bob", None),
        ("**1.** Alice", None),
        ("1) Alice", None),
        ("1: Alice", None),
        ("2.5 meters", None),
        ("2,5 meters", None),
        ("3rd of May", None),
        ("1999-12-31", None),
        ("-5 degrees", None),
        ("50% of them", None),
        ("3/4 of them", None),
    ],
)
def test_only_whole_counts_are_added_up(answer: str, count: int | None) -> None:
    found = _COUNT.match(answer)
    assert (int(found[1].replace(",", "")) if found is not None else None) == count


def test_answers_with_list_markers_have_no_sum(start: Callable[..., Any]) -> None:
    server = start(ScriptedEngine(lambda messages, thinking: say("1. Alice\n2. Bob"))).ready()
    found = upload(server, "book.pdf", text_pdf(*([page] for page in book(60, 9, 2))))
    content = server.stored(ask(server, "Who?", found["id"], every="on")).content
    assert content.count("1. Alice") > 2 and "Sum" not in content
