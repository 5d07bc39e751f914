"""A turn as server-sent events. GET attaches and changes nothing; a reader that goes away stops nothing.

Events are encoded here and sent by a plain streaming response: when a reader leaves in the middle of an event,
FastAPI's own producer for generator routes ends with an unhandled group of errors.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from fastapi.sse import format_sse_event

from notso.web.store.protocol import StoredMessage
from notso.web.turns.html_patches import announcement_html, update_html
from notso.web.turns.tab_feed import Feed
from notso.web.turns.turn_log import Place, Stat, TurnLog
from notso.web.values.wording import words

PING_SECONDS = 15.0


def last_number(header: str | None) -> int | None:
    """The number in `Last-Event-ID`; None where it is missing or not one of ours."""
    if header is None or not header.isascii() or not header.isdecimal() or len(header) > 15:
        return None
    return int(header)


async def turn_events(message_id: str, log: TurnLog, after: int | None) -> AsyncIterator[bytes]:
    """All updates after number `after` (None: a snapshot first), and `done` as the last event, always."""
    yield format_sse_event(comment="attached")
    place = Place(after)
    with log.reading():
        while True:
            news, place = _next_events(message_id, log, place)
            yield news
            number = place.number or 0
            if log.finished and number == log.number:
                break
            while not await log.wait(number, PING_SECONDS):
                yield format_sse_event(comment="ping")
    if log.stats:
        yield _named("usage", message_id, number, **log.stats)
    if log.error is not None:
        yield _named("error", message_id, number, message=log.error, retryable=True)
    yield _named("done", message_id, number, state=log.phase)


def _next_events(message_id: str, log: TurnLog, place: Place) -> tuple[bytes, Place]:
    """What a reader at `place` lacks, and where it is then: written once for all who are there."""
    if place not in log.encoded:
        log.encoded[place] = _written(message_id, log, place)
    return log.encoded[place]


def _written(message_id: str, log: TurnLog, place: Place) -> tuple[bytes, Place]:
    update = log.since(place.number)
    begins, events = place.phase != update.phase, list[bytes]()
    if begins and place.phase is not None:
        # Before the words it begins: thoughts fold while nothing stands under them that would jump. Its number is the
        # last one shown, for the update is yet to come.
        events.append(_named("status", message_id, place.number, state=update.phase, label=update.label))
    news = announcement_html(update.phase, log.words) if begins else ""
    if place.number != update.number or place.phase is None:
        events.append(format_sse_event(data_str=update_html(message_id, update) + news, id=str(update.number)))
    if place.phase is None:
        events.append(_named("status", message_id, update.number, state=update.phase, label=update.label))
    if place.asking != update.asking and (place.asking is not None or log.cards):
        events.append(_named("tool", message_id, update.number, call=update.asking))
    progress = tuple(update.progress.items()) or place.progress
    if progress != place.progress:
        events.append(_named("progress", message_id, update.number, phase=update.phase, **update.progress))
    return b"".join(events), Place(update.number, update.phase, update.asking, progress)


async def feed_events(
    feed: Feed, after: str, owner: str, chat_id: str, tab: str, *, numbered: bool = True
) -> AsyncIterator[bytes]:
    """What other tabs change, for as long as the page listens; not `numbered` where it travels with other numbers.

    What its own tab did counts too, until it listens: a page rendered before that and shown after it lacks it.
    """
    revision, changed = feed.revision, feed.since(after, owner, chat_id, tab="")
    yield format_sse_event(comment="attached")
    while not feed.closed:
        for event in changed:
            yield format_sse_event(event=event, data_str="{}", id=revision if numbered else None)
        if not await feed.wait(revision, PING_SECONDS):
            yield format_sse_event(comment="ping")
        known, revision = revision, feed.revision
        changed = feed.since(known, owner, chat_id, tab)


async def both(events: AsyncIterator[bytes], others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`events` to their end, and between them the `others`: so a page holds one connection and not two."""
    reading = {asyncio.ensure_future(anext(each, None)): each for each in (events, others)}
    try:
        while events in reading.values():
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                source = reading.pop(read)
                if (event := read.result()) is not None:
                    yield event
                    reading[asyncio.ensure_future(anext(source, None))] = source
    finally:
        for read in reading:
            read.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def finished_log(message: StoredMessage, answer_html: str, reasoning_html: str) -> TurnLog:
    """The log of a turn whose own log is gone: its end, from the database."""
    log = TurnLog()
    log.write("reasoning", reasoning_html, "")
    log.write("answer", answer_html, "")
    log.words = len(message.content.split())
    error = message.note if message.state == "failed" else None
    log.finish(message.state, words[f"phase_{message.state}"], error, asdict(message.numbers))
    return log


def _named(event: str, message_id: str, number: int | None, **data: str | bool | Stat) -> bytes:
    return format_sse_event(event=event, data_str=json.dumps({"message": message_id, **data}), id=str(number))
