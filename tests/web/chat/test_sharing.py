"""Share links, ratings, deleting one message, and regenerating with other settings."""

from __future__ import annotations

import asyncio
import json
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from scripted_engine import ScriptedEngine, say

from notso.web.chat import html_cache
from notso.web.chat.files.export import conversation, preference_rows
from notso.web.edge.access import LOCAL_OWNER
from notso.web.rendering.mathml import Formula
from notso.web.store.protocol import ChatSnapshot
from notso.web.values.ids import new_id
from notso.web.values.wording import words

Start = Callable[..., Any]
ANSWERS = iter(range(1_000_000))


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine(lambda messages, thinking: say(f"Answer {next(ANSWERS)} **x**", "a thought"))).ready()


def stored(server: Any, chat_id: str) -> list[Any]:
    found: list[Any] = server.on_loop(lambda: server.shared.store.messages("local", chat_id))
    return found


def link(server: Any, chat_id: str, days: int = 7) -> str:
    page = server.client.post(f"/chats/{chat_id}/share", data={"days": str(days)}).text
    return re.findall(r'value="[^"]*(/shared/[\w-]{32})"', page)[0]


def test_share_link_shows_messages_up_to_the_last_one(server: Any) -> None:
    asked = server.ask("What <is> it?")
    server.finished(asked)
    address = link(server, asked.chat_id)
    server.finished(server.ask("A later question", asked.chat_id))
    answer = server.client.get(address)
    assert answer.status_code == 200 and answer.headers["x-robots-tag"] == "noindex"
    assert "What &lt;is&gt; it?" in answer.text and "<strong>x</strong>" in answer.text
    assert "A later question" not in answer.text and "a thought" not in answer.text
    assert "<form" not in answer.text and "hx-post" not in answer.text, "the shared page is read-only"
    secret = address.rpartition("/")[2]
    assert secret not in server.client.get(f"/chats/{asked.chat_id}/share").text, "the link is shown only once"


def test_share_link_stays_valid_however_long_the_chat_becomes(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.web.chat.routes.sharing.MOST_SHOWN", 2)
    asked = server.ask("The first question")
    server.finished(asked)
    address = link(server, asked.chat_id)
    server.finished(server.ask("A later question", asked.chat_id))
    shared = server.client.get(address)
    assert shared.status_code == 200
    assert "The first question" in shared.text and "A later question" not in shared.text


def test_long_shared_chat_is_shown_in_parts(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [f"Question {number}" for number in range(4)]
    asked = server.ask(questions[0])
    server.finished(asked)
    for question in questions[1:]:
        server.finished(server.ask(question, asked.chat_id))
    address = link(server, asked.chat_id)
    server.finished(server.ask("A later question", asked.chat_id))
    longest = max(len(each.content) + len(each.reasoning) for each in stored(server, asked.chat_id))
    monkeypatch.setattr("notso.web.store.tree.MOST_SHOWN_CHARACTERS", 4 * (longest + 500) - 1)
    shown, pages, read = list[str](), [address], list[str]()
    plain = server.shared.store._message
    monkeypatch.setattr(server.shared.store, "_message", lambda row: (read.append(row["id"]), plain(row))[1])
    while pages:
        read.clear()
        page = server.client.get(pages.pop()).text
        shown[:0] = re.findall('<div class="bubble" dir="auto">([^<]*)', page)
        assert page.count('<article class="turn user">') == page.count('<article class="turn assistant">') <= 2
        assert len(read) <= 5, "a part is loaded without the newer parts"
        pages = [address + each for each in re.findall(r'href="([?]first=[0-9]+)"', page)]
        assert "A later question" not in page
    assert shown == questions
    for first, status in ((6, 200), (7, 404), (10**9, 404), (10**20, 400), (0, 400), (-1, 400), ("x", 400)):
        assert server.client.get(f"{address}?first={first}").status_code == status


def test_share_link_shows_edited_responses_as_its_page_says(server: Any) -> None:
    asked = server.ask("What is it?")
    server.finished(asked)
    assert words["share_edits"] in server.client.get(f"/chats/{asked.chat_id}/share").text
    address = link(server, asked.chat_id)
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}"
    server.client.post(f"{url}/edit", data={"text": "Edited later"})
    assert "Edited later" in server.client.get(address).text
    server.client.post(f"{url}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    version = server.last(asked.chat_id)
    shown = server.client.get(address).text
    assert version.message_id != asked.message_id and "Edited later" in shown
    assert server.stored(version).content.split(" **")[0] not in shown


def test_share_link_ends_when_revoked_expired_or_chat_deleted(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = server.ask("x")
    server.finished(asked)
    first, second, third = (link(server, asked.chat_id, days) for days in (1, 7, 30))
    page = server.client.get(f"/chats/{asked.chat_id}/share").text
    revoke = re.findall(r'action="(/chats/[^"]*/share/[0-9a-f]{64}/delete)"', page)
    assert len(revoke) == 3
    for each in revoke[:1]:  # the newest link
        assert server.client.post(each).status_code == 303
    assert [server.client.get(each).status_code for each in (first, second, third)] == [200, 200, 404]
    now = time.time_ns()
    with monkeypatch.context() as later:
        later.setattr("notso.web.chat.routes.sharing.current_ms", lambda: now // 1_000_000 + 2 * 86_400_000)
        assert [server.client.get(each).status_code for each in (first, second)] == [404, 200]
    server.client.post(f"/chats/{asked.chat_id}/delete", data={"current": asked.chat_id})
    gone = server.client.get(second)
    assert gone.status_code == 404 and words["share_gone"] in gone.text
    assert server.client.get("/shared/" + "x" * 32).status_code == 404
    assert server.client.get("/shared/" + "x" * 5000).status_code == 404


def test_formulas_of_a_shared_page_are_converted_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, converted = {"one": "$x^2$ and $y$", "two": r"$\unknown$"}, list[Any]()
    server = start(ScriptedEngine(lambda messages, thinking: say(texts[messages[-1].content]))).ready()
    convert = html_cache.convert_all

    async def count(formulas: Any) -> Any:
        converted.append(formulas)
        return await convert(formulas)

    monkeypatch.setattr(html_cache, "convert_all", count)
    links = []
    for question in texts:
        asked = server.ask(question)
        server.finished(asked)
        links.append(link(server, asked.chat_id))

    def shown(address: str) -> str:
        return str(server.client.get(address).text.partition("<main")[2])

    first, second = (list(map(shown, links)) for _ in range(2))
    assert first == second and first[0].count("<math") == 2 and "<math" not in first[1]
    assert converted == [(("x^2", "inline"), ("y", "inline")), ((r"\unknown", "inline"),)]
    monkeypatch.setattr(html_cache, "FAILED_SECONDS", 0.0)
    monkeypatch.setattr(html_cache, "MATHML_BYTES", 9)
    cache = server.chat.html_cache
    cache._mathml.clear()
    cache._mathml_size = 0
    assert [shown(links[0]) for _ in range(2)] == [first[0]] * 2
    assert len(converted) == 4 and cache._mathml_size == 0, "MathML beyond the limit is not kept"
    monkeypatch.setattr(html_cache, "MATHML_BYTES", 1000)
    assert [shown(links[1]) for _ in range(2)] == [first[1]] * 2
    assert len(converted) == 6, "failures are kept only for a while"


def test_memory_of_kept_formulas_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(formulas: tuple[Formula, ...]) -> list[str | None]:
        return [None] * len(formulas)

    async def fill() -> int:
        cache = html_cache.HtmlCache(*cast(list[Any], [None] * 3))
        tracemalloc.start()
        try:
            for page in range(40):
                await cache.mathml(tuple((f"\\z{page}", f"style {page}") for _ in range(1000)))
            # only what this test and the cache allocate: threads of other tests may allocate meanwhile
            places = [tracemalloc.Filter(True, each) for each in (__file__, html_cache.__file__)]
            kept = tracemalloc.take_snapshot().filter_traces(places)
            return sum(each.size for each in kept.traces)
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(html_cache, "convert_all", fail)
    monkeypatch.setattr(html_cache, "MATHML_BYTES", 1 << 20)
    assert asyncio.run(fill()) < 2 << 20


def test_temporary_chat_or_invalid_duration_cannot_be_shared(server: Any) -> None:
    asked = server.ask("x")
    server.finished(asked)
    assert server.client.post(f"/chats/{asked.chat_id}/share", data={"days": "400"}).status_code == 400
    server.on_loop(lambda: server.shared.store.update_chat("local", asked.chat_id, temporary=True))
    assert server.client.post(f"/chats/{asked.chat_id}/share", data={"days": "1"}).status_code == 400


def test_message_deletion_includes_replies_and_can_be_undone(server: Any) -> None:
    first = server.ask("one")
    server.finished(first)
    second = server.ask("two", first.chat_id)
    server.finished(second)
    before = stored(server, first.chat_id)
    url = f"/chats/{first.chat_id}/messages"
    page = server.client.post(f"{url}/{before[2].id}/delete", headers={"HX-Request": "true"}).text
    assert words["toast_message_deleted"] in page
    assert [each.id for each in stored(server, first.chat_id)] == [each.id for each in before[:2]]
    undo = re.findall(r'action="(/undo/[0-9a-f]+)"', page)[0]
    assert server.client.post(undo).status_code == 303
    assert stored(server, first.chat_id) == before
    server.client.post(f"{url}/{before[1].id}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    version = stored(server, first.chat_id)[-1]
    server.client.post(f"{url}/{version.id}/delete")
    assert [each.id for each in stored(server, first.chat_id)] == [each.id for each in before], "deletes one version"
    shown = server.client.get(f"/chats/{first.chat_id}").text
    assert before[3].content.split(" **")[0] in shown, "the other version and its continuation stay"
    server.finished(server.ask("three", first.chat_id))


def test_answers_can_be_rated_and_ratings_removed(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages"
    question = stored(server, asked.chat_id)[0]
    for mode, rating in (("up", 1), ("down", -1), ("none", 0), ("up", 1)):
        assert server.client.post(f"{url}/{asked.message_id}/rate", data={"mode": mode}).status_code == 303
        assert server.stored(asked).rating == rating
    assert server.client.post(f"{url}/{asked.message_id}/rate", data={"mode": "best"}).status_code == 400
    assert server.client.post(f"{url}/{question.id}/rate", data={"mode": "up"}).status_code == 400
    page = server.client.get(f"/chats/{asked.chat_id}").text
    assert page.count('aria-pressed="true" aria-label="Good response"') == 1
    assert server.client.get(f"/chats/{asked.chat_id}/export/json").json()["chats"][0]["messages"][1]["rating"] == 1


def test_ratings_determine_preference_pairs(server: Any, tmp_path: Path) -> None:
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}"
    server.client.post(f"{url}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    whole = server.on_loop(lambda: server.shared.store.chat_snapshot(LOCAL_OWNER, asked.chat_id))
    question, first, second = whole.messages

    def rated(*ratings: int) -> ChatSnapshot:
        pairs = zip((first, second), ratings, strict=True)
        return replace(whole, messages=(question, *(replace(each, rating=rating) for each, rating in pairs)))

    def chosen(chat: ChatSnapshot) -> list[str]:
        return [pair["chosen"][0]["content"].rpartition("\n")[2] for pair in preference_rows(chat)]

    assert chosen(rated(0, 0)) == [second.content], "only the rating of the shown answer counts"
    assert chosen(rated(1, 0)) == [first.content]
    assert chosen(rated(0, -1)) == [first.content]
    assert chosen(rated(-1, -1)) == []
    assert conversation(rated(0, 0)) is not None and conversation(rated(0, -1)) is None


def test_regenerating_with_other_settings_applies_them_once(server: Any) -> None:
    asked = server.ask("one")
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}"
    form = server.client.get(f"{url}/again").text
    assert 'name="temperature"' in form and f'action="{url}/regenerate"' in form
    engine = server.shared.engine.engine
    server.client.post(f"{url}/regenerate", data={"key": new_id(), "temperature": "0.25"})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert engine.requests[-1].params.temperature == 0.25
    server.client.post(f"{url}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert engine.requests[-1].params.temperature != 0.25, "the settings apply only to that version"
    bad = server.client.post(f"{url}/regenerate", data={"key": new_id(), "temperature": "hot"})
    assert bad.status_code == 400 and "Temperature" in bad.text
    assert len(stored(server, asked.chat_id)) == 4
    assert all(each.model for each in stored(server, asked.chat_id) if each.role == "assistant")


def test_import_keeps_models_and_ratings(server: Any) -> None:
    message = {"id": "a", "parent_id": None, "role": "user", "content": "x"}
    answer = message | {"id": "b", "parent_id": "a", "role": "assistant", "model": "gpt-4o", "rating": -1}
    chat = {"title": "T", "prompt_date": "2025-07-08", "messages": [message, answer]}
    body = json.dumps({"format": "notso-chats", "version": 3, "chats": [chat]})
    sent = server.client.post("/import", content=body, headers={"Content-Type": "application/json"})
    found = stored(server, sent.headers["location"].removeprefix("/chats/"))[1]
    assert (found.model, found.rating) == ("gpt-4o", -1)
    assert "gpt-4o" in server.client.get(sent.headers["location"]).text
