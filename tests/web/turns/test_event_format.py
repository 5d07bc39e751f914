"""No text can forge a stream event, at whatever byte the network splits the stream."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from notso.web.rendering.markdown import render_markdown
from notso.web.turns import sse, turn_log
from notso.web.turns.sse import turn_events
from notso.web.turns.turn_log import AnswerStatus, ReaderPosition, TurnLog
from notso.web.values.wording import language

FORGERIES = [
    *(
        "a\n\nevent: done\ndata: {}\n\n",
        "a\r\revent: done\rdata: x\r\r",
        "a\r\n\r\nid: 999\r\n\r\n",
        "data: x",
        "event: done",
    ),
    *(
        "\u2028event: done\u2028\u2028",
        "\u2029data: x",
        "\x85event: done\x85\x85",
        "\x0b\x0cevent: done\x0c\x0c",
        "\x1c\x1d\x1eevent: done",
    ),
    *(
        "<!--snapshot-->",
        "\n",
        "\r",
        "\r\n",
        ":",
        "id: \x00",
        "retry: 1\n\n",
        "```\n\nevent: done\n\n```",
        "a\n\n\n\ndata: [DONE]\n\n",
    ),
    *("\ufeff\n\nevent: done", "é\n\n漢字\r\r😀\u2028"),
]


async def encoded(log: TurnLog, after: int | None = None) -> bytes:
    return b"".join([event async for event in turn_events("0190-x", log, after)])


@pytest.mark.parametrize("text", FORGERIES)
def test_event_stream_cannot_be_forged_by_text(event_reader: Any, text: str) -> None:
    async def make() -> tuple[bytes, str]:
        log = TurnLog()
        html = render_markdown(text)
        # The tail is not rendered, because framing must not rely on Markdown to escape it.
        log.write("answer", html, text.replace("<", ""))
        log.finish("failed", "Error", error=text)
        return await encoded(log), html

    wire, html = asyncio.run(make())
    assert b"\r" not in wire, "htmx reads a blank line if CR and LF arrive separately"
    for cut in range(len(wire) + 1):
        reader = event_reader()
        reader.feed(wire[:cut])
        reader.feed(wire[cut:])
        assert [event.event for event in reader.events] == ["message", "status", "error", "done"]
    assert html.replace("\r\n", "\n").replace("\r", "\n") in reader.events[0].data
    assert {event.id for event in reader.events} == {"2", "3"} or len({event.id for event in reader.events}) == 1


def test_log_since_returns_only_missing_updates() -> None:
    async def run() -> None:
        log = TurnLog()
        log.write("answer", "<p>1</p>", "t1")
        first = log.since(None)
        log.write("answer", "<p>2</p>", "")
        log.write("answer", "", "t3")
        rest = log.since(first.number)
        assert (first.snapshot, rest.snapshot) == (True, False)
        assert first.channels["answer"].append == "<p>1</p>"
        assert (rest.channels["answer"].append, rest.channels["answer"].tail) == ("<p>2</p>", "t3")
        assert "reasoning" not in rest.channels
        assert log.since(log.number).channels == {}
        assert log.since(log.number + 1).snapshot, "a number ahead of the log needs a snapshot"
        assert log.html("answer") == "<p>1</p><p>2</p>t3"

    asyncio.run(run())


def test_log_wait_returns_on_news_or_timeout() -> None:
    async def run() -> None:
        log = TurnLog()
        assert not await log.wait(0, 0.01)
        waiter = asyncio.create_task(log.wait(0, 60))
        await asyncio.sleep(0)
        log.set_status(AnswerStatus("prefill", "Reading"))
        assert await asyncio.wait_for(waiter, 30)
        assert await log.wait(0, 0), "the event is there already"

    asyncio.run(run())


def test_updates_for_many_readers_are_batched_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_for: list[int] = []
    write = sse._encode_update

    def counted(message_id: str, log: TurnLog, place: ReaderPosition) -> Any:
        encoded_for.append(log.number)
        return write(message_id, log, place)

    monkeypatch.setattr(sse, "_encode_update", counted)
    monkeypatch.setattr(turn_log, "UPDATE_SECONDS", 600.0)

    async def run() -> list[bytes]:
        log = TurnLog()
        readers = [asyncio.create_task(encoded(log)) for _ in range(30)]
        for number in range(12):
            log.write("answer", f"<p>{number}</p>", "")
            await asyncio.sleep(0)
        log.finish("done", "Done")
        return await asyncio.gather(*readers)

    wires = asyncio.run(run())
    assert len(set(wires)) == 1
    assert re.findall(rb"<p>(\d+)</p>", wires[0]) == [b"%d" % number for number in range(12)]
    assert len(encoded_for) <= 4, "updates that arrived together must be encoded together"


def test_updates_are_in_the_language_of_each_reader() -> None:
    async def read(log: TurnLog, code: str) -> bytes:
        language.set(code)
        return await encoded(log)

    async def run() -> list[bytes]:
        log = TurnLog()
        log.write("answer", render_markdown("```\nx\n```"), "")
        log.finish("done", "Done")
        return [await asyncio.create_task(read(log, code)) for code in ("en", "de")]

    english, german = asyncio.run(run())
    assert b">Copy</button>" in english and b">Kopieren</button>" in german


def test_number_of_encoded_updates_of_an_ended_answer_is_limited() -> None:
    async def run() -> int:
        log = TurnLog()
        for number in range(sse.MAX_ENCODED + 1):
            log.write("answer", f"<p>{number}</p>", "")
        log.finish("done", "Done")
        for after in range(log.number):
            await encoded(log, after)
        return len(log.encoded)

    assert 0 < asyncio.run(run()) <= sse.MAX_ENCODED


def test_feed_reports_a_change_to_a_chat_that_it_no_longer_lists() -> None:
    async def run() -> list[list[str]]:
        feed = sse.Feed()
        before = feed.revision
        for chat in ("a", *map(str, range(sse.MAX_CHATS))):
            feed.announce("owner", chat, "tab")
        return [feed.since(before, "owner", "a", "other"), feed.since(feed.revision, "owner", "a", "other")]

    assert asyncio.run(run()) == [["chats", "turns"], []]


def test_feed_reports_changes_to_a_chat_only_to_its_owner() -> None:
    async def run() -> list[list[str]]:
        feed = sse.Feed()
        before = feed.revision
        feed.announce("ann", "chat of ann", "tab")
        feed.announce("ann", "chat of bob", "tab")  # anyone can send any id
        return [feed.since(before, owner, f"chat of {owner}", "other") for owner in ("ann", "bob")] + [
            feed.since(before, "bob", "chat of ann", "other")
        ]

    assert asyncio.run(run()) == [["chats", "turns"], [], []]


def test_many_changes_of_one_user_do_not_reload_pages_of_others() -> None:
    async def run() -> list[list[str]]:
        feed = sse.Feed()
        feed.announce("bob", "listed", "tab")
        before = feed.revision
        for number in range(2 * sse.MAX_CHATS):
            feed.announce("ann", str(number), "tab")
        assert sum(map(len, feed._turns.values())) == sse.MAX_CHATS
        return [feed.since(before, "bob", chat, "other") for chat in ("listed", "unlisted")]

    assert asyncio.run(run()) == [[], []]


def test_feed_of_many_users_is_limited() -> None:
    async def run() -> list[list[str]]:
        feed = sse.Feed()
        before = feed.revision
        for number in range(sse.MAX_CHATS + 1):
            feed.announce(f"user {number}", "chat", "tab")
        assert sum(map(len, feed._turns.values())) == sse.MAX_CHATS
        return [feed.since(before, f"user {number}", "chat", "other") for number in (0, sse.MAX_CHATS)]

    assert asyncio.run(run()) == [["chats", "turns"]] * 2
